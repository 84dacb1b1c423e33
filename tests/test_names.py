"""Public class names: one concept, one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shardwise

PACKAGE = Path(shardwise.__file__).parent


def named_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public class names that several modules define -> those modules. sources: module -> its source."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_no_public_class_name_stands_for_two_classes():
    assert named_twice({str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}) == {}


def test_two_classes_of_one_name_are_seen():
    sources = {"a": "class Held: ...", "b": "class Held: ...", "c": "class _Own: ...", "d": "class _Own: ..."}
    assert named_twice(sources) == {"Held": ["a", "b"]}
