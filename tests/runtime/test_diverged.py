import math
import os
from pathlib import Path
from typing import Any

import pytest
from test_survival import Attempt, run

from harness import forked
from harness.cases import table
from harness.pool import run_ranks
from harness.today import some_of
from harness.training_process import LIMIT
from shardwise.checkpoint import Checkpoint, diff
from shardwise.errors import DivergedError
from shardwise.runtime.job.config import OptimizerConfig

pytestmark = pytest.mark.usefixtures("leftovers")
LARGE = OptimizerConfig(lr=1e18, warmup=0)


def train(runs: Path, layout: str, fault: tuple[str, int, int] | None = None, **options: Any) -> Attempt:
    """fault: what is not finite, on which rank, in which step."""
    given = dict(zip(("what", "rank", "step"), fault or (), strict=False))
    settings = {"save_every": 1, "steps": 4, "restarts": 1, "hang": 60.0} | options
    done = run(runs, f"{layout},precision=fp32", given, **settings)
    assert not any("restart" in line for line in done.lines)
    return done


def logged(done: Attempt) -> list[dict[str, Any]]:
    return [event for event in done.events if "loss" in event]


FAULTS = table(__file__, "FAULTS")


@pytest.mark.parametrize(("layout", "what", "rank"), some_of(FAULTS, 2, "faults"))
def test_every_rank_stops_before_the_update_and_keeps_what_is_finite(
    runs: Path, layout: str, what: str, rank: int
) -> None:
    done = train(runs, layout, (what, rank, 3), keep_last=1)
    assert isinstance(done.error, DivergedError) and "diverged at step 3" in str(done.error)
    assert done.status == "diverged" and done.steps == [2]
    assert [event.get("skipped", False) for event in logged(done)] == [False, False, True]
    assert not done.newest.verify()


@pytest.mark.parametrize(("layout", "what", "rank"), some_of(FAULTS, 1, "skipped faults"))
def test_a_step_that_is_skipped_changes_nothing(runs: Path, layout: str, what: str, rank: int) -> None:
    done = train(runs, layout, (what, rank, 3), keep_last=0, on_nonfinite="skip")
    assert done.result is not None, done.error
    assert done.status == "finished" and done.result.summary["skipped_steps"] == 1
    # After the step that was skipped there was nothing to save.
    assert done.steps == [1, 2, 4] and done.newest.manifest.optimizer_steps == 3 and not done.newest.verify()
    assert math.isfinite(logged(done)[-1]["loss"])
    alone = train(runs, layout, (what, rank, 3), keep_last=0, on_nonfinite="skip", steps=3)
    two, three = (Checkpoint.open(alone.out / "checkpoints" / f"step-{step}") for step in (2, 3))
    changed = [each.tensor for each in diff(two, three) if not each.tensor.startswith("residual/")]
    assert not changed and (three.manifest.step, three.manifest.optimizer_steps) == (3, 2)


def test_replicas_that_train_apart_stop_together(runs: Path) -> None:
    done = train(runs, "dp=2,sync=local,every=2", ("infinite loss", 1, 3))
    assert isinstance(done.error, DivergedError) and "in the round up to step 4" in str(done.error)
    assert done.status == "diverged" and done.steps == [2, 4] and not done.newest.verify()
    assert [event.get("skipped", False) for event in logged(done)] == [False, False, True, False]


SERVED = [
    ("dp=2,sync=ps", "infinite loss"),
    ("dp=2,sync=async,servers=1:own", "nan gradient"),
    ("dp=2,sync=ssp,staleness=1,servers=2", "infinite gradient"),
]


@pytest.mark.parametrize(("layout", "what"), some_of(SERVED, 1, "served"))
def test_servers_leave_an_update_out_and_end_the_run(runs: Path, layout: str, what: str) -> None:
    done = train(runs, layout, (what, 1, 2), keep_last=0, steps=8)
    assert isinstance(done.error, DivergedError) and "servers left out an update" in str(done.error)
    assert done.status == "diverged" and done.steps[-1] < 8 and not done.newest.verify()
    skipped = train(runs, layout, (what, 1, 2), on_nonfinite="skip", steps=4)
    assert skipped.result is not None and skipped.result.summary["skipped_steps"] == 1
    updates = 4 if "async" not in layout else 8
    assert skipped.newest.manifest.optimizer_steps == updates - 1 and not skipped.newest.verify()


def test_weights_that_are_not_finite_are_never_saved(runs: Path) -> None:
    """The loss of the first step is finite, and its update makes all weights infinite."""
    done = train(
        runs, "dp=2,zero=1", optimizer=OptimizerConfig(lr=1e39, warmup=0), on_nonfinite="skip", save_async=True
    )
    assert isinstance(done.error, DivergedError) and "not finite" in str(done.error)
    assert done.status == "diverged" and done.steps == []


def test_a_run_whose_end_is_not_finite_has_not_finished(runs: Path) -> None:
    done = train(runs, "dp=1", optimizer=LARGE, steps=1)
    assert isinstance(done.error, DivergedError) and "validation loss is nan" in str(done.error)
    assert done.status == "diverged" and done.steps == [1]


def test_the_command_line_says_so_and_is_not_started_again(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = forked.shardwise(
        "train", "tiny-llama", "--vocab", "300", "--set", "layers=1,hidden=32,ffn=64", "--seq", "32", "--batch", "4",
        "--layout", "precision=fp32", "--data", str(runs / "text"), "--steps", "8", "--save-every", "1",
        "--lr", "1e18", "--warmup", "0", "--out", str(out), "--no-tensorboard", "--restarts", "2",
        environment={k: v for k, v in os.environ.items() if k != "RANK"}, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 3 and "error: training diverged at step 2" in done.stderr, done.stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.parametrize("layout", ["dp=2,zero=2"])
def test_a_split_module_is_as_it_was(layout: str) -> None:
    for found in run_ranks("harness.diverged_jobs:split_steps", 2, layout):
        assert found == ["DivergedError", "skipped", "equal", "finite", "not saved"]
