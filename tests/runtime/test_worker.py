"""One rank's process around a stand-in for the trainer: how what it raises reaches the launcher, or torchrun's user."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shardwise
from harness.cases import from_table
from harness.processes import launch
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.runtime.job.config import TrainConfig

SOURCES = str(Path(shardwise.__file__).parents[1])

WORKER = """
import os, sys, time, types
from shardwise.errors import UserError
rank = int(os.environ["RANK"])
def train(config):
{body}
stand_in = types.ModuleType("shardwise.runtime.job.trainer")
stand_in.train = train
sys.modules["shardwise.runtime.job.trainer"] = stand_in
stop = types.ModuleType("shardwise.runtime.job.stop")  # whose import of torch takes longer than all else here
stop.Stopped = type("Stopped", (BaseException,), {{}})
sys.modules["shardwise.runtime.job.stop"] = stop
from shardwise.runtime.job.worker import leave, main
leave(main(sys.argv[1:]))
"""


def worker(body: str) -> list[str]:
    return [sys.executable, "-c", WORKER.format(body=textwrap.indent(textwrap.dedent(body), "    "))]


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    model = ModelConfig("small", vocab=32, hidden=8, layers=1, heads=2, ffn=16, max_positions=16)
    out = str(tmp_path / "run")
    made = TrainConfig(model, Layout(dp=2), Workload(seq=4, batch=2), data="d", out=out, corpus="c", steps=3)
    made.write(tmp_path / "config.json")
    return made


def launched(folder: Path, body: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    command = [*worker(body), str(folder / "config.json")]
    return launch(command, 2, env={"PYTHONPATH": SOURCES}, echo=lines.append), lines


def test_every_rank_trains_the_configuration_that_was_written(tmp_path, config):
    code, lines = launched(tmp_path, "open(os.path.dirname(config.out) + f'/seen-{rank}', 'w').write(repr(config))")
    assert (code, lines) == (0, [])
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == [repr(config)] * 2


def test_a_user_mistake(tmp_path, config):
    assert launched(tmp_path, "raise UserError('too little text; give more')") == (2, ["too little text; give more"])
    assert not Path(config.out).exists()


def test_an_exception_is_one_line_and_its_traceback_is_kept(tmp_path, config):
    body = """
    if rank == 1:
        error = ValueError("first\\nsecond")
        error.step = 7
        raise error
    time.sleep(600)
    """
    code, lines = launched(tmp_path, body)
    assert (code, lines) == (1, ["rank 1 failed at step 7: ValueError: first; the other rank was stopped"])
    kept = sorted((Path(config.out) / "errors").iterdir())
    assert [file.name for file in kept] == ["rank-1.txt"]
    assert "in train" in kept[0].read_text() and "second" in kept[0].read_text()


def test_an_exception_without_words(tmp_path, config):
    code, lines = launched(tmp_path, "raise MemoryError")
    assert code == 1 and "failed: MemoryError" in lines[0]


def test_an_exit_with_a_thread_that_never_ends(tmp_path, config):
    body = """
    import threading
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise UserError("no")
    """
    assert launched(tmp_path, body) == (2, ["no"])


@from_table
def test_without_our_launcher_the_rank_speaks_itself(tmp_path, config, body, code, line):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWISE")}
    done = subprocess.run(
        [*worker(body), str(tmp_path / "config.json")],
        env={**env, "PYTHONPATH": SOURCES, "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", line)


def test_a_missing_configuration(tmp_path, config):
    (tmp_path / "config.json").unlink()
    code, lines = launched(tmp_path, "pass")
    assert code == 2 and lines[0].startswith("cannot read ") and "No such file" in lines[0]
