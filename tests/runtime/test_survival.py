"""Runs that survive: ranks killed at any moment, hangs made on purpose, signals, and disks that refuse.

Runs are real ones, as a user starts them. `harness/faulty_worker.py` stands in for a rank that gets into trouble.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import forked
from harness.cases import table
from harness.today import EVERYTHING, STORAGE, TORCHRUN, of_some, seed, some_of
from harness.training_process import LIMIT, Process, command, environment, events, losses, manifests, restarted
from shardwise import api
from shardwise.checkpoint import Checkpoint, diff, latest
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.report.run_directory import occupied
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.job.stop import StopRequest
from shardwise.runtime.sync.outer_step import Rounds

pytestmark = pytest.mark.usefixtures("leftovers")
HANG = 3.0
FOUR = "dp=2,tp=2,zero=3,sp,precision=fp32"
TWO = "dp=2,zero=3,precision=fp32"
ONE = "precision=fp32"
STEPS = 8
MODEL = {"vocab": 300, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "max_positions": 64}
WORKER = str(Path(__file__).parents[1] / "harness" / "faulty_worker.py")


@dataclass
class Attempt:
    """A run that has ended. result: None when it failed with `error`. lines: what it said on the way."""

    out: Path
    result: api.TrainResult | None
    error: BaseException | None
    lines: list[str]
    alive: list[int]

    @property
    def events(self) -> list[dict[str, Any]]:
        return events(self.out)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if "restart" in event]

    @property
    def steps(self) -> list[int]:
        """Of its checkpoints."""
        return sorted(int(path.name.partition("-")[2]) for path in (self.out / "checkpoints").iterdir())

    @property
    def newest(self) -> Checkpoint:
        return Checkpoint.open(self.out / "checkpoints" / f"step-{self.steps[-1]}")

    @property
    def status(self) -> str:
        status: str = json.loads((self.out / "run.json").read_text())["status"]
        return status


def run(runs: Path, layout: str, fault: dict[str, Any] | None = None, **options: Any) -> Attempt:
    """Train in this process's own launcher, with one rank that gets into trouble."""
    out = runs / f"run-{len(list(runs.iterdir()))}"
    once, pids = out.with_name(f"{out.name}-happened"), out.with_name(f"{out.name}-pids")
    pids.mkdir()
    given = {"what": "hang", "rank": -1, "where": "forward", "step": 5} | (fault or {})
    command = [sys.executable, WORKER, json.dumps(given | {"once": str(once), "pids": str(pids)})]
    launched = {name: options.pop(name) for name in ("restarts", "elastic", "unread") if name in options}
    settings = {"save_every": 2, "hang": HANG, "validate_batches": 1, "tensorboard": False} | options
    config = api.configure(
        ModelConfig("small", **MODEL), layout, Workload(seq=32, batch=4), runs / "text", settings.pop("steps", STEPS),
        out, **settings,
    )  # fmt: skip
    result, error, lines = forked.call("harness.run_jobs:train", config, command, launched, timeout=LIMIT)
    alive = [int(file.name) for file in pids.iterdir() if Path("/proc", file.name).exists()]
    return Attempt(out, result, error, lines, alive)


@cache
def undisturbed(runs: Path, layout: str, **options: Any) -> list[float]:
    done = run(runs, layout, **options)
    assert done.result is not None, done.error
    assert len(done.result.losses) == options.get("steps", STEPS)
    return done.result.losses


def happened(attempt: Attempt) -> float:
    return float(attempt.out.with_name(f"{attempt.out.name}-happened").read_text())


# -- hangs made on purpose


HANGS: list[tuple[str, int, str, str, str, dict[str, Any]]] = table(__file__, "HANGS")
"""(layout, rank, what, where, what is named, more settings)."""


