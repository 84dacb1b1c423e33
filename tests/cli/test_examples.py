"""The help of every command has two examples, which run; `shardwise --help` starts fast and fits 80 columns."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.documents import ENVIRONMENT, ROOT, commands
from harness.today import some_of
from shardwise.cli.commands import COMMANDS, GROUPS, overview
from shardwise.cli.examples import EXAMPLES, broken
from shardwise.cli.main import parser_of

Command = Callable[..., tuple[int, str, str]]

TOUR = [
    shlex.join(words) for name in ("README.md", "docs/commands.md") for words in commands((ROOT / name).read_text())
]
"""Commands that `tests/test_readme.py` runs, in order, in one folder."""

PARSED = {
    "serve": "serves until it is stopped: tests/cli/test_serve.py",
    "studio": "serves until it is stopped: tests/cli/test_studio.py",
    "lab": "needs root: tests/cli/test_lab.py",
    "demo": "minutes: tests/test_demo.py",
    "verify": "starts ranks: tests/runtime/test_module_verify.py",
    "trace": "loads torch: tests/runtime/test_module_trace.py",
    "validate": "half a minute: tests/cli/test_validate.py",
}
"""Commands whose examples are only parsed here, with the reason."""

SHORT = [example for name in EXAMPLES if name not in PARSED for example in EXAMPLES[name]
         if shlex.join(shlex.split(example)) not in TOUR]  # fmt: skip


def test_every_command_has_two_examples_in_its_help(command: Command) -> None:
    assert list(EXAMPLES) == list(COMMANDS)
    for name, examples in EXAMPLES.items():
        assert len(examples) == 2 and all(example.split()[:2] == ["shardwise", name] for example in examples)
    code, out, _ = command("plan", "--help")
    assert code == 0 and all(broken(example) in out for example in EXAMPLES["plan"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_the_parser_reads(name: str) -> None:
    parser = parser_of(name)
    for example in EXAMPLES[name]:
        assert shlex.split(broken(example).replace("\\\n", "")) == shlex.split(example)
        assert max(map(len, broken(example).splitlines())) <= 88
        parser.parse_args(shlex.split(example)[2:])


@pytest.mark.parametrize("example", some_of(SHORT, 5, "examples"))
def test_examples_run(example: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn from\n" * 100)
    for name, layout in (("a.json", "dp=2"), ("b.json", "tp=2")):
        step = ("tiny-llama", "--layout", layout, "--cluster", "2xcpu", "--seq", "64", "--batch", "8")
        Path(name).write_text(command("estimate", *step, "--json")[1])
    code, out, err = command(*shlex.split(example)[1:])
    assert code == 0 and out, err


def test_the_overview_has_every_command_by_purpose(command: Command) -> None:
    code, out, err = command("--help")
    assert (code, out, err) == (0, overview() + "\n", "")
    assert all(f"\n{purpose}:\n" in out for purpose in GROUPS)
    assert sum(map(len, GROUPS.values())) == len(COMMANDS) and max(map(len, out.splitlines())) <= 80


def test_help_loads_little_beside_the_interpreter() -> None:
    """What `--help` imports of ours, and nothing that takes long: no timing, which depends on the machine."""
    code = "import sys; from shardwise.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    loaded = set(done.stderr.split())
    ours = {name for name in loaded if name.startswith("shardwise.")}
    assert ours == {
        f"shardwise.{name}" for name in ("cli", "cli.main", "cli.actions", "cli.commands", "errors", "lazy")
    }
    assert not loaded & {"numpy", "torch", "rich", "json", "tomllib", "dataclasses", "inspect", "shtab"}
