import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from harness import forked
from harness.hosts import hosts, namespaces
from harness.today import of_some
from shardwise.api import TrainResult
from shardwise.checkpoint import diff, find
from shardwise.lab.network import LabNetwork
from shardwise.runtime.job.hosts import LaunchHost, Placement

pytestmark = pytest.mark.usefixtures("several_hosts", "leftovers")
LIMIT = 120
STEPS = 4
LONG = ("server", "restart")
"""Tests: one of them runs each day."""


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
    assert diff(find(runs / f"there-{layout}"), find(runs / f"here-{layout}")) == []
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
        "generate", str(runs / "model"), "--prompt", "12 is one", "--max-new-tokens", "8", "--layout", "tp=2",
        "--json",
    ]  # fmt: skip
    here = forked.shardwise(*words, environment=os.environ, timeout=LIMIT)
    with two_hosts(tmp_path) as (network, environment):
        there = forked.shardwise(*words, environment=environment, timeout=LIMIT)
        assert network.traffic()[1].sent > 10_000
    assert (here.returncode, there.returncode) == (0, 0), there.stderr
    assert texts(there.stdout) == texts(here.stdout) != []


@of_some("server", LONG, 1)
def test_a_server_on_two_hosts_answers_the_official_client(runs: Path, tmp_path: Path) -> None:
    trained(runs, "served", "dp=1", dict(os.environ))
    words = ["serve", str(runs / "served"), "--port", "0", "--json", "--layout"]
    here = answer(words, "dp=1", dict(os.environ), [])
    with two_hosts(tmp_path) as (network, environment):
        there = answer(words, "pp=2", environment, [host.name for host in network.hosts])
        assert network.traffic()[1].received > 10_000
        assert [pid for host in network.hosts for pid in processes(host.name)] == []
    assert there == here != ""


def answer(words: list[str], layout: str, environment: dict[str, str], namespaces: list[str]) -> str:
    """The text with which a server continues a prompt; each namespace then has one rank."""
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "shardwise", *words, layout]
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + LIMIT
            while not (said := os.pread(out.fileno(), 1 << 16, 0).decode()).endswith("\n"):
                assert server.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.05)
            told = json.loads(said)
            assert [len(processes(name)) for name in namespaces] == [1] * len(namespaces)
            with openai.OpenAI(base_url=told["url"], api_key="any", max_retries=0, timeout=LIMIT) as client:
                made = client.completions.create(model=told["model"], prompt="12 is one", max_tokens=12, temperature=0)
            server.send_signal(signal.SIGTERM)
            server.wait(LIMIT)
        finally:
            server.kill()
            server.wait()
    return made.choices[0].text


def texts(out: str) -> list[str]:
    return [line for line in out.splitlines() if '"text"' in line]


@contextmanager
def losing_a_host(runs: Path, folder: Path, name: str, *more: str) -> Iterator[forked.Started]:
    """A run on two hosts after its second host has been killed. Nothing is left of it afterwards."""
    with two_hosts(folder) as (network, environment):
        training = forked.Started(arguments(runs, name, "dp=2,tp=2", *more), environment)
        events, deadline = runs / name / "events.jsonl", time.monotonic() + LIMIT
        while not (events.exists() and events.read_text().count('"loss"') > 4):
            assert training.poll() is None and time.monotonic() < deadline, training.communicate()
            time.sleep(0.02)
        victims = processes(network.hosts[1].name)
        assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        yield training
        assert [pid for host in network.hosts for pid in processes(host.name)] == []


def test_a_killed_host_ends_the_run_in_one_line(runs: Path, tmp_path: Path) -> None:
    with losing_a_host(runs, tmp_path, "killed", "--steps", "100000") as training:
        _, err = training.communicate(timeout=LIMIT)
        assert training.returncode == 1
        last = err.strip().splitlines()[-1]
        assert last.startswith("shardwise: error: rank ") and "was killed by SIGKILL" in last and "Traceback" not in err


@of_some("restart", LONG, 1)
def test_a_run_that_lost_a_host_resumes_and_ends_as_one_that_did_not(runs: Path, tmp_path: Path) -> None:
    more = ("--steps", "60", "--save-every", "3", "--restarts", "1")
    with losing_a_host(runs, tmp_path, "restarted", *more) as training:
        _, err = training.communicate(timeout=LIMIT)
        assert training.returncode == 0 and "restart 1 of 1 from " in err, err
    done = forked.shardwise(
        *arguments(runs, "whole", "dp=2,tp=2", *more, "--transport", "gloo"), environment=os.environ, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert diff(find(runs / "restarted"), find(runs / "whole")) == []


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
    assert alone.environment(2) == {"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
