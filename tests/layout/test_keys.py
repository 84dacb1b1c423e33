"""The table of layout keys: what loops over it, and how many files spell a key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shardwise
from shardwise.layout.keys import KEYS

MOST = 6
"""Source files that may spell a key: to add one touches no more."""


def _words(tree: ast.AST) -> Iterator[str]:
    """Names, attributes, arguments and texts of a module; of its documentation nothing."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                yield word
            case ast.Constant(value=str(word)) if id(node) not in prose:
                yield word if word in KEYS else ""
                yield from re.findall(r"(\w+)=", word)


def spelled() -> dict[str, list[str]]:
    """Key -> source files that spell it."""
    package = Path(shardwise.__file__).parent
    found: dict[str, list[str]] = {name: [] for name in KEYS}
    for path in sorted(package.rglob("*.py")):
        for name in KEYS.keys() & set(_words(ast.parse(path.read_text()))):
            found[name].append(path.relative_to(package).as_posix())
    return found


LATER = {}
"""Keys that more files spell as yet -> how many: the number only falls."""


def test_a_key_is_spelled_in_few_files() -> None:
    found = {name: len(files) for name, files in spelled().items() if len(files) > MOST}
    assert found == LATER, "lower the number, or ask the table in place of the key"
