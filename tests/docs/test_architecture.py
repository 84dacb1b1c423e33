"""docs/architecture.md names files and definitions that exist, so that a reader finds a fact in two jumps."""

import ast
import re

import pytest

from harness.documents import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = ROOT / "src" / "shardwise"
FACTS = re.findall(r"^\| .+ \| `([\w/.]+)` \| (?:`(\w+)` )?\|$", PAGE, re.MULTILINE)


def test_ten_facts() -> None:
    assert len(FACTS) == 10


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b[a-z_]+(?:/[a-z_]+)+\.(?:py|toml)\b", PAGE))))
def test_files(path: str) -> None:
    assert (ROOT / path if path.startswith("tests/") else SOURCE / path).is_file()


@pytest.mark.parametrize(("path", "name"), [fact for fact in FACTS if fact[1]])
def test_definitions(path: str, name: str) -> None:
    defined = {getattr(node, "name", None) for node in ast.parse((SOURCE / path).read_text()).body}
    assert name in defined
