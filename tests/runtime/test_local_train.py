"""Whole runs of `sync=local`, as a user starts them."""

import json
import math
from pathlib import Path

import pytest

from harness import forked
from harness.today import EVERYTHING
from shardwise.report import compare
from shardwise.report.step_report import StepReport

pytestmark = pytest.mark.usefixtures("leftovers")
LAYOUT = "dp=4,replicas=2,zero=1,sync=local,every=4,outer=nesterov,outer_bits=8,precision=fp32"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "squares.txt").write_text("\n".join(f"{n} times {n} is {n * n}" for n in range(6000)))
    return folder


def command(text: Path, out: Path, layout: str, steps: int, *more: str) -> list[str]:
    return [
        *("train", "tiny-llama", "--vocab", "300", "--layout", layout, "--data", str(text)),
        *("--seq", "32", "--batch", "8", "--steps", str(steps), "--out", str(out), "--no-tensorboard"),
        *("--set", "layers=2,hidden=64,ffn=96", "--validate-batches", "2", *more),
    ]


def train(*arguments: str) -> None:
    done = forked.shardwise(*arguments, environment={"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr


def events(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_a_run_of_replicas_holds_its_prediction_and_resumes_bitwise(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(*command(text, out, LAYOUT, 18, "--report", "--save-every", "6", "--validate-every", "5"))
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
        compared = forked.shardwise("compare", str(out), environment={}, timeout=60)
        assert compared.returncode == 0 and "replica" in compared.stdout
    again = tmp_path / "again"
    train("train", "--resume", str(out / "checkpoints/step-12"), "--steps", "18", "--out", str(again))
    later = [e for e in logged if e.get("step", 0) > 12]
    for name in ("loss", "grad_norm", "outer_loss"):
        assert logged_of(events(again), name) == logged_of(later, name), name
    assert logged_of(events(again), "validation_loss")[-1] == result["validation_loss"]


def logged_of(found: list[dict], name: str) -> list[float]:
    return [event[name] for event in found if name in event]
