"""What commands say of themselves: completion, examples, lists, tables at any width, variables."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import shardwise
from harness.cases import table
from harness.command_line import mistake
from harness.documents import ENVIRONMENT, ROOT, commands
from harness.today import some_of
from shardwise.cli.commands import COMMANDS, GROUPS, overview
from shardwise.cli.completion import SHELLS
from shardwise.cli.declare import read
from shardwise.cli.examples import EXAMPLES, broken
from shardwise.cluster.catalog import accelerators
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import catalog
from shardwise.predict.time.profiles import ENGINES
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.text import with_corpus
from shardwise.schedule import algorithms
from shardwise.schedule.pipeline import generators

# -- `shardwise completion`: bash completes commands, actions, options and their values from the printed script


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


# -- The help of every command has two examples, which run; `shardwise --help` starts fast and fits 80 columns


TOUR = [
    shlex.join(words) for name in ("README.md", "docs/commands.md") for words in commands((ROOT / name).read_text())
]
"""Commands that `tests/test_readme.py` runs, in order, in one folder."""

PARSED = table(__file__, "PARSED")
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
    for example in EXAMPLES[name]:
        assert shlex.split(broken(example).replace("\\\n", "")) == shlex.split(example)
        assert max(map(len, broken(example).splitlines())) <= 80
        read(name, shlex.split(example)[2:])


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
    assert ours == {f"shardwise.{name}" for name in ("calls", "cli", "cli.main", "cli.commands", "errors", "lazy")}
    assert not loaded & {"numpy", "torch", "rich", "json", "tomllib", "dataclasses", "inspect", "shtab"}


# -- `shardwise list`: what the catalogs and the layout text have is named, with --json, at 80 columns


NAMES = {
    "models": list(catalog()),
    "devices": list(accelerators().devices),
    "links": [name for name, link in accelerators().links.items() if link.bandwidth],
    "engines": list(ENGINES),
    "schedules": [each.name for each in generators()],
    "algorithms": sorted({each.name for each in algorithms()}),
    "layout-keys": [field.name for field in fields(Layout)],
}


@pytest.mark.parametrize("what", NAMES)
def test_every_name_is_listed(what: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command("list", what)
    assert code == 0 and err == ""
    words = out.replace(",", " ").split()
    assert set(NAMES[what]) <= set(words)
    code, out, _ = command("list", what, "--json")
    assert code == 0 and all(f'"{name}"' in out for name in NAMES[what])


@pytest.mark.parametrize("what", ["models", "models --weights", "devices", "links", "layout-keys"])
def test_tables_fit_80_columns(what: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, command("list", *what.split())[1].splitlines())) <= 80


def test_every_layout_key_has_a_meaning(command: Command) -> None:
    assert all(row["meaning"] for row in json.loads(command("list", "layout-keys", "--json")[1]))


def test_weights_of_several_models(command: Command) -> None:
    code, out, _ = command("list", "models", "llama-3-8b", "qwen2.5-32b", "--weights")
    assert code == 0
    assert re.search(r"^ *llama-3-8b +8\.03B +32\.1 GB +16\.1 GB +8\.03 GB +4\.02 GB$", out, re.MULTILINE)
    (llama, qwen) = json.loads(command("list", "models", "llama-3-8b", "qwen2.5-32b", "--json")[1])
    for row in (llama, qwen):
        assert row["weight_bytes"]["bf16"] == 2 * row["parameters"] == 4 * row["weight_bytes"]["int4"]


def test_models_are_in_families_with_active_parameters_cache_and_what_they_can_do_here(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "gemma-2-9b")
    code, out, _ = command("list", "models", *names)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    assert ["gpt_oss:"] in lines and ["qwen3_next:"] in lines
    assert ["openai/gpt-oss-20b", "20.9B", "4.19B", "49.2", "kB", "plan"] in lines
    assert ["gemma-2-9b", "9.24B", "344", "kB", "all"] in lines
    oss, following, gemma = json.loads(command("list", "models", *names, "--json")[1])
    assert oss["cache_bytes_per_token_by_kind"] == {"window": 24576, "full": 24576} and oss["window"] == 128
    assert oss["here"] == ["count", "plan"] and gemma["here"][-2:] == ["train", "generate"]
    # 36 layers of 32 states of 128 x 128, and the last inputs of their convolutions.
    assert following["state_bytes_per_sequence"] == 2 * 36 * (32 * 128 * 128 + 8192 * 4)
    assert (oss["parameters"], following["parameters"]) == (20_914_757_184, 79_674_391_296)


def test_every_device_has_its_links(command: Command) -> None:
    rows = json.loads(command("list", "links", "--json")[1])
    known = {
        name
        for name, entry in accelerators().devices.items()
        if entry.intra.bandwidth is not None or entry.inter.bandwidth is not None
    }
    assert {device for row in rows for device in row["devices"]} == known


# -- What a command says while it works: nothing in a pipe, one line on a terminal, gone afterwards


PROGRAM = (
    "import time; from shardwise.cli import output; output.PATIENCE = {patience}\n"
    "with output.working('pricing layouts'): time.sleep(0.3)\n"
    "print('done')"
)


def on_a_terminal(patience: float) -> str:
    """Standard error of the program, if that is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(patience=patience)], stdout=subprocess.PIPE, stderr=theirs,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return said.decode()


