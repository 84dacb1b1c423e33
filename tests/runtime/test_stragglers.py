import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

from harness.cases import from_table
from harness.training_process import command, events, shardwise
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import catalog
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_memory import read_memory
from shardwise.report.step_report import StepReport
from shardwise.report.waiting import RankWaiting, waiting_lines
from shardwise.runtime.job import pulse, slow
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.pulse import Pulse
from shardwise.runtime.job.slow import SLICE, InjectedWaiting, TrainingClock
from shardwise.schedule.stragglers import Stragglers

pytestmark = pytest.mark.usefixtures("leftovers")
CPU = torch.device("cpu")


class Clock:
    """A module `time` whose seconds pass when the test says so. cpu: seconds of the thread."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 0.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def lose_core(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(slow, "time", made)
    monkeypatch.setattr(pulse, "time", made)
    return made


def injected(rank: int, *texts: str, emulated: float | None = None, seed: int = 0) -> tuple[InjectedWaiting, Pulse]:
    signs = Pulse()
    return InjectedWaiting(Stragglers.parse(texts, seed), emulated, rank, CPU, signs), signs


def test_trap_32_a_slow_rank_waits_for_a_multiple_of_its_arithmetic(clock: Clock) -> None:
    waits = {}
    for rank in (0, 1):
        waiting, signs = injected(rank, "rank=1,factor=3")
        waits[rank] = []
        for seconds in (0.2, 0.5, 0.1):
            clock.sleeps = []
            waiting.begin(0)
            waits[rank].append(sum(clock.sleeps))
            clock.compute(seconds)
            signs.wait("a sum over others")
            clock.compute(4.0)  # the rank spins
            signs.work()
            clock.lose_core(1.0)
            waiting.computed()
    assert waits[0] == [0, 0, 0]
    assert waits[1][0] == 0  # nothing was computed before
    assert waits[1][1:] == pytest.approx([2 * (0.2 + 1.0), 2 * (0.5 + 1.0)])


def test_a_rank_that_does_not_wait_is_timed_by_its_cpu_seconds(clock: Clock) -> None:
    waiting, _ = injected(0, "rank=0,factor=2")
    waiting.begin(0)
    clock.compute(0.25)
    clock.lose_core(3.0)
    waiting.computed()
    waiting.begin(1)
    assert sum(clock.sleeps) == pytest.approx(0.25)


def test_trap_32_emulated_arithmetic_lasts_its_time_times_the_factor(clock: Clock) -> None:
    for rank, factor in ((0, 1.0), (1, 3.0)):
        waiting, signs = injected(rank, "rank=1,factor=3", emulated=0.4)
        began = clock.now
        waiting.begin(0)
        clock.compute(0.1)
        signs.wait("a sum inside the arithmetic")
        clock.lose_core(2.0)
        signs.work()
        waiting.computed()
        assert clock.now - began == pytest.approx(0.4 * factor + 2.0)
        assert waiting.seconds == pytest.approx(0.4 * factor - 0.1) and not waiting.exceeded


def test_arithmetic_that_takes_longer_than_is_emulated_is_counted(clock: Clock) -> None:
    waiting, _ = injected(0, emulated=0.4)
    for seconds in (0.3, 0.5, 0.7):
        waiting.begin(0)
        clock.compute(seconds)
        waiting.computed()
    waiting.begin(0, recorded=True)
    clock.compute(5.0)
    waiting.computed()
    assert (waiting.exceeded, waiting.longest) == (2, pytest.approx(0.7))


def test_runs_and_predictions_draw_the_same_factors(clock: Clock) -> None:
    drawn = Stragglers.parse(["rank=all,factor=3,probability=0.25", "rank=all,spread=0.2"], 9)
    waiting, _ = injected(2, "rank=all,factor=3,probability=0.25", "rank=all,spread=0.2", emulated=0.1, seed=9)
    lasted = []
    for step in range(20):
        began = clock.now
        waiting.begin(step)
        waiting.computed()
        lasted.append(clock.now - began)
    assert lasted == pytest.approx([0.1 * drawn.factor(2, step) for step in range(20)])


def test_injected_waiting_is_no_hang(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(pulse.SIZE)
    waiting = InjectedWaiting(Stragglers.parse(["rank=0,factor=100"]), 1.0, 0, CPU, Pulse(memory))
    quiet = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        quiet.append(pulse.stuck({0: pulse.signs_in(memory)}, 2 * SLICE, clock.now))

    monkeypatch.setattr(clock, "sleep", sleep)
    waiting.begin(0)
    waiting.computed()
    assert len(quiet) >= 900 and not any(quiet)


def test_trap_32_waiting_for_others_is_counted(clock: Clock) -> None:
    signs = Pulse()
    training = TrainingClock(signs)
    signs.wait("a validation")
    clock.lose_core(7.0)
    signs.work()
    with training.running():
        clock.compute(1.0)
        signs.collective("all_reduce over dp")
        clock.compute(0.5)
        signs.wait()
        clock.lose_core(2.0)
        signs.wait("the same again")
        clock.lose_core(1.0)
        signs.work()
        clock.compute(0.5)
    signs.wait("another one")
    clock.lose_core(7.0)
    signs.work()
    found = training.of_rank(3, 0.25)
    assert (found.rank, found.seconds, found.waiting, found.injected) == (3, 5.0, 3.0, 0.25)
    assert found.share == pytest.approx(0.6)


def test_lines_of_few_and_of_many_ranks() -> None:
    few = [RankWaiting(rank, 10.0, waited, injected) for rank, waited, injected in ((0, 5.0, 0), (1, 0.1, 6))]
    assert waiting_lines(few) == [
        "waiting for other ranks, of the time: rank 0 50.0%, rank 1 1.00%",
        "injected waiting, of the time: rank 0 0%, rank 1 60.0%",
    ]
    many = [RankWaiting(rank, 10.0, rank / 10) for rank in range(64)]
    lines = waiting_lines(many)
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).endswith(
        "least 0% (rank 0), middle 32.0% (rank 32), most 63.0% (rank 63)"
    )
    assert waiting_lines(many[:1]) == []


@from_table
def test_what_cannot_be_injected_is_one_line(options: dict, words: str) -> None:
    model = catalog.get("tiny-llama")
    with pytest.raises(UserError) as error:
        TrainConfig(model, Layout.parse("dp=2"), Workload(8, 2), "stdlib", "out", **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_configuration_is_written_and_read() -> None:
    config = TrainConfig(
        catalog.get("tiny-llama"), Layout.parse("dp=2"), Workload(8, 2), "stdlib", "out",
        slow=("rank=1,factor=3",), emulate="250ms",
    )  # fmt: skip
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config and again.emulated == 0.25 and again.stragglers.factor(1, 0) == 3


def train(runs: Path, out: Path, layout: str, *more: str, steps: int = 6) -> tuple[dict, list[dict], str]:
    """(result, events, standard output) of a run."""
    done = shardwise(*command(runs, out, f"{layout},precision=fp32", steps, "--seq", "16", *more))
    return json.loads((out / "result.json").read_text()), events(out), done.stdout


def test_slow_ranks_change_no_number_of_lockstep(runs: Path, tmp_path: Path) -> None:
    plain, logged, _ = train(runs, tmp_path / "plain", "dp=2")
    slowed, later, said = train(
        runs, tmp_path / "slow", "dp=2", "--slow", "rank=1,factor=2", "--slow", "rank=all,factor=2,probability=0.5",
        "--emulate", "40ms",
    )  # fmt: skip
    numbers = [[(e["loss"], e["grad_norm"]) for e in events if "loss" in e] for events in (logged, later)]
    assert numbers[0] == numbers[1] and slowed["validation_loss"] == plain["validation_loss"]
    waiting = slowed["waiting"]
    assert [row["rank"] for row in waiting] == [0, 1]
    assert all(0 <= row["waiting_s"] <= row["seconds"] and row["injected_s"] > 0 for row in waiting)
    assert "injected waiting" in said and "waiting for other ranks" in said
    assert all(row["injected_s"] == 0 and row["waiting_s"] > 0 for row in plain["waiting"])
    assert all(event["waiting_s"] >= 0 for event in logged if "loss" in event)
    total = math.fsum(event["waiting_s"] for event in logged if "loss" in event)
    assert 0 < total <= plain["waiting"][0]["waiting_s"] * (1 + 1e-9)
    config = json.loads((tmp_path / "slow/run.json").read_text())["config"]
    assert config["slow"] == ["rank=1,factor=2", "rank=all,factor=2,probability=0.5"] and config["emulate"] == "40ms"


def test_a_run_names_its_slow_rank_from_what_it_recorded(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    slow = ("--slow", "rank=1,factor=3", "--emulate", "400ms", "--report", "--hang", "60")
    result, _, said = train(runs, out, "dp=2,recompute=full", *slow)
    found, run = result["verdict"], RunDirectory.open(out)
    assert found["cause"] == "slow rank" and found["findings"][0]["ranks"] == [1]
    assert "rank 1 computed" in found["line"] and "(injected)" in found["line"] and "rank 0 lost" in found["line"]
    assert f"step {found['step']}: {found['line']}" in " ".join(said.split())
    (again,) = json.loads(shardwise("compare", out, "--json").stdout)["verdicts"]
    assert {name: again[name] for name in found} == found
    recorded = run.timelines()
    assert list(recorded) == [4, 6]
    spans = [span for timeline in recorded[4].on_one_clock.values() for span in timeline]
    assert {"loading text", "recompute blocks.0"} <= {span.name for span in spans}
    assert all(span.args["ranks"] == [0, 1] for span in spans if span.stream == "communication")
    (memory,) = read_memory(run.memory)
    assert memory.step == 3 and sum(memory.peak.values()) == StepReport.read(run.report("measured")).roles[0].peak_bytes
    told = _memory_viz.trace(pickle.loads(run.memory_snapshot.read_bytes()))  # as PyTorch's own viewer reads it
    assert "= MEM[" in told and "free completed" in told


@pytest.mark.parametrize("layout", ["dp=2,sync=async,servers=1:own", "dp=2,sync=local,every=3"])
def test_trap_32_factors_of_a_run_without_lockstep(runs: Path, tmp_path: Path, layout: str) -> None:
    """Asynchronous workers draw by the number of their share of the text; a step has two."""
    slow = "rank=all,spread=0.1"
    _, logged, _ = train(runs, tmp_path / "run", layout, "--slow", slow, "--emulate", "20ms", "--seed", "5")
    drawn, steps = Stragglers.parse([slow], 5), [event for event in logged if "loss" in event]
    for number, event in enumerate(steps):
        at = event["step"] - 1
        shares = (2 * at, 2 * at + 1) if "async" in layout else (number,)
        assert any(event["slow_factor"] == pytest.approx(drawn.factor(0, share), rel=1e-12) for share in shares)


@pytest.mark.parametrize("layout", ["dp=2,sync=async", "dp=2,sync=local,every=3"])
def test_slow_ranks_without_lockstep(runs: Path, tmp_path: Path, layout: str) -> None:
    steps = 60 if "async" in layout else 6  # on a busy machine rank 0 may compute all shares of a few steps
    result, logged, _ = train(runs, tmp_path / "run", layout, "--slow", "rank=1,factor=3", steps=steps)
    assert math.isfinite(result["loss"]) and len(result["waiting"]) == 2
    assert result["waiting"][1]["injected_s"] > 0 == result["waiting"][0]["injected_s"]
    assert sum("loss" in event for event in logged) == 6 or "async" in layout
