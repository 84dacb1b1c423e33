"""Commands of the tutorials and concept pages run in their order, and every page is a page of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.documents import ROOT, commands, run
from harness.today import some_of

PAGES = ("quickstart", "laptop", "plan_a_cluster", "zero", "tensor_parallel", "memory")
pytestmark = pytest.mark.usefixtures("leftovers")


@pytest.mark.parametrize("page", some_of(PAGES, 1, "pages with commands"))
def test_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    quoted = commands((ROOT / "docs" / f"{page}.md").read_text())
    assert quoted and {command[0] for command in quoted} == {"shardwise"}
    assert all(run(*command, cwd=tmp_path) for command in quoted)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= named
