"""Whole runs with parameter servers, as a user starts them: what they record of their updates."""

import json
from pathlib import Path

import pytest

from harness.cases import table
from harness.today import some_of
from harness.training_process import command, shardwise
from shardwise.cli.main import main
from shardwise.layout.recorded_run import RecordedRun, recorded_run
from shardwise.layout.sync import policy_of
from shardwise.report.run_directory import RunDirectory
from shardwise.schedule.staleness import check

pytestmark = pytest.mark.usefixtures("leftovers")
STEPS = 6
LAYOUTS = table(__file__, "LAYOUTS")


def train(runs: Path, out: Path, layout: str, *more: str) -> None:
    shardwise(*command(runs, out, f"{layout},precision=fp32", STEPS, "--batch", "12", *more))


def proved(out: Path, first: int = 0) -> RecordedRun:
    run = recorded_run(RunDirectory.open(out))
    shares = run.layout.dp if run.layout.sync == "async" else 1
    assert len(run.records) == run.layout.parameter_servers.count
    for record in run.records:
        check(record.gradients, policy_of(run.layout), first * shares)
        assert (record.first, record.updates) == (first * shares, (STEPS - first) * shares)
        assert record.left_out == 0 and record.seconds > 0
        assert all(one.answered >= one.arrived >= one.started >= 0 for one in record.gradients)
        assert record.dropped == 0 or run.layout.backup
    return run


@pytest.mark.parametrize("layout", some_of(LAYOUTS, 2, "served runs"))
def test_a_run_keeps_the_record_of_its_updates(
    runs: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over several boundaries; `compare` has the counts of the whole run, which the ledger of a step multiplies."""
    out = tmp_path / "run"
    train(runs, out, layout, "--report", "--validate-every", "2", "--save-every", "3")
    run = proved(out)
    lines = [json.loads(line) for line in (out / "updates.jsonl").read_text().splitlines()]
    assert [line["begins"] for line in lines if line["server"] == 0] == [
        True,
        *[False] * (len(lines) // len(run.records) - 1),
    ]
    assert main(["compare", str(out), "--json"]) == 0, "the ledger of a worker's step is the predicted one"
    found = json.loads(capsys.readouterr().out)
    (updates,) = found["updates"]
    assert [one["gradients"] for one in updates["servers"]] == [record.pushed for record in run.records]
    assert [one["dropped"] for one in updates["servers"]] == [record.dropped for record in run.records]
    pushes = sum(one.messages for one in run.traffic if one.op == "push")
    assert pushes == sum(one.messages for one in run.traffic if one.op == "pull")
    assert pushes == run.layout.tp * sum(record.pushed for record in run.records)
    assert main(["compare", str(out)]) == 0
    assert f"{run.records[0].updates} updates by {run.records[0].pushed} gradients" in capsys.readouterr().out


def test_a_resumed_run_records_its_own_start(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(runs, out, "dp=2,sync=ssp,staleness=1", "--save-every", "4")
    proved(out)
    shardwise("train", "--resume", out / "checkpoints/step-4", "--out", tmp_path / "again")
    proved(tmp_path / "again", first=4)
