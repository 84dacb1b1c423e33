"""Budgets that keep the code small: `size.toml` has them. To exceed one, delete elsewhere, or raise it in the same
commit and say why in its message; a package that has shrunk lowers its own."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

TESTS = Path(__file__).parent
PACKAGE = Path(shardwise.__file__).parent
SIZES = tomllib.loads((TESTS / "size.toml").read_text(encoding="utf-8"))
SLACK = 0.03
"""Share by which a package may be below its budget before the budget is to be lowered."""


def lines(paths: Iterator[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def packages() -> dict[str, int]:
    folders = (folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
    found = {folder.name: lines(folder.rglob("*.py")) for folder in folders}
    return found | {"top level": lines(PACKAGE.glob("*.py")), "tests": lines(TESTS.rglob("*.py"))}


def test_every_package_has_a_budget() -> None:
    assert packages().keys() == SIZES["lines"].keys()


@pytest.mark.parametrize("package", SIZES["lines"])
def test_a_package_keeps_its_budget(package: str) -> None:
    found, budget = packages()[package], SIZES["lines"][package]
    assert found <= budget, f"{package}: {found} lines of {budget}: delete elsewhere in it, or raise tests/size.toml"
    assert found > budget * (1 - SLACK), f"{package}: {found} lines; lower its budget of {budget} in tests/size.toml"


def members(tree: ast.ClassDef) -> int:
    """Public methods and properties that a class defines; fields do not count."""
    return sum(isinstance(each, ast.FunctionDef) and not each.name.startswith("_") for each in tree.body)


def test_classes_have_few_public_members() -> None:
    most = SIZES["classes"]["public_members"]
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (count := members(node)) > most:
                found[f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"] = count
    assert not found, "split the class"
