"""The table of layout keys: what loops over it, and how many files spell a key."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from harness.cases import from_table
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.layout.keys import KEYS, MARKS, changed, goes_with
from shardwise.layout.layout import with_stage

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
    package = Path(shardwise.__file__).parent
    found: dict[str, list[str]] = {name: [] for name in KEYS}
    for path in sorted(package.rglob("*.py")):
        for name in KEYS.keys() & set(_words(ast.parse(path.read_text()))):
            found[name].append(path.relative_to(package).as_posix())
    return found


WORDS = {
    "algorithm", "attention", "backup", "compile", "every", "feedback", "moments", "node", "order", "outer", "replicas",
    "schedule", "servers", "stages", "staleness",
}  # fmt: skip
"""Keys that are words for other things as well, which nothing tells apart."""
LATER = {
    "dp": 82, "tp": 122, "pp": 91, "cp": 49, "ep": 49, "etp": 14, "zero": 71, "shard": 29, "sp": 46, "cpkind": 12,
    "tpkind": 8, "sync": 21, "virtual": 37, "micro": 91, "recompute": 67, "offload": 22, "offload_params": 16,
    "offload_activations": 7, "precision": 45, "grads": 40,
}  # fmt: skip
"""Keys that more files spell as yet -> how many. The numbers only fall, but for `audit`, which derives
layouts, and `certify`, whose adapters run them."""


def test_a_key_is_spelled_in_few_files() -> None:
    found = {name: files for name, files in spelled().items() if name not in WORDS}
    assert {name: files for name, files in found.items() if len(files) > LATER.get(name, MOST)} == {}
    assert [name for name in LATER if len(found[name]) <= MOST] == [], "an excuse that nothing needs"


def test_the_table_contradicts_nothing() -> None:
    for name, key in KEYS.items():
        assert key.name == name and key.help and key.marks <= MARKS.keys(), name
        assert {*key.of} <= KEYS.keys(), name
        assert key.checked(key.default) == key.default, name
        assert key.kind != "word" or key.default in key.choices, name


def _other(name: str) -> list[str]:
    """Texts of values that a key may have beside its default."""
    key = KEYS[name]
    if key.kind == "flag":
        return [name]
    if key.choices:
        return [f"{name}={value}" for value in key.choices if value != key.default]
    return [f"{name}={key.example}"] if key.example else [f"{name}={number}" for number in (0, 1, 2, 4)]


def test_every_value_is_read_and_printed_and_named_in_what_it_contradicts() -> None:
    for name, key in KEYS.items():
        for text in _other(name):
            value = key.read(text.partition("=")[2] if "=" in text else None)
            assert key.text(value) == text, text
            try:
                layout = Layout.parse(text)
            except LayoutError as error:
                assert re.search(rf"\b{name}\b|virtual stages", str(error)), text
            else:
                assert {each.name for each in changed(layout)} <= {name}, text


@pytest.mark.parametrize("value", [True, 1.5, "2", None])
def test_a_number_is_no_other_type(value: object) -> None:
    with pytest.raises(LayoutError, match="micro must be a positive integer, not"):
        Layout(micro=value)  # type: ignore[arg-type]


@from_table
def test_another_stage_drops_what_it_does_not_have(text: str, stage: int, expected: str) -> None:
    assert str(with_stage(Layout.parse(text), stage)) == expected


def test_keys_that_mean_nothing_without_another() -> None:
    assert goes_with("cp") == ("cpkind",)
    assert goes_with("zero") == ("shard", "hpz", "qwz", "qgz", "feedback")