@pytest.mark.parametrize(
    ("layout", "rank", "what", "where", "named", "more"), [HANGS[0], *some_of(HANGS[1:], 1, "hangs")]
)
def test_a_hang_is_found_and_named_and_the_run_ends_as_if_nothing_had_happened(
    runs: Path, layout: str, rank: int, what: str, where: str, named: str, more: dict[str, Any]
) -> None:
    done = run(runs, layout, {"what": what, "rank": rank, "where": where, "step": 6}, restarts=2, **more)
    assert done.result is not None and not done.alive, (done.error, done.alive)
    assert done.result.losses == undisturbed(runs, layout)
    (restart,) = done.restarts
    line = restart["because"]
    assert re.match(rf"rank {rank} made no progress for \d s at step 6 {named}", line), line
    others = set(range(4 if layout == FOUR else 2 if layout == TWO else 1)) - {rank}
    waiting = line.partition(";")[2]
    assert all(re.search(rf"\b{other}\b[^;]* waited for it in ", waiting) for other in others), line
    assert restart["from"] == str(done.out / "checkpoints" / "step-4")
    # The issue's own bound: the limit plus five seconds, from the first moment of the hang to the end of all ranks.
    assert restart["time"] - happened(done) < HANG + 5
    if what == "hang":
        assert "trouble" in (done.out / "errors" / f"rank-{rank}.txt").read_text()


def test_without_restarts_a_hang_is_one_line(runs: Path) -> None:
    done = run(runs, TWO, {"what": "hang", "rank": 0, "where": "forward", "step": 2})
    assert isinstance(done.error, RunFailed) and not done.alive
    assert str(done.error).startswith("rank 0 made no progress for 3 s at step 2 in forward of blocks.0")
    assert "rank 1 waited for it in" in str(done.error) and "\n" not in str(done.error)
    assert "no checkpoint yet: start it again with another --out, and with --save-every N" in str(done.error)
    assert done.status == "failed"


def test_output_that_nobody_reads_ends_no_run(runs: Path) -> None:
    done = run(runs, ONE, unread=True)
    assert done.result is not None, done.error
    assert done.result.losses == undisturbed(runs, ONE)


# -- a rank that dies, or raises


@pytest.mark.parametrize(
    ("what", "where", "words"), [("kill", "optimizer", "was killed by SIGKILL"), ("raise", "backward", "failed")]
)
def test_who_failed_is_named_with_step_collective_and_peers(runs: Path, what: str, where: str, words: str) -> None:
    done = run(runs, TWO, {"what": what, "rank": 1, "where": where, "step": 5}, restarts=1)
    assert done.result is not None and not done.alive
    assert done.result.losses == undisturbed(runs, TWO)
    (restart,) = done.restarts
    assert re.match(rf"rank 1 {words} at step 5 in .*, after \w+ over dp for .* in ", restart["because"])
    assert "; rank 0 waited for it in " in restart["because"]
    assert done.lines[-1] == f"restart 1 of 1 from {done.out}/checkpoints/step-4: {restart['because']}"


def test_before_the_first_checkpoint_a_run_begins_again(runs: Path) -> None:
    done = run(runs, TWO, {"what": "kill", "rank": 1, "where": "forward", "step": 1}, restarts=1, save_every=0)
    assert done.result is not None and done.result.losses == undisturbed(runs, TWO)
    assert "from the beginning, because there is no checkpoint yet" in done.lines[-1]


def test_restarts_are_used_up(runs: Path) -> None:
    done = run(runs, ONE, {"what": "raise", "rank": 0, "where": "forward", "step": 3, "again": True}, restarts=1)
    assert isinstance(done.error, RunFailed) and "ZeroDivisionError: on purpose" in str(done.error)
    assert [event["restart"] for event in done.restarts] == [1]


def test_a_damaged_checkpoint_is_passed_over(runs: Path) -> None:
    """The newest checkpoint loses a file at the moment of the failure."""
    done = run(
        runs, ONE, {"what": "damage", "rank": 0, "where": "forward", "step": 7}, restarts=1, steps=8
    )  # fmt: skip
    assert done.result is not None and done.result.losses == undisturbed(runs, ONE)
    assert any("is missing" in line and "an earlier one is used" in line for line in done.lines)
    assert done.restarts[0]["from"].endswith("step-4")


