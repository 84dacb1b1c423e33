"""Every module says what lives in it, and everything public says what it does and which mistakes it refuses."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

PACKAGE = Path(shardwise.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
OUR_ERRORS = {"UserError", "LayoutError"}

Definition = ast.FunctionDef | ast.ClassDef


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(name, definition) of what a module or class offers, its classes' methods included."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def needs_docstring(name: str, node: Definition) -> bool:
    """Classes and functions; not a method or a function of one or two statements whose name says it all."""
    return isinstance(node, ast.ClassDef) or ("." not in name and len(node.body) > 2)


def raises_ours(node: Definition) -> bool:
    """Whether a function itself raises a user's mistake."""
    raised = (part.exc for part in ast.walk(node) if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call))
    return isinstance(node, ast.FunctionDef) and any(getattr(call.func, "id", "") in OUR_ERRORS for call in raised)


def complaints(path: str, source: str) -> list[str]:
    tree = ast.parse(source)
    # `cli/main.py` says what every command has.
    command = {"run", f"{Path(path).stem.capitalize()}Options"} if path.startswith("cli/") else set()
    found = [] if ast.get_docstring(tree) else [f"{path}: no docstring"]
    for name, node in public(tree.body):
        text = ast.get_docstring(node)
        if text is None and needs_docstring(name, node) and name not in command:
            found.append(f"{path}: {name} has no docstring")
        if text is not None and raises_ours(node) and "raise" not in text.lower():
            found.append(f"{path}: {name} does not say which mistakes it refuses")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_public_is_documented(path):
    assert complaints(str(path.relative_to(PACKAGE)), path.read_text()) == []


def test_the_rules_can_fail():
    source = (
        'def f():\n "It raises nothing."\n'
        "def g(x):\n x += 1\n x -= 1\n return x\n"
        'def h():\n "Reads."\n raise UserError()\n'
    )
    assert complaints("a.py", source) == [
        "a.py: no docstring",
        "a.py: g has no docstring",
        "a.py: h does not say which mistakes it refuses",
    ]


@pytest.mark.parametrize("name", [name for name in shardwise.__all__ if not name.startswith("_")])
def test_the_names_of_the_package_tell_their_fields_and_arguments(name):
    """A reader of `help(shardwise.train)` must find every argument's meaning, or a class that explains it."""
    thing = getattr(shardwise, name)
    text = inspect.getdoc(thing) or ""
    assert not dataclasses.is_dataclass(thing) or not text.startswith(f"{name}("), "dataclass's own signature"
    assert len(text.split()) >= 8, f"{name}: {text!r} is no explanation"
