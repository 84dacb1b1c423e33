"""Whole runs, as a user starts them: real ranks, real text, a run directory at the end."""

import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import forked
from harness.texts import write
from harness.today import EVERYTHING, TORCHRUN, of_some
from harness.training_process import LIMIT, command, environment, events, shardwise
from shardwise.layout import Layout, Workload
from shardwise.model import catalog
from shardwise.model.flops import MFU
from shardwise.report import compare
from shardwise.report.exposure import exposures
from shardwise.report.step_report import StepReport
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.record import RunRecorder

pytestmark = pytest.mark.usefixtures("leftovers")
LAYOUT = "dp=2,tp=2,zero=3,sp,precision=fp32"


def numbers(out: Path) -> list[tuple]:
    return [(e.get("loss"), e.get("grad_norm"), e.get("validation_loss")) for e in events(out)]


def test_four_ranks_learn_and_hold_the_prediction(runs: Path, tmp_path: Path) -> None:
    done = shardwise(*command(runs, tmp_path / "run", LAYOUT, 12, "--report", "--json"))
    result = json.loads(done.stdout)
    assert result["validation_loss"] < result["first_validation_loss"] - 0.3
    predicted, measured = (StepReport.read(tmp_path / f"run/reports/{n}.json") for n in ("predicted", "measured"))
    comparison = compare(predicted, measured)
    assert comparison.equal_ledger and comparison.exact_classes_equal
    rows = [row for role in measured.roles for row in role.transport]
    assert rows and all(row.time_s is not None and row.time_s >= row.wait_s >= 0 for row in rows)
    assert all(role.timeline for role in measured.roles)
    shown = [line for line in done.stderr.splitlines() if line.startswith("communication: ")]
    assert len(shown) == 1 and shown[0].endswith("exposed (rank 0)")
    assert result["communication"] == exposures(measured)[0][1].to_json()
    trace = json.loads((tmp_path / "run/reports/trace.json").read_text())
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == sum(len(role.timeline) for role in measured.roles)
    assert "exposed" in shardwise("compare", tmp_path / "run").stdout


def test_three_dimensions_train_as_one_device_does(runs: Path, tmp_path: Path) -> None:
    """50 steps (12 in a day's tests) on eight processes; then its checkpoint under tp=4 and back again."""
    steps = 50 if EVERYTHING else 12
    piped = "dp=2,tp=2,pp=2,zero=1,sp,precision=fp32"
    found = {}
    for name, layout in (("one", "dp=1,precision=fp32"), ("eight", piped)):
        shardwise(*command(runs, tmp_path / name, layout, steps))
        found[name] = numbers(tmp_path / name)
    assert len(found["one"]) == len(found["eight"]) >= steps
    for one, eight in zip(found["one"], found["eight"], strict=True):
        for a, b in zip(one, eight, strict=True):
            assert (a is None) == (b is None) and (a is None or b == pytest.approx(a, rel=1e-4)), (one, eight)
    first = tmp_path / "eight"
    for step, layout in enumerate(("tp=4,precision=fp32", piped)):
        shardwise("checkpoint", "reshard", first, "--layout", layout, "--out", tmp_path / f"moved-{step}")
        first = tmp_path / f"moved-{step}"
    shardwise("checkpoint", "diff", tmp_path / "eight", first, "--json")


def test_text_in_any_format_gives_the_same_losses(runs: Path, tmp_path: Path) -> None:
    documents = [path.read_text() for path in sorted((runs / "text").iterdir())]
    found = []
    for form in ("folder", "jsonl.gz", "csv", "parquet"):
        out = tmp_path / f"run-{form}"
        data = write(tmp_path, form, documents)
        shardwise(*command(runs, out, "dp=1,precision=fp32", 2, "--data", str(data)))
        found.append(numbers(out))
    assert len(found[0]) == 4 and found == [found[0]] * 4


def test_a_run_too_short_for_a_timeline_has_a_report_without(runs: Path, tmp_path: Path) -> None:
    done = shardwise(*command(runs, tmp_path / "run", "dp=2,precision=fp32", 1, "--report"))
    measured = StepReport.read(tmp_path / "run/reports/measured.json")
    assert measured.roles[0].ledger and not measured.roles[0].timeline
    assert re.search(r"step    1/1  loss \S+  .*s, recorded, so slower than others\n", done.stdout)
    assert "tokens/s" not in done.stdout
    (event,) = [event for event in map(json.loads, (tmp_path / "run/events.jsonl").open()) if "loss" in event]
    assert event["recorded"] and event["tokens_per_s"] > 0
    assert "communication: " not in done.stdout and not (tmp_path / "run/reports/trace.json").exists()
    assert json.loads((tmp_path / "run/result.json").read_text())["communication"] is None
    assert "from its timeline" not in shardwise("compare", str(tmp_path / "run")).stdout


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_nothing_of_an_overwritten_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Terminal())
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    config = TrainConfig(
        catalog.get("tiny-llama"), Layout(), Workload(seq=8, batch=2), "text", str(tmp_path / "run"), "", steps=9,
        tensorboard=False,
    )  # fmt: skip
    record = RunRecorder(config, 1)
    event = {"loss": 5.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 7.0, "tokens_per_s": 9.0, "mfu": 0.5}
    record.step(step=1, **event)
    record.step(step=2, recorded=True, **event)
    record.step(step=3, **event)
    record.warn("something", 3)
    record.step(step=4, **event)
    record.end_line()
    record.end_line()
    shown = sys.stdout.getvalue()
    assert [line.rpartition("\r")[2].rstrip() for line in shown.split("\n")] == [
        MFU,
        "step    3/9  loss 5.0000  9 tokens/s  MFU 50.0%", "shardwise: warning: something",
        "step    4/9  loss 5.0000  9 tokens/s  MFU 50.0%", "",
    ]  # fmt: skip
    first, second, third = shown.split("\n")[1].split("\r")
    assert first == "step    1/9  loss 5.0000  9 tokens/s  MFU 50.0%"
    assert second == "step    2/9  loss 5.0000  7.00 s, recorded, so slower than others"
    assert len(third) == len(second)