def test_a_checkpoint_with_wrong_bytes_is_set_aside(runs: Path) -> None:
    """What its files' lengths do not show is seen when it is read; that uses up no restart."""
    done = run(runs, ONE, {"what": "flip", "rank": 0, "where": "forward", "step": 7}, restarts=1)
    assert done.result is not None, done.error
    assert done.result.losses == undisturbed(runs, ONE)
    checkpoints = done.out / "checkpoints"
    assert done.lines[-1] == (
        f"{checkpoints}/step-6/rank-00000.safetensors is damaged: the checksum of second/head.norm.weight is wrong "
        f"(set aside as step-6.damaged); resuming from {checkpoints}/step-4"
    )
    assert [event["from"] for event in done.events if "damaged" in event] == [f"{checkpoints}/step-4"]
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step-4", "step-6", "step-6.damaged", "step-8"}
    Checkpoint.open(checkpoints / "step-6").verify()


def test_what_one_rank_cannot_read_leaves_no_run(runs: Path) -> None:
    """The others may have read theirs by then: the same command must be possible once more."""
    whole = run(runs, ONE, steps=2)
    part = whole.out / "checkpoints/step-2/rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-8] ^= 1
    part.write_bytes(data)
    done = run(runs, TWO, steps=4, resume=str(part.parent))
    assert isinstance(done.error, UserError) and "the checksum of" in str(done.error) and not done.alive
    assert not done.out.exists() or not occupied(done.out)


# -- fewer ranks


def test_an_elastic_run_goes_on_without_the_rank_that_was_killed(runs: Path) -> None:
    layout = "dp=4,zero=3,shard=2,precision=fp64"
    fault = {"what": "kill", "rank": 3, "where": "forward", "step": 6}
    done = run(runs, layout, fault, restarts=1, elastic=True)
    assert done.result is not None, done.error
    assert done.restarts[0]["layout"] == "dp=2,zero=3,precision=fp64"
    assert "on 2 ranks as dp=2,zero=3,precision=fp64: rank 3 was killed" in done.lines[-1]
    assert done.result.losses == pytest.approx(undisturbed(runs, layout), rel=1e-9, abs=0)
    assert done.result.losses[:4] == undisturbed(runs, layout)[:4]


def test_a_run_that_cannot_shrink_says_so(runs: Path) -> None:
    fault = {"what": "kill", "rank": 0, "where": "forward", "step": 6}
    done = run(runs, ONE, fault, restarts=1, elastic=True)
    assert done.result is not None and done.result.losses == undisturbed(runs, ONE)
    assert "on as many ranks as before, because dp cannot shrink" in done.lines[-1]


def test_elastic_needs_restarts(runs: Path) -> None:
    done = run(runs, ONE, elastic=True)
    assert isinstance(done.error, UserError) and "--restarts" in str(done.error)


# -- a process of its own: kills at random moments, signals, torchrun


@pytest.mark.parametrize("mode", some_of(["sync", "async"], 1, "kills"))
def test_kills_at_random_moments_lose_no_more_than_the_steps_since_the_last_save(runs: Path, mode: str) -> None:
    kills = 20 if EVERYTHING else 2
    generator = random.Random(f"{seed()} {mode}")
    every, steps, out = 2, 7 * kills + 8, runs / f"killed-{mode}"
    arguments = command(runs, out, FOUR, steps, "--save-every", str(every), "--keep-last", "0")
    arguments += ["--restarts", str(kills)] + ["--save-async"] * (mode == "async")
    whole: list[int] = []
    last: list[int] = []
    saving = 0
    with Process(arguments, out) as training:
        for kill in range(kills):
            done = len(training.logged())
            wanted = done + generator.randint(1, 5)
            training.wait_for(lambda wanted=wanted: len(training.logged()) >= wanted)
            ranks = training.workers()
            assert len(ranks) == 4
            if kill % 4 != 3:
                training.wait_for(lambda: not all(manifests(out).values()), pause=0.0)
            else:
                time.sleep(generator.uniform(0, 0.2))
            before = manifests(out)
            for pid in generator.choice([ranks, [generator.choice(ranks)]]):
                os.kill(pid, signal.SIGKILL)
            saving += not all(before.values())
            whole.append(max((step for step, there in before.items() if there), default=0))
            last.append(training.logged()[-1])
            training.wait_for(lambda kill=kill: restarted(out) > kill)
            if found := latest(out / "checkpoints", warn=pytest.fail):
                found.verify()
        code, output = training.end()
    assert code == 0, output
    restarts = [event for event in events(out) if "restart" in event]
    assert len(restarts) == kills
    for event, good, reached in zip(restarts, whole, last, strict=True):
        resumed = int(event["from"].rpartition("-")[2]) if event["from"] else 0
        assert resumed >= good, "a checkpoint that was whole has been lost"
        # While one save is under way in the background, the run may reach the next.
        assert reached - resumed <= every * (1 if mode == "sync" else 2), (event, reached)
    assert saving >= kills * 15 / 40
    plain = runs / f"unkilled-{mode}"
    if mode == "sync" or not (runs / "unkilled-sync").exists():
        with Process(command(runs, plain, FOUR, steps), plain) as training:
            assert training.end()[0] == 0
    else:
        plain = runs / "unkilled-sync"
    assert losses(out) == losses(plain)
    newest = latest(out / "checkpoints", warn=pytest.fail)
    assert newest is not None and newest.manifest.step == steps
    assert diff(newest, Checkpoint.open(plain / "checkpoints" / f"step-{steps}")) == []


