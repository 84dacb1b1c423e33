"""Runs with parameter servers, and of replicas between hosts, through what happens to them: killed and stopped ranks, a
link that is cut.

The limits of patience are the trainer's (`--hang`). Whatever is killed ends the run in one line, and nothing is lost
beyond the last checkpoint; whatever only takes longer changes no number where the workers wait for each other.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.hosts import hosts
from harness.today import EVERYTHING, SERVERS, of_some, some_of
from harness.training_process import Process, command, events, losses, restarted
from shardwise.checkpoint import latest

pytestmark = pytest.mark.usefixtures("leftovers")
STEPS, EVERY = 120, 10
PAUSE = 10.0 if EVERYTHING else 2.0
"""Seconds that a rank stands still, or a link is cut."""
SETTINGS = ("--batch", "6", "--save-every", str(EVERY), "--keep-last", "0")
OWN, COLOCATED = "dp=3,servers=1:own,precision=fp64,sync=", "dp=3,servers=2,precision=fp64,sync="


def train(runs: Path, name: str, layout: str, *more: str, steps: int = STEPS, **options: object) -> Process:
    out = runs / name
    return Process([*command(runs, out, layout, steps, *more)], out, **options)  # type: ignore[arg-type]


def undisturbed(runs: Path, layout: str) -> dict[int, float]:
    name = f"plain-{number(layout)}"
    if not (runs / name).exists():
        with train(runs, name, layout, *SETTINGS) as training:
            code, output = training.end()
        assert code == 0, output
    return losses(runs / name)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def number(layout: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", layout)


KILLS = [(OWN + "ps", 1), (OWN + "ps", 3), (OWN + "async", 2), (OWN + "async", 3), (OWN + "ssp,staleness=2", 3),
         (COLOCATED + "ps,backup=1", 0), (COLOCATED + "async", 1)]  # fmt: skip
"""(layout, rank that is killed): workers, servers of their own, and both in one."""


@of_some("killed", SERVERS, 2)
@pytest.mark.parametrize(("layout", "rank"), some_of(KILLS, 1, "killed servers"))
def test_a_killed_worker_or_server_ends_the_run_which_restarts_from_its_checkpoint(
    runs: Path, layout: str, rank: int
) -> None:
    name = f"killed-{number(layout)}-{rank}"
    with train(runs, name, layout, *SETTINGS, "--restarts", "1") as training:
        training.wait_for(lambda: len(training.logged()) >= 3 and latest(runs / name / "checkpoints") is not None)
        ranks = sorted(training.workers())
        saved = latest(runs / name / "checkpoints", warn=pytest.fail)
        assert saved is not None
        os.kill(ranks[rank], signal.SIGKILL)
        training.wait_for(lambda: restarted(runs / name) == 1)
        assert gone(ranks)
        code, output = training.end()
    assert code == 0, output
    (event,) = [event for event in events(runs / name) if "restart" in event]
    assert re.match(rf"rank {rank} was killed by SIGKILL", event["because"]), event
    assert int(event["from"].rpartition("-")[2]) >= saved.manifest.step
    newest = latest(runs / name / "checkpoints", warn=pytest.fail)
    assert newest is not None and newest.manifest.step == STEPS
    newest.verify()
    if layout.endswith("sync=ps"):
        assert losses(runs / name) == undisturbed(runs, layout)


@of_some("killed without restarts", SERVERS, 2)
@pytest.mark.parametrize("rank", some_of([0, 3], 1, "killed without restarts"))
def test_without_restarts_a_killed_rank_is_one_line_and_leaves_no_process(runs: Path, rank: int) -> None:
    name, layout = f"ended-{rank}", OWN + "async"
    with train(runs, name, layout, *SETTINGS, steps=10_000) as training:
        training.wait_for(lambda: latest(runs / name / "checkpoints") is not None)
        ranks = sorted(training.workers())
        os.kill(ranks[rank], signal.SIGKILL)
        code, output = training.end()
    assert code not in (0, 2) and "Traceback" not in output and gone(ranks), output
    last = output.splitlines()[-1]
    assert last.startswith(f"shardwise: error: rank {rank} was killed by SIGKILL"), output
    assert "--resume" in last, output


PAUSES = [(OWN + "ps", 1), (OWN + "ps", 3), (OWN + "async", 0), (OWN + "ssp,staleness=2", 2), (COLOCATED + "ps", 0)]
"""(layout, rank that stands still)"""


@of_some("paused", SERVERS, 2)
@pytest.mark.parametrize(("layout", "rank"), some_of(PAUSES, 1, "paused servers"))
def test_a_rank_that_stands_still_delays_the_run_and_no_more(runs: Path, layout: str, rank: int) -> None:
    name = f"paused-{number(layout)}-{rank}"
    with train(runs, name, layout, *SETTINGS, steps=STEPS) as training:
        training.wait_for(lambda: len(training.logged()) >= 3)
        one = sorted(training.workers())[rank]
        os.kill(one, signal.SIGSTOP)
        time.sleep(PAUSE)
        os.kill(one, signal.SIGCONT)
        code, output = training.end()
    assert code == 0, output
    newest = latest(runs / name / "checkpoints", warn=pytest.fail)
    assert newest is not None and newest.manifest.step == STEPS
    if layout.endswith("sync=ps"):
        assert losses(runs / name) == undisturbed(runs, layout)


CUTS = [("dp=2,precision=fp64", 0.0), ("dp=2,servers=1,precision=fp64,sync=ps", 0.0),
        ("dp=2,precision=fp64,sync=local,every=5", 0.0), ("dp=2,servers=1,precision=fp64,sync=ps", 2.0)]  # fmt: skip
"""(layout of two ranks on two hosts, seconds of `--hang`: 0 is the usual one, which is longer than the cut)"""


@of_some("cut", SERVERS, 2)
@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize(("layout", "hang"), some_of(CUTS, 1, "cut links"))
def test_a_cut_link_delays_the_run_or_ends_it_when_patience_does(
    runs: Path, tmp_path: Path, layout: str, hang: float
) -> None:
    name = f"cut-{number(layout)}-{hang:g}"
    more = (*SETTINGS, *(("--hang", f"{hang:g}") if hang else ()))
    with (
        hosts("1Gb/s", 2, tmp_path) as (network, variables),
        train(runs, name, layout, *more, variables=variables) as training,
    ):
        training.wait_for(lambda: latest(runs / name / "checkpoints") is not None)
        ranks = training.workers()
        _link(network.hosts[1].name, "down")
        time.sleep(hang + 8.0 if hang else PAUSE)
        _link(network.hosts[1].name, "up")
        code, output = training.end()
    assert gone(ranks)
    newest = latest(runs / name / "checkpoints", warn=pytest.fail)
    assert newest is not None
    newest.verify()
    if hang:
        assert code not in (0, 2) and "Traceback" not in output, output
        assert re.search(r"made (no )?progress for 2 s", output.splitlines()[-1]), output
        assert newest.manifest.step % EVERY == 0
    else:
        assert code == 0, output
        assert newest.manifest.step == STEPS
        assert losses(runs / name) == undisturbed(runs, layout)


def _link(host: str, state: str) -> None:
    subprocess.run(["ip", "-n", host, "link", "set", "dev", "eth0", state], check=True)
