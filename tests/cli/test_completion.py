"""`shardwise completion`: bash completes commands, actions, options and their values from the printed script."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.commands import COMMANDS
from shardwise.cli.completion import SHELLS
from shardwise.model.catalog import catalog

Command = Callable[..., tuple[int, str, str]]
ASK = 'printf "%s\\n" "${COMPREPLY[@]}"'


def completed(script: Path, *lines: str) -> list[list[str]]:
    """What bash offers for the last word of each line; "" for an empty word."""
    asked = []
    for line in lines:
        words = ["shardwise", *shlex.split(line)]
        quoted = " ".join(map(shlex.quote, words))
        asked.append(f"COMPREPLY=(); COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shardwise; {ASK}; echo ---")
    done = subprocess.run(
        ["bash", "--norc", "-c", f". {shlex.quote(str(script))}; {'; '.join(asked)}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [part.split() for part in done.stdout.split("---\n")[:-1]]


def test_bash_completes(command: Command, tmp_path: Path) -> None:
    code, out, err = command("completion", "bash")
    assert (code, err) == (0, "")
    script = tmp_path / "script"
    script.write_text(out)
    names, some, actions, options, values, models, files = completed(
        script,
        "''",
        "pl",
        "checkpoint ''",
        "checkpoint export --f",
        "plan --by ''",
        "estimate llama-3-",
        "plan --out ''",
    )
    assert names == list(COMMANDS) and some == ["plan"]
    assert {"verify", "export", "--json"} <= set(actions)
    assert options == ["--format"] and values == ["throughput", "fastest", "memory", "cost", "pareto"]
    assert models == [name for name in catalog() if name.startswith("llama-3-")]
    assert files == [], "bash completes files itself where the script offers nothing"


@pytest.mark.parametrize("shell", SHELLS)
def test_json(command: Command, shell: str) -> None:
    code, out, _ = command("completion", shell, "--json")
    assert code == 0 and json.loads(out)["script"] == command("completion", shell)[1]
