"""What ranks of all kinds share: a job is read, the group is there, and what goes wrong reaches the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from harness.cases import from_table, table
from harness.command_line import mistake
from harness.processes import launch
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.runtime import installed
from shardwise.runtime.job import pulse, rank
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.launch import INTERRUPTED, Failure
from shardwise.runtime.job.pulse import IDLE, SAVE_AWAITED, WAITING, WORKING, Pulse, Sign, signs_in, stuck
from shardwise.runtime.transport import memory
from shardwise.runtime.transport.memory import Peer, SpinWait


@dataclass(frozen=True)
class Job:
    timeout: float
    number: int

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """The environment of the only rank of a job, whose file it returns."""
    environment = {
        "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "SHARDWISE_RENDEZVOUS": f"file://{tmp_path}/store", "SHARDWISE_ERROR_FILE": str(tmp_path / "error.json"),
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"timeout": 30.0, "number": 7}))
    yield file
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_job_runs_inside_a_group_of_all_ranks(launched):
    seen = []

    def run(number: int, job: Job) -> None:
        values = torch.ones(3)
        dist.all_reduce(values)
        seen.append((number, job.number, dist.get_world_size(), dist.get_backend(), values.tolist()))

    assert rank.main([str(launched)], Job.read, run) == 0
    assert seen == [(0, 7, 1, "gloo", [1.0] * 3)]
    assert not (launched.parent / "error.json").exists()


@from_table
def test_what_is_raised_is_left_for_the_launcher(launched, error, code, kind, message):
    def run(number: int, job: Job) -> None:
        raise error

    assert rank.main([str(launched)], Job.read, run) == code
    failure = Failure.read(launched.parent / "error.json")
    assert failure and (failure.kind, failure.rank, failure.step, failure.message) == (kind, 0, None, message)


def test_an_interruption_is_no_failure(launched):
    def run(number: int, job: Job) -> None:
        raise KeyboardInterrupt

    assert rank.main([str(launched)], Job.read, run) == INTERRUPTED
    assert not (launched.parent / "error.json").exists()


@pytest.mark.parametrize(("argv", "words"), [([], "one argument"), (["nowhere"], "cannot read nowhere: No such file")])
def test_without_a_job_nothing_begins(launched, argv, words):
    assert rank.main(argv, Job.read, lambda number, job: pytest.fail("it ran")) == 2
    failure = Failure.read(launched.parent / "error.json")
    assert failure and failure.kind == "user" and words in failure.message and not dist.is_initialized()


def test_a_traceback_is_kept_of_what_is_nobody_s_mistake():
    kept = []

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("no"), UserError("no"), KeyboardInterrupt()):
        rank.guarded(lambda error=error: fail(error), lambda: kept.append(sys.exc_info()[1]))
    assert [type(each) for each in kept] == [ValueError]


@pytest.mark.parametrize(
    ("at_once", "code", "words"), [(False, 0, "out\nlater\n"), (True, 0, "out\n"), (False, 3, "out\n")]
)
def test_after_a_failure_nothing_is_waited_for(at_once, code, words):
    program = f"""
import atexit
from shardwise.runtime.job.rank import leave
atexit.register(print, "later")
print("out")
leave({code}, at_once={at_once})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, words, "")


# -- One rank's process around a stand-in for the trainer


SOURCES = str(Path(shardwise.__file__).parents[1])

WORKER = table(__file__, "WORKER")


def worker(body: str) -> list[str]:
    return [sys.executable, "-c", WORKER.format(body=textwrap.indent(textwrap.dedent(body), "    "))]


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    model = ModelConfig("small", vocab=32, hidden=8, layers=1, heads=2, ffn=16, max_positions=16)
    out = str(tmp_path / "run")
    made = TrainConfig(model, Layout(dp=2), Workload(seq=4, batch=2), data="d", out=out, corpus="c", steps=3)
    made.write(tmp_path / "config.json")
    return made


