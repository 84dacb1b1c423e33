"""The questions and commands of docs/tasks.md, and the folder in which they run: for its test and for its times."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

DOCS = Path(__file__).parent
NEWCOMERS = DOCS.parent / "tests" / "docs" / "newcomers.toml"
_SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (.+?) \| (.+) \| .*? \|$", re.MULTILINE)
_COMMAND = re.compile(r"`(shardwise [^`]+)`")
_SERVED = re.compile(r"is served on (http://\S+):")
_LIMIT = 180
"""Seconds in which a server must answer and end."""


@dataclass(frozen=True)
class Task:
    """A row of the page. section: its heading. commands: in their order; none where the row names a page. prints: of a
    newcomer's question, words of what the last command prints; code: its exit code."""

    section: str
    question: str
    commands: tuple[list[str], ...]
    prints: str | None
    code: int

    def __str__(self) -> str:
        return self.question


def tasks() -> list[Task]:
    """All rows of the page, in order."""
    expected = tomllib.loads(NEWCOMERS.read_text())
    found = []
    for section, body in _SECTION.findall((DOCS / "tasks.md").read_text()):
        for question, answer in _ROW.findall(body)[1:]:
            commands = tuple(map(shlex.split, _COMMAND.findall(answer)))
            prints, code = expected["prints"].get(question), expected["codes"].get(question, 0)
            found.append(Task(section, question, commands, prints, code))
    return found


def prepare(folder: Path) -> None:
    """What the page says that the folder holds: texts, and the module that it shows."""
    texts = folder / "my-text"
    texts.mkdir(parents=True)
    for page in sorted(DOCS.glob("*.md")):
        (texts / f"{page.stem}.txt").write_text(page.read_text())
    (module,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "tasks.md").read_text(), re.MULTILINE | re.DOTALL)
    (folder / "net.py").write_text(module)


def served_answer(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Start a server, ask it once, and end it in order. Returns the text of its answer."""
    server = subprocess.Popen(
        [*command, "--port", "0"], cwd=folder, env=dict(environment), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    watch = threading.Timer(_LIMIT, server.kill)
    watch.start()
    assert server.stdout is not None
    said = ""
    try:
        for line in server.stdout:
            said += line
            if at := _SERVED.search(line):
                body = json.dumps({"model": "mine", "prompt": "def main", "max_tokens": 8}).encode()
                asked = Request(f"{at[1]}/completions", body, {"Content-Type": "application/json"})
                with urlopen(asked, timeout=_LIMIT) as answer:
                    text = str(json.load(answer)["choices"][0]["text"])
                server.terminate()
                said += server.stdout.read()
                break
        else:
            raise RuntimeError(f"the server does not say where it answers: {said}")
        if code := server.wait():
            raise RuntimeError(f"the server ended with code {code}: {said}")
        return text
    finally:
        watch.cancel()
        server.kill()
        server.wait()
        server.stdout.close()
