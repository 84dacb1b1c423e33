"""What ranks of all kinds share: a job is read, the group is there, and what goes wrong reaches the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import UserError
from shardwise.runtime.job import rank
from shardwise.runtime.job.launch import INTERRUPTED, Failure


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


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (UserError("too few ranks; give more"), 2, "user", "too few ranks; give more"),
        (
            RuntimeError("[/x/pair.cc:5] Connection closed by peer"),
            1,
            "peer",
            "RuntimeError: Connection closed by peer",
        ),
        (ValueError("first\nsecond"), 1, "error", "ValueError: first"),
        (MemoryError(), 1, "error", "MemoryError"),
    ],
)
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