LONG = 60
"""Steps of a run that is still at work when somebody has looked at its first ones, however busy the machine."""


@pytest.mark.parametrize(("every", "end"), [(1, 6), (10, 10), (5, 5), (4, 8)])
def test_all_ranks_end_before_the_same_step_whenever_they_look(
    every: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is beyond the last one: some have seen it before they are through, others have not. Where
    replicas agree every few steps only, before the next round."""
    from torch.distributed import HashStore

    store = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        told, other = StopRequest(Rounds(every, 100)), StopRequest(Rounds(every, 100))
        told._note(signal.SIGTERM, None)
        assert [told.agreed(step) for step in (4, end - 1, end)] == [False, False, True]
        assert [other.agreed(step) for step in (end - 1, end, end + every)] == [False, True, True]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_sigterm_lets_a_rank_save_and_a_second_ctrl_c_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster sends SIGTERM to every process, and torchrun passes it on to the same ranks."""
    from torch.distributed import HashStore

    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", HashStore)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        told = StopRequest(Rounds(1, 100))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert told.noted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.getsignal(signal.SIGINT)  # handlers run between two instructions
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unstopped(runs: Path) -> dict[int, float]:
    """Losses of a long run on two ranks."""
    plain = runs / "unstopped"
    if not plain.exists():
        with Process(command(runs, plain, TWO, LONG), plain) as training:
            assert training.end()[0] == 0
    return losses(plain)


@pytest.mark.parametrize("number", some_of([signal.SIGINT, signal.SIGTERM], 1, "signals"))
def test_a_signal_saves_and_says_how_to_go_on(runs: Path, number: signal.Signals) -> None:
    out = runs / f"stopped by {number.name}"
    with Process(command(runs, out, TWO, LONG), out) as training:
        training.wait_for(lambda: len(training.logged()) >= 3)
        ranks = training.workers()
        training.send(number)
        code, output = training.end()
    assert code == 128 + number and "Traceback" not in output, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    reached = training.logged()[-1]
    found = latest(out / "checkpoints", warn=pytest.fail)
    assert found is not None and 3 <= found.manifest.step == reached < LONG
    found.verify()
    line = output.splitlines()[-1]
    words = re.fullmatch(
        rf"shardwise: stopped by {number.name}: all 2 ranks have ended\. The run is saved up to step {reached}; "
        r"resume with: shardwise (train .*)",
        line,
    )
    assert "error" not in output and output.count("--resume") == 1
    assert words and json.loads((out / "run.json").read_text())["status"] == "stopped"
    with Process(shlex.split(words[1]), out) as training:
        code, output = training.end()
    assert code == 0, output
    assert losses(out) == unstopped(runs)


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


@of_some("killed", TORCHRUN, 2)
def test_torchrun_starts_again_from_the_last_checkpoint(runs: Path) -> None:
    out = runs / "torchrun"
    with Process(command(runs, out, TWO, LONG, "--save-every", "10"), out, *LAUNCHER) as training:
        training.wait_for(lambda: len(training.logged()) >= 15)
        victims = [pid for pid in training.workers() if b"shardwise" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        code, output = training.end()
    assert code == 0, output
    (resumed,) = [event["resumed"] for event in events(out) if "resumed" in event]
    assert resumed >= 10 and resumed % 10 == 0
    assert losses(out) == unstopped(runs)


@of_some("foreign", TORCHRUN, 2)
def test_torchrun_starting_again_does_not_go_on_with_another_run(runs: Path) -> None:
    """The first attempt is refused because the folder is in use; the second must not take that run for its own."""
    out = runs / "foreign"
    with Process(command(runs, out, TWO, 4), out) as training:
        assert training.end()[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with Process(command(runs, out, TWO, 4), out, *LAUNCHER) as training:
        code, output = training.end()
    assert code != 0 and "nothing was overwritten" in output
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@of_some("hung", TORCHRUN, 2)
def test_torchrun_hears_of_a_hang_from_the_rank_itself(runs: Path) -> None:
    out = runs / "hung"
    settings = {"hang": HANG, "validate_batches": 1, "tensorboard": False}
    config = api.configure(
        ModelConfig("small", **MODEL), TWO, Workload(seq=32, batch=4), runs / "text", STEPS, out, **settings
    )
    api.with_corpus(config, lambda line: None).write(runs / "hung.json")
    (runs / "hung-pids").mkdir()
    fault = {"what": "hang", "rank": 1, "where": "optimizer", "step": 3}
    fault |= {"once": str(runs / "hung-happened"), "pids": str(runs / "hung-pids")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", WORKER),
            *(json.dumps(fault), str(runs / "hung.json")),
        ],
        capture_output=True, text=True, timeout=LIMIT, env=environment(),
    )  # fmt: skip
    assert done.returncode
    assert "rank 1 made no progress for 3 s at step 3 in the optimizer, after all_reduce over dp" in done.stderr
    assert not any(Path("/proc", file.name).exists() for file in (runs / "hung-pids").iterdir())


@of_some("other text", STORAGE, 2)
def test_an_older_checkpoint_starts_a_run_of_its_own(runs: Path) -> None:
    done = run(runs, ONE)
    older = done.out / "checkpoints" / "step-4"
    with pytest.raises(UserError, match=r"has continued to step 8.*--out"):
        api.resume(older)
    branch = api.resume(older, out=runs / "branch", rank0_stdout=2, progress=lambda line: None)
    assert branch.losses == undisturbed(runs, ONE)[4:]


# -- disks that refuse, files that vanish


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_is_a_warning_and_the_last_one_an_error(runs: Path, later: bool, capfd: Any) -> None:
    """A limit on the size of files stands in for a full disk: one rank's part does not fit."""
    done = run(runs, TWO, {"what": "file limit", "rank": 1, "bytes": 50_000}, save_async=later, steps=5)
    assert isinstance(done.error, UserError) and not done.alive
    assert re.fullmatch(r"cannot write checkpoint .*/step-5/rank-00001\S*: File too large; .*", str(done.error))
    warnings = [event["warning"] for event in done.events if "warning" in event]
    assert [re.search(r"step-\d", text)[0] for text in warnings] == ["step-2", "step-4"]  # type: ignore[index]
    assert all("File too large; earlier checkpoints are untouched" in text for text in warnings)
    assert not list((done.out / "checkpoints").iterdir()), "parts of others were left on a full disk"
    assert [event["loss"] for event in done.events if "loss" in event] == undisturbed(runs, TWO, steps=5)


def test_a_last_save_that_fails_says_where_to_resume(runs: Path) -> None:
    done = run(runs, TWO, {"what": "refuse", "rank": 1, "where": "save", "step": STEPS})
    assert isinstance(done.error, UserError) and not done.alive
    assert re.fullmatch(
        r"cannot write this: No space left on device.*\. The run is saved up to step 6; "
        rf"resume with: shardwise train --resume {done.out}",
        str(done.error),
    ), done.error
    again = api.resume(done.out, rank0_stdout=2, progress=lambda line: None)
    assert again.losses == undisturbed(runs, TWO)


def test_before_the_first_checkpoint_a_save_that_fails_names_none(runs: Path) -> None:
    done = run(runs, TWO, {"what": "refuse", "rank": 1, "where": "save", "step": STEPS}, save_every=0)
    assert isinstance(done.error, UserError) and "resume" not in str(done.error)


def in_namespace(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script where it may mount; skips the test where that is not possible."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("mounting needs user namespaces")
    process = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@of_some("full", STORAGE, 2)
def test_a_full_disk(runs: Path) -> None:
    """A disk with room for two checkpoints."""
    disk = runs / "disk"
    disk.mkdir()
    train = shlex.join([sys.executable, "-m", "shardwise"])
    arguments = shlex.join(command(runs, disk / "run", TWO, 8, "--save-every", "2", "--keep-last", "0"))
    done = in_namespace(
        f"mount -t tmpfs -o size=3m tmpfs {disk} && {train} {arguments}; echo code $?; "
        f"{train} checkpoint verify {disk}/run; echo verified $?; ls {disk}/run/checkpoints",
        runs,
    )
    assert "code 2" in done.stdout and "verified 0" in done.stdout, (done.stdout, done.stderr)
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert "shardwise: warning: cannot write checkpoint" in done.stderr
    assert done.stderr.rstrip().endswith(f"resume with: shardwise train --resume {disk}/run")
    assert re.findall(r"^step-\d$", done.stdout, re.M) == ["step-2", "step-4"]


@of_some("read-only", STORAGE, 2)
def test_a_folder_that_becomes_read_only(runs: Path) -> None:
    """Mounted read-only after the first checkpoint, as a file system does that has seen an error.

    A mount with a file open for writing is busy, so the script asks again until it falls between two saves.
    """
    out = runs / "read-only"
    folder = out / "checkpoints"
    train = shlex.join([sys.executable, "-m", "shardwise"])
    arguments = shlex.join(command(runs, out, TWO, 200, "--save-every", "2"))
    done = in_namespace(
        f"{train} {arguments} & "
        f"until test -e {folder}/step-2/manifest.json || ! kill -0 $!; do sleep 0.02; done; "
        f"mount --bind {folder} {folder}; "
        f"until mount -o remount,bind,ro {folder} 2>busy || ! kill -0 $!; do sleep 0.003; done; "
        f"wait $!; echo code $?; {train} checkpoint verify {out}; echo verified $?",
        runs,
    )
    assert "code 2" in done.stdout and "verified 0" in done.stdout, (done.stdout, done.stderr)
    assert "Read-only file system" in done.stderr and "Traceback" not in done.stderr


@of_some("vanished text", STORAGE, 2)
def test_prepared_text_that_vanishes(runs: Path) -> None:
    """A run has it mapped and goes on without its name; one that must start again says what is missing."""
    corpora, kept = runs / "corpora", runs / "corpora-kept"
    fault = {"what": "kill", "rank": 0, "where": "forward", "step": 6}
    for gone, restarts in (({"what": "unlink", "rank": 0, "step": 3}, 0), (fault | {"unlink": True}, 1)):
        run(runs, ONE, steps=1)
        shutil.copytree(corpora, kept)
        try:
            done = run(runs, ONE, {"where": "forward", "folder": str(corpora)} | gone, restarts=restarts)
        finally:
            shutil.rmtree(corpora, ignore_errors=True)
            kept.rename(corpora)
        if not restarts:
            assert done.result is not None and done.result.losses == undisturbed(runs, ONE)
        else:
            assert isinstance(done.error, UserError) and str(corpora) in str(done.error) and not done.alive
            found = latest(done.out / "checkpoints", warn=pytest.fail)
            assert found is not None and found.manifest.step == 4


def test_prepared_text_that_is_cut_short(runs: Path) -> None:
    corpora, kept = runs / "corpora", runs / "corpora-kept"
    run(runs, ONE, steps=1)
    shutil.copytree(corpora, kept)
    try:
        done = run(runs, ONE, {"what": "truncate", "rank": 0, "step": 6, "where": "data", "folder": str(corpora)})
    finally:
        shutil.rmtree(corpora, ignore_errors=True)
        kept.rename(corpora)
    assert isinstance(done.error, RunFailed)
    assert "rank 0 was killed by SIGBUS (a file that it reads was cut short" in str(done.error)
    found = latest(done.out / "checkpoints", warn=pytest.fail)
    assert found is not None and found.manifest.step == 4
