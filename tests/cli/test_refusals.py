"""Commands that are refused: a line says why, the exit code is 2, and nothing is written or started.

`refusals.toml` has them. Of a row: words after those of its table's `command`, then what the line says.
"""

import shlex
import tomllib
from pathlib import Path

import pytest

from harness.command_line import mistake
from harness.measured_cpu import cluster
from shardwise.cluster.writing import to_toml

LONG = {"LONG": "x" * 40_000, "DIGITS": "9" * 5000, "SPACES": " " * 30_000}
TABLES = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())["refused"]
ROWS = {f"{table.get('command', '')} {words}".strip(): said for table in TABLES for words, *said in table["rows"]}
STARTS = (
    "shardwise.cli.calibrate_device._measured",
    "shardwise.cli.collective_bench.measure",
    "shardwise.emulate.job.measure",
    "shardwise.runtime.job.restart.supervise",
)
"""What starts ranks."""
GPUS = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPHB\t0-63\nGPU1\tNV12\t X \tPHB\t0-63\nNIC0\tPHB\tPHB\t X \n"
FILES = {
    "text.txt": "some words to learn from\n" * 100,
    "empty.txt": "",
    "net.py": "def build(): ...\ndef example(): ...\n",
    "broken.toml": "nodes = [",
    "topo.txt": GPUS,
    "ds_config.json": '{"train_batch_size": 512, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}',
    "config.json": '{"model_type": "llama", "telepathy": true}',
    "mistyped.json": '{"model_typ": "llama", "zero_optimisation": {"stage": 3}}',
    "taken/thing": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: no rank can be started, and there is no GPU."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "here.toml").write_text(to_toml(cluster()))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDWISE_CLUSTER", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in STARTS:
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("ranks were started"))
    return tmp_path


@pytest.mark.parametrize("line", ROWS)
def test_what_cannot_be_is_one_line(line, folder, command):
    before = sorted(folder.rglob("*"))
    words = shlex.split(line)
    for name, value in LONG.items():
        words = [word.replace(name, value) for word in words]
    mistake(command(*words), *ROWS[line])
    left = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}  # Python's own, beside a module
    assert left == {*before}


def test_no_row_is_there_twice():
    assert len(ROWS) == sum(len(table["rows"]) for table in TABLES)
