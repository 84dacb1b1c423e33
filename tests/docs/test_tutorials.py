"""Commands of every page with `sh` blocks run in their order, and every page is a page of the site."""

import re
from pathlib import Path

import pytest

from harness.dialogues import chats, pairs, write_chat_model, write_records
from harness.documents import ROOT, blocks, commands, run
from harness.hosts import needs_hosts
from harness.today import some_of

PAGES = (
    "quickstart",
    "laptop",
    "plan_a_cluster",
    "zero",
    "tensor_parallel",
    "memory",
    "experts",
    "launch",
    "lab",
    "emit",
    "certify",
    "tuning",
)
pytestmark = pytest.mark.usefixtures("leftovers")


@pytest.mark.parametrize("page", some_of(PAGES, 1, "pages with commands"))
def test_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    if page == "lab":
        needs_hosts()
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name in ("text.txt", "book.txt"):  # what pages call the reader's own text
        (tmp_path / name).write_text(text * 20)
    if page == "tuning":
        write_chat_model(tmp_path / "chat-model")
        write_records(tmp_path / "chat.jsonl", chats(60))
        write_records(tmp_path / "pairs.jsonl", pairs(40))
    quoted = commands(text)
    assert quoted and {command[0] for command in quoted} == {"shardwise"}
    assert all(run(*command, cwd=tmp_path) for command in quoted)


def test_each_page_with_commands_is_tested() -> None:
    having = {path.stem for path in (ROOT / "docs").glob("*.md") if blocks(path.read_text(), "sh")}
    assert having == {*PAGES, "commands"}  # those of commands.md run with the README's (test_readme.py)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= named