def test_a_slow_command_says_what_it_does_and_removes_it() -> None:
    said = on_a_terminal(patience=0.0)
    assert "pricing layouts" in said and said.endswith("\x1b[2K")


def test_a_fast_command_says_nothing() -> None:
    assert "pricing" not in on_a_terminal(patience=60.0)


def test_nothing_is_said_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(patience=0.0)], capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


def test_how_far_it_is_is_a_line_in_a_pipe() -> None:
    program = "from shardwise.cli import output\nwith output.working('dry run') as say: say('1 of 2')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"dry run: 1 of 2\n")


# -- Environment variables: the cluster where it is left out, the cache of prepared text, and the table of all


STEP = ("estimate", "llama-3-8b", "--layout", "dp=8,zero=2", "--seq", "8k", "--batch", "8")
INTERNAL = {"AUDIT", "ERROR_FILE", "HOSTS", "PARENT", "PULSE", "RENDEZVOUS", "STACK"}
"""Variables from a launcher to its ranks."""


def test_the_cluster_of_the_environment(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_CLUSTER", raising=False)
    mistake(command(*STEP), "estimate needs --cluster")
    monkeypatch.setenv("SHARDWISE_CLUSTER", "8xA100")
    assert json.loads(command(*STEP, "--json")[1])["cluster"] == "8xA100-80GB-SXM"
    assert json.loads(command(*STEP, "--cluster", "8xH100", "--json")[1])["cluster"] == "8xH100-80GB-SXM"
    code, out, _ = command("plan", "llama-3-8b", "--seq", "8k", "--batch", "8", "--fix", "dp=8,zero=2,tp=1", "--json")
    assert code == 0 and json.loads(out)["cluster"] == "8xA100-80GB-SXM"
    code, out, _ = command("collective", "cost", "all-reduce", "--bytes", "1MB", "--ranks", "8", "--json")
    assert code == 0 and json.loads(out)["cluster"] == "8xA100-80GB-SXM"
    assert command("estimate", "--params", "7e9", "--zero-table", "8")[0] == 0, "which has no cluster"
    monkeypatch.setenv("SHARDWISE_CLUSTER", "8xH10")
    mistake(command(*STEP), "no device 'H10' in the catalog")


def test_the_cache_has_the_text_of_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from\n" * 200)
    model = catalog()["tiny-llama"].replace(vocab=300)
    said: list[str] = []
    for out, cache in (("a/run", None), ("b/run", "cache"), ("c/run", "cache")):
        monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
        if cache:
            monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / cache))
        config = TrainConfig(model, Layout(), Workload(8, 2), str(tmp_path / "text.txt"), str(tmp_path / out))
        said.clear()
        prepared = with_corpus(config, said.append)
        assert Path(prepared.corpus).parent == tmp_path / (cache or "a") / "corpora"
    assert said == [f"the text is prepared already: {prepared.corpus}"]


def test_every_variable_is_documented() -> None:
    files = Path(shardwise.__file__).parent.rglob("*.py")
    named = {name for file in files for name in re.findall(r"\bSHARDWISE_([A-Z_]+)", file.read_text())}
    table = set(re.findall(r"^\| `SHARDWISE_(\w+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    assert named == table | INTERNAL and not table & INTERNAL