def test_the_load_of_experts_is_in_the_events_and_on_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrainConfig(
        catalog.get("tiny-llama"), Layout(), Workload(seq=8, batch=2), "text", str(tmp_path / "run"), "", steps=3
    )
    record = RunRecorder(config, 1)
    event = {"loss": 5.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 7.0, "tokens_per_s": 9.0, "mfu": 0.5}
    load = {"tokens": {"blocks.1": [3, 1]}, "imbalance": 1.5, "dropped": 2, "balance_loss": 0.25}
    record.step(step=1, **event)
    record.step(step=2, experts=load, **event)
    record.finish({})
    first, second = (json.loads(line) for line in (tmp_path / "run/events.jsonl").open())
    assert "experts" not in first and second["experts"] == load
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    for name, value in (("imbalance", 1.5), ("dropped", 2.0)):
        assert [(s.step, s.value) for s in board.Scalars(f"experts/{name}")] == [(2, value)]
    assert [s.step for s in board.Scalars("train/loss")] == [1, 2]


def test_a_run_that_diverges_says_so_in_json_too(runs: Path, tmp_path: Path) -> None:
    words = command(runs, tmp_path / "run", "dp=1,precision=fp32", 4, "--lr", "1e30", "--clip", "0", "--json")
    done = forked.shardwise(*words, environment=environment(), timeout=LIMIT)
    said = "training diverged at step 2: the gradient norm is nan"
    assert done.returncode == 3 and done.stderr.count(said) == 1, done.stderr
    assert json.loads(done.stdout, parse_constant=pytest.fail)["exit_code"] == 3
    events = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "run/events.jsonl").open()]
    assert events[-1]["grad_norm"] == "NaN" and events[-1]["skipped"]


@of_some("two agents", TORCHRUN, 2)
def test_two_torchrun_agents_train_the_run_of_four_local_ranks_bitwise(runs: Path, tmp_path: Path) -> None:
    shardwise(*command(runs, tmp_path / "local", LAYOUT, 6))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
                *("--node-rank", str(node), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-id", "two-agents", "-m", "shardwise", *command(runs, tmp_path / "agents", LAYOUT, 6)),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=LIMIT)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert [output.count(f"the run is in {tmp_path / 'agents'}\n") for output in outputs] in ([1, 0], [0, 1])
    assert numbers(tmp_path / "local") == numbers(tmp_path / "agents")


def test_communication_without_overlap_gives_the_same_bits(runs: Path, tmp_path: Path) -> None:
    for name, more in (("on", []), ("off", ["--no-overlap"])):
        shardwise(*command(runs, tmp_path / name, LAYOUT, 6, "--report", "--transport", "gloo", *more))
    assert numbers(tmp_path / "on") == numbers(tmp_path / "off")
    on, off = (json.loads((tmp_path / name / "result.json").read_text())["communication"] for name in ("on", "off"))
    assert on["hidden_s"] > 0 == off["hidden_s"]
    said = [" ".join(StepReport.read(tmp_path / f"{name}/reports/measured.json").notes) for name in ("on", "off")]
    assert ["--no-overlap" in notes for notes in said] == [False, True]


def test_through_shared_memory_nothing_is_hidden(runs: Path, tmp_path: Path) -> None:
    shardwise(*command(runs, tmp_path / "run", LAYOUT, 6, "--report", "--transport", "shared"))
    communication = json.loads((tmp_path / "run/result.json").read_text())["communication"]
    assert communication["hidden_s"] == 0 < communication["exposed_s"]


def test_a_port_in_use_is_said_in_one_line(runs: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = command(runs, tmp_path / "run", LAYOUT, 6, "--port", port)
        done = forked.shardwise(*words, environment=environment(), timeout=LIMIT)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and port in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_second_run_overwrites_nothing(runs: Path, tmp_path: Path) -> None:
    words = command(runs, tmp_path / "run", "precision=fp32", 6)
    shardwise(*words)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = forked.shardwise(*words, environment=environment(), timeout=LIMIT)
    assert again.returncode == 2 and "overwritten" in again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
