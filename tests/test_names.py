"""Names and sizes in the source: a public class name for one class, no function longer than a screen."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import shardwise

PACKAGE = Path(shardwise.__file__).parent
MOST_LINES = 60
"""Of a function."""


def named_twice(sources: dict[str, str]) -> dict[str, list[str]]:
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


def test_no_function_is_longer_than_a_screen():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines = {
        f"{path.relative_to(PACKAGE)}, {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
    assert len(lines) > 3000


def test_no_two_test_files_have_one_name():
    """Python imports a test by its file's name alone, so that pytest cannot collect a second one."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
