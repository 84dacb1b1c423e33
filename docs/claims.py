"""The page of figures that people quote, with what shardwise computes for each: made by the project itself.

python docs/claims.py   writes docs/claims.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from quoted import Shown, missing, show, topics
from shardwise.validation.claims import claims

PAGE = Path(__file__).with_name("claims.md")
WIDTH = 118

HEAD = """\
# Numbers that people quote

Of {total} numbers that people quote about splitting large language models, shardwise computes {same} as they are said
and corrects {wrong}. `python docs/claims.py` (or `make figures`) makes this page; a test computes each number again.

In brackets are the functions that compute a number; those of `quoted` are in `docs/quoted/`. GB = 1e9 bytes, GiB =
2^30, MB = 1e6, MiB = 2^20. NCCL's measured times are beside times of the wire alone where these would mislead.
"""


def page() -> str:
    """The page as Markdown."""
    shown = {title: [show(name) for name in names] for title, names in topics().items()}
    wrong = sum(claim.verdict == "correct" for claim in claims().values())
    head = HEAD.format(total=len(claims()), same=len(claims()) - wrong, wrong=wrong)
    parts = [head.rstrip()]
    for title, found in shown.items():
        parts += [f"## {title}", *map(_entry, found)]
    if left := missing():
        parts += ["## Not shown yet", "\n".join(f"- {name}: {_plain(claims()[name].says)}" for name in left)]
    return "\n\n".join(parts) + "\n"


def _entry(shown: Shown) -> str:
    claim = shown.claim
    by = ", ".join(f"`{_whole(name)}`" for name in shown.by)
    why = claim.why if not set(claim.why.split()) <= set(shown.text.split()) else ""
    lines = [("Said", claim.says), ("Computed", shown.text), ("Why", why), ("Note", claim.note)]
    words = " ".join(f"{name}: {_ended(_plain(text))}" for name, text in lines if text)
    corrected = " (corrected)" if claim.verdict == "correct" else ""
    return f"### {claim.id}{corrected}\n{_wrapped(f'{words} ({by})')}"


def _ended(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _whole(name: str) -> str:
    """A command as it is typed, or a function with its whole name."""
    return name if name.startswith(("shardwise ", "quoted.")) else f"shardwise.{name}"


def _plain(text: str) -> str:
    """Text without anything that Markdown would read as markup."""
    return re.sub(r"([*_~<|])", r"\\\1", text)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
