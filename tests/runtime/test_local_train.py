"""Whole runs of `sync=local`, as a user starts them."""

import json
import math
from pathlib import Path

import pytest

from harness.today import EVERYTHING
from harness.training_process import command, events, shardwise
from shardwise.report import compare
from shardwise.report.step_report import StepReport

pytestmark = pytest.mark.usefixtures("leftovers")
LAYOUT = "dp=4,replicas=2,zero=1,sync=local,every=4,outer=nesterov,outer_bits=8,precision=fp32"


def test_a_run_of_replicas_holds_its_prediction_and_resumes_bitwise(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    batches = ("--batch", "8", "--validate-batches", "2", "--validate-every", "5")
    shardwise(*command(runs, out, LAYOUT, 18, "--report", "--save-every", "6", *batches))
    # Saves, validations and losses of all replicas: with outer steps, of which the last step of a run has one.
    assert sorted(int(p.name.partition("-")[2]) for p in (out / "checkpoints").iterdir()) == [8, 12, 18]
    logged = events(out)
    assert [e["step"] for e in logged if "validation_loss" in e] == [0, 8, 12, 16, 18]
    rounds = [e["step"] for e in logged if "outer_loss" in e]
    assert rounds == [4, 8, 12, 16, 18] and all(math.isfinite(e["loss"]) for e in logged if "loss" in e)
    result = json.loads((out / "result.json").read_text())
    assert result["loss"] == logged_of(logged, "outer_loss")[-1]
    assert result["validation_loss"] < result["first_validation_loss"] - 0.3
    predicted, measured = (StepReport.read(out / f"reports/{n}.json") for n in ("predicted", "measured"))
    comparison = compare(predicted, measured)
    assert comparison.equal_ledger and comparison.exact_classes_equal
    if EVERYTHING:
        assert "replica" in shardwise("compare", out).stdout
    again = tmp_path / "again"
    shardwise("train", "--resume", out / "checkpoints/step-12", "--steps", 18, "--out", again)
    later = [e for e in logged if e.get("step", 0) > 12]
    for name in ("loss", "grad_norm", "outer_loss"):
        assert logged_of(events(again), name) == logged_of(later, name), name
    assert logged_of(events(again), "validation_loss")[-1] == result["validation_loss"]


def logged_of(found: list[dict], name: str) -> list[float]:
    return [event[name] for event in found if name in event]
