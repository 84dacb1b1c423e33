"""Training and generation on two hosts: results as on one, bytes as predicted, and one host killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import forked
from harness.hosts import hosts, namespaces
from shardwise.api import TrainResult
from shardwise.lab.network import LabNetwork
from shardwise.runtime.job.hosts import LaunchHost, Placement

pytestmark = pytest.mark.usefixtures("several_hosts", "leftovers")
LIMIT = 120
STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"{n} is one more than {n - 1}\n" for n in range(1, 1500)))
    return folder


def arguments(runs: Path, name: str, layout: str, *more: str) -> list[str]:
    return [
        *("train", "tiny-llama", "--set", "layers=2,hidden=128,ffn=192", "--vocab", "300"),
        *("--layout", f"{layout},precision=fp32", "--data", str(runs / "text.txt"), "--seq", "32", "--batch", "4"),
        *("--validate-batches", "1", "--no-tensorboard", "--out", str(runs / name), *more),
    ]


def trained(runs: Path, name: str, layout: str, environment: dict[str, str], *more: str) -> TrainResult:
    words = arguments(runs, name, layout, "--steps", str(STEPS), *more)
    done = forked.shardwise(*words, environment=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return TrainResult.read(runs / name)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[LabNetwork, dict[str, str]]]:
    with hosts("1Gb/s", 2, folder) as made:
        yield made
    assert namespaces() == []


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2"])
def test_two_hosts_train_as_one_and_send_what_is_predicted(runs: Path, tmp_path: Path, layout: str) -> None:
    with two_hosts(tmp_path) as (network, environment):
        there = trained(runs, f"there-{layout}", layout, environment, "--report")
        first, second = network.traffic()
    here = trained(runs, f"here-{layout}", layout, dict(os.environ), "--transport", "gloo")
    assert there.losses == here.losses
    assert there.report.cluster == f"2x{2 if 'pp' in layout else 1}xCPU"
    assert first.sent == pytest.approx(second.received, rel=0.01)
    if layout == "dp=2":
        # gloo's all-reduce between two ranks sends the tensor's bytes once each way; meeting and saving come on top.
        (role,) = there.predicted.roles
        per_step = sum(row.payload_bytes for row in role.ledger if row.op == "all_reduce")
        assert per_step > 500_000
        for port in (first, second):
            assert port.sent == pytest.approx(per_step * STEPS, rel=0.1)


def test_generation_on_two_hosts_gives_the_tokens_of_one(runs: Path, tmp_path: Path) -> None:
    trained(runs, "model", "dp=1", dict(os.environ))
    words = [
        "generate",
        str(runs / "model"),
        "--prompt",
        "12 is one",
        "--max-tokens",
        "8",
        "--layout",
        "tp=2",
        "--json",
    ]
    here = forked.shardwise(*words, environment=os.environ, timeout=LIMIT)
    with two_hosts(tmp_path) as (network, environment):
        there = forked.shardwise(*words, environment=environment, timeout=LIMIT)
        assert network.traffic()[1].sent > 10_000
    assert (here.returncode, there.returncode) == (0, 0), there.stderr
    assert texts(there.stdout) == texts(here.stdout) != []


def texts(out: str) -> list[str]:
    return [line for line in out.splitlines() if '"text"' in line]


def test_a_killed_host_ends_the_run_in_one_line(runs: Path, tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (network, environment):
        words = arguments(runs, "killed", "dp=2,tp=2", "--steps", "100000")
        training = forked.Started(words, environment)
        events, deadline = runs / "killed" / "events.jsonl", time.monotonic() + LIMIT
        while not (events.exists() and '"loss"' in events.read_text()):
            assert training.poll() is None and time.monotonic() < deadline, training.communicate()
            time.sleep(0.02)
        victims = processes(network.hosts[1].name)
        assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        _, err = training.communicate(timeout=LIMIT)
        assert training.returncode == 1
        last = err.strip().splitlines()[-1]
        assert last.startswith("shardwise: error: rank ") and "was killed by SIGKILL" in last and "Traceback" not in err
        assert [pid for host in network.hosts for pid in processes(host.name)] == []


def processes(namespace: str) -> list[int]:
    shown = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    return [int(word) for word in shown.stdout.split()]


def test_ranks_fill_host_after_host() -> None:
    made = tuple(LaunchHost(f"n{i}", f"10.77.0.{i + 1}", "eth0", ("enter", f"n{i}")) for i in range(2))
    spread = Placement(5, made)
    assert [spread.command(rank, ["x"])[1] for rank in range(5)] == ["n0", "n0", "n0", "n1", "n1"]
    assert spread.environment(4)["LOCAL_RANK"] == "1" and spread.address == "10.77.0.1"
    alone = Placement(3)
    assert alone.command(2, ["x"]) == ["x"] and alone.address == "127.0.0.1"
    assert alone.environment(2) == {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