def launched_worker(folder: Path, body: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    command = [*worker(body), str(folder / "config.json")]
    return launch(command, 2, env={"PYTHONPATH": SOURCES}, echo=lines.append), lines


def test_every_rank_trains_the_configuration_that_was_written(tmp_path, config):
    code, lines = launched_worker(
        tmp_path, "open(os.path.dirname(config.out) + f'/seen-{rank}', 'w').write(repr(config))"
    )
    assert (code, lines) == (0, [])
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == [repr(config)] * 2


def test_an_exception_is_one_line_and_its_traceback_is_kept(tmp_path, config):
    body = """
    if rank == 1:
        error = ValueError("first\\nsecond")
        error.step = 7
        raise error
    time.sleep(600)
    """
    code, lines = launched_worker(tmp_path, body)
    assert (code, lines) == (1, ["rank 1 failed at step 7: ValueError: first; the other rank was stopped"])
    kept = sorted((Path(config.out) / "errors").iterdir())
    assert [file.name for file in kept] == ["rank-1.txt"]
    assert "in train" in kept[0].read_text() and "second" in kept[0].read_text()


def test_an_exit_with_a_thread_that_never_ends(tmp_path, config):
    body = """
    import threading
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise UserError("no")
    """
    assert launched_worker(tmp_path, body) == (2, ["no"])
    assert not Path(config.out).exists()


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
    code, lines = launched_worker(tmp_path, "pass")
    assert code == 2 and lines[0].startswith("cannot read ") and "No such file" in lines[0]


# -- Signs of life in memory alone: what is written is read back, and who is to blame for a standstill


NOTHING = Sign(0.0, 0, IDLE, "", "")


def sign(state: int, time: float = 0.0, doing: str = "forward of blocks.1", after: str = "all_reduce over dp") -> Sign:
    return Sign(time, 4, state, doing, after)


def test_signs_pass_through_a_file(tmp_path: Path) -> None:
    theirs = pulse.create(tmp_path / "pulse")
    assert signs_in(theirs) == (NOTHING, NOTHING)
    memory = pulse.memory(tmp_path / "pulse")
    training, saving = Pulse(memory), Pulse(memory, pulse.SAVING)
    before = time.monotonic()
    training.step(3)
    training.work("forward of blocks.1")
    training.collective("all_reduce over dp")
    saving.step(2)
    first, second = signs_in(theirs)
    assert (first.step, first.state, first.doing, first.after) == (
        3,
        WORKING,
        "forward of blocks.1",
        "all_reduce over dp",
    )
    assert (second.step, second.state) == (2, WORKING)
    assert before <= first.time <= second.time <= time.monotonic()
    training.wait()
    assert signs_in(theirs)[0].state == WAITING
    training.work()
    saving.idle()
    first, second = signs_in(theirs)
    assert (first.state, first.doing, second.state) == (WORKING, "forward of blocks.1", IDLE)


def test_who_has_begun_is_never_read_as_not_having_begun(tmp_path: Path) -> None:
    """However often it writes just then: it would count as silent since the start, and the run would end."""
    file = tmp_path / "pulse"
    theirs = pulse.create(file)
    writes = "import sys; from pathlib import Path; from shardwise.runtime.job import pulse\n"
    writes += "mine = pulse.Pulse(pulse.memory(Path(sys.argv[1])))\nwhile True: mine.step(7)"
    writer = subprocess.Popen([sys.executable, "-c", writes, str(file)])
    try:
        deadline = time.monotonic() + 60
        while not pulse.read(theirs).time:
            assert writer.poll() is None and time.monotonic() < deadline
        assert {pulse.read(theirs).step for _ in range(100_000)} == {7}
    finally:
        writer.kill()
        writer.wait()


def test_words_that_are_too_long_do_not_spill_over() -> None:
    memory = bytearray(pulse.SIZE)
    training, saving = Pulse(memory), Pulse(memory, pulse.SAVING)
    saving.work("saving")
    training.collective("c" * 1000)
    training.work("é" * 1000)
    first, second = signs_in(memory)
    assert set(first.after) == {"c"} and first.doing.startswith("é" * 50)
    assert (second.doing, second.after) == ("saving", "")


def test_the_silent_rank_is_named_not_those_that_wait_longer() -> None:
    signs = {
        0: (sign(WAITING, 0.0, after="all_gather over dp"), NOTHING),
        1: (sign(WORKING, 1.0), NOTHING),
        2: (sign(WAITING, 2.0), NOTHING),
        3: (sign(WAITING, 2.0), NOTHING),
    }
    assert stuck(signs, 10, 11.0) is None
    assert stuck(signs, 10, 11.5) == (
        1,
        "rank 1 made no progress for 10 s at step 4 in forward of blocks.1, after all_reduce over dp; "
        "rank 0 waited for it in all_gather over dp, ranks 2 and 3 waited for it in all_reduce over dp",
    )


def test_a_rank_alone() -> None:
    signs = {0: (Sign(5.0, 1, WORKING, "the optimizer", ""), NOTHING)}
    assert stuck(signs, 10, 16.0) == (0, "rank 0 made no progress for 11 s at step 1 in the optimizer")


def test_a_save_in_the_background_is_found_while_training_goes_on() -> None:
    signs = {
        0: (sign(WORKING, 19.0), sign(WAITING, 1.0, after="the gather")),
        1: (sign(SAVE_AWAITED, 3.0), sign(WORKING, 1.0, "the save of its part", "")),
    }
    assert stuck(signs, 10, 20.0) == (
        1, "rank 1 made no progress for 19 s at step 4 in the save of its part; rank 0 waited for it in the gather",
    )  # fmt: skip


def test_nobody_is_blamed_while_somebody_works_or_waits_for_its_save() -> None:
    for other in (sign(WORKING, 99.0), NOTHING, sign(SAVE_AWAITED, 0.0)):
        assert stuck({0: (sign(WAITING), NOTHING), 1: (other, NOTHING)}, 10, 100.0) is None


def test_collectives_that_do_not_match() -> None:
    signs = {
        0: (sign(WAITING, 1.0, after="all_reduce over dp"), NOTHING),
        1: (sign(WAITING, 0.0, after="all_gather over tp"), NOTHING),
        2: (sign(WAITING, 1.0, after="all_reduce over dp"), NOTHING),
    }
    assert stuck(signs, 10, 11.0) is None
    verdict = stuck(signs, 10, 12.0)
    assert verdict == (
        1,
        "no rank made progress for 12 s: each waits for others, ranks 0 and 2 at step 4 in all_reduce over dp, "
        "rank 1 at step 4 in all_gather over tp",
    )


def test_a_rank_without_a_launcher_looks_after_itself() -> None:
    memory = bytearray(pulse.SIZE)
    Pulse(memory).collective("all_reduce over dp")
    said: list[str] = []
    pulse.watch_over(memory, 5, 0.1, said.append)
    deadline = time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(said) == 1 and said[0].startswith("rank 5 made no progress for 0 s, after all_reduce over dp")


# -- How long a rank looks before it leaves its core to others


class _Hours:
    """Time that passes with naps and yields alone; the flag goes up at its end."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.flags, self.now, self.seconds = memoryview(bytearray(8)).cast("q"), 0.0, seconds
        self.naps: list[float] = []
        self.yields = 0
        patch.setattr(memory.time, "monotonic", lambda: self.now)
        patch.setattr(memory.time, "sleep", self._nap)
        patch.setattr(memory.os, "sched_yield", self._yield)

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self._pass(seconds)

    def _yield(self) -> None:
        self.yields += 1
        self._pass(1e-5)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.seconds:
            self.flags[0] = 1


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Rank 1, which lives as long as this test."""
    found = Peer(1, os.getpid())
    yield found
    found.forget()


def test_naps_get_longer(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    hours, patience = _Hours(monkeypatch, 1.0), SpinWait(2, 2, 10.0)
    patience.wait(hours.flags, 0, 1, peer)
    assert hours.yields > 100 and hours.naps == sorted(hours.naps)
    assert hours.naps[0] == SpinWait.NAP_S and hours.naps[-1] == SpinWait.LONGEST_NAP_S


def test_who_rests_wakes_up_seldom(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    hours, patience = _Hours(monkeypatch, 1.0), SpinWait(2, 2, 10.0)
    patience.rests = True
    patience.wait(hours.flags, 0, 1, peer)
    assert not hours.yields and len(hours.naps) == pytest.approx(1.0 / SpinWait.LONGEST_NAP_S, abs=1)


@pytest.mark.parametrize("rests", [False, True])
def test_patience_ends(monkeypatch: pytest.MonkeyPatch, peer: Peer, rests: bool) -> None:
    hours, patience = _Hours(monkeypatch, time.monotonic() + 1e9), SpinWait(2, 2, 10.0)
    patience.rests = rests
    with pytest.raises(RuntimeError, match="rank 1 did not come within 10 s"):
        patience.wait(hours.flags, 0, 1, peer)


# -- What is missing is named before anything begins, by every command that cannot do without it


WITHOUT_TORCH = table(__file__, "WITHOUT_TORCH")


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == "torch" else object())


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_commands_that_need_torch_say_so_in_one_line(no_torch, capfd, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code = main([*command.split(), *WITHOUT_TORCH[command].split()])
    mistake((code, *capfd.readouterr()), "needs torch: pip install 'shardwise[train]'")
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(no_torch):
    with pytest.raises(ValueError, match=r"the page needs torch: pip install 'shardwise\[serve\]'"):
        installed.require("the page", "json", "torch", extra="serve")
    installed.require("the page", "json")
