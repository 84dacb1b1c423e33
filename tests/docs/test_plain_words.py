"""The README, the documents and the commands' help are written in plain words."""

import re
import runpy

import pytest

from harness.documents import ROOT

INSTEAD = {
    r"goes on|going on": "continues",
    r"lies? in|stands? in": "is in, is stored in",
    r"knows no": "is independent of",
    r"thereof|likewise|alike": "also, identical",
    r"mend(s|ed)?": "fix",
    r"(is|are) refused|refuses?": "is rejected",
    r"[Nn]obody|[Ww]hoever": "a noun",
    r"those (that|which)|of which": "a noun phrase",
    r"(is|are) told": "is given, is named",
    r"figures": "numbers, values (a figure is a picture)",
}
"""Words -> what readers of PyTorch's, Megatron-LM's and vLLM's documentation expect in their place."""
MOST = 50_000
"""Words of the pages in docs/, their tables and programs included."""
DOCUMENTS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "claims.md")


def foreign(text: str) -> list[str]:
    """Words of the list in a text, each with its line; code is left out."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    lines = text.splitlines()
    return [
        f"{words!r} (use: {instead}): {line.strip()}"
        for words, instead in INSTEAD.items()
        for line in lines
        if re.search(rf"\b({words})\b", line)
    ]


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCUMENTS], ids=lambda path: path.name)
def test_documents(path) -> None:
    assert foreign(path.read_text()) == []


def test_there_are_not_more_of_them() -> None:
    """Words have a letter or a digit; bars of tables are none."""
    words = [word for path in (ROOT / "docs").glob("*.md") for word in path.read_text().split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= MOST


def test_help() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    assert foreign(site["cli"]()) == []


def test_a_foreign_word_is_seen() -> None:
    assert len(foreign("A run goes on; `goes on` is code.\nNobody looks.")) == 2
