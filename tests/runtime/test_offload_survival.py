"""Ranks killed while they update state on disk: no step that had ended is lost, and none is done twice differently."""

import random
from pathlib import Path

import pytest
from test_survival import STEPS, Attempt, run, undisturbed

from harness.today import some_of

pytestmark = pytest.mark.usefixtures("leftovers")
LAYOUTS = {"dp=2,zero=3,precision=fp32": "offload=nvme,offload_params=nvme", "precision=fp32": "offload=nvme"}
LOADS = 4  # of the model of test_survival: two blocks, embedding and head


def kills() -> list[tuple[str, int, int, str, int]]:
    """(layout in memory, rank, step, where, call): before each write of an update, and before the commit."""
    generator, found = random.Random(20), []
    for _ in range(20):
        layout = generator.choice(list(LAYOUTS))
        where = generator.choice(["write of state"] * 3 + ["commit of state"])
        call = generator.randint(1, LOADS) if where == "write of state" else 1
        found.append((layout, generator.randrange(2) if "dp" in layout else 0, generator.randint(2, 7), where, call))
    return found


@pytest.mark.parametrize(("layout", "rank", "step", "where", "call"), some_of(kills(), 2, "kills on disk"))
def test_a_kill_during_an_update_loses_no_step(
    runs: Path, layout: str, rank: int, step: int, where: str, call: int
) -> None:
    fault = {"what": "kill", "rank": rank, "where": where, "step": step, "calls": call}
    done = run(runs, f"{layout},{LAYOUTS[layout]}", fault, restarts=1, save_every=0)
    assert done.result is not None, done.error
    assert done.result.losses == undisturbed(runs, layout)
    assert len(done.result.losses) == STEPS
    assert resumed(done) == step - 1
    assert not (done.out / "offload").exists()


def test_a_step_whose_loss_was_not_written_is_run_again(runs: Path) -> None:
    """Its state is on disk, as after a disk that was full for the log alone."""
    fault = {"what": "kill", "rank": 0, "where": "event", "step": 5}
    done = run(runs, "dp=2,zero=3,precision=fp32,offload=nvme", fault, restarts=1, save_every=0)
    assert done.result is not None, done.error
    assert done.result.losses == undisturbed(runs, "dp=2,zero=3,precision=fp32") and resumed(done) == 4


def test_a_save_that_a_kill_cut_off_leaves_nothing(runs: Path) -> None:
    """The state on disk is newer than the last checkpoint: the step of that save does not come again."""
    fault = {"what": "kill", "rank": 1, "where": "save", "step": 4}
    done = run(runs, "dp=2,zero=3,precision=fp32,offload=nvme", fault, restarts=1, keep_last=0)
    assert done.result is not None, done.error
    assert resumed(done) == 4
    folders = {path.name: (path / "manifest.json").exists() for path in (done.out / "checkpoints").iterdir()}
    assert folders == {"step-2": True, "step-6": True, "step-8": True}


def resumed(done: Attempt) -> int:
    """The step from which the run went on; a line of rank 0 in its own process, seen by the events that follow."""
    (restart,) = [event for event in done.events if "restart" in event]
    after = done.events[done.events.index(restart) + 1 :]
    return min(event["step"] for event in after if "loss" in event) - 1
