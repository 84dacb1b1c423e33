"""What a resumed run says and does: unfinished checkpoints, the learning rate's schedule; losses of replicas."""

import shutil
from pathlib import Path

import pytest

from harness import forked
from harness.training_process import LIMIT, losses, shardwise, write_text
from shardwise import api
from shardwise.checkpoint import Checkpoint
from shardwise.errors import UserError

pytestmark = pytest.mark.usefixtures("leftovers")
MODEL = ("tiny-llama", "--vocab", 300, "--set", "layers=1,hidden=32,ffn=64", "--seq", 32, "--batch", 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resumed")
    write_text(root)
    train(root, "run", "precision=fp32", 10, "--warmup", 2)
    return root


def train(root: Path, name: str, layout: str, steps: int, *more: object) -> None:
    shardwise(
        "train", *MODEL, "--data", root / "text", "--layout", layout, "--steps", steps, "--out", root / name,
        "--no-tensorboard", "--validate-batches", 1, *more,
    )  # fmt: skip


def test_the_schedule_is_extended_or_kept_and_that_is_said(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(root / "run", out)
    extended, kept = (api.configure_resumed(out, steps=20, schedule=each) for each in ("extend", "keep"))
    assert api.configure_resumed(out, steps=20) == extended
    (line,) = api._surprises(extended)
    assert "step 11 is 0.000628, that of step 10 was 0.000134: its schedule is of 20 steps now, not 10" in line
    assert not [*api._surprises(kept)] and kept.learning_rate(10) == kept.learning_rate(19) == pytest.approx(1e-4)
    said = shardwise("train", "--resume", out, "--steps", 12, "--schedule", "keep")
    assert "learning rate" not in said.stderr
    assert [losses(out, "lr")[step] for step in (11, 12)] == [pytest.approx(1e-4)] * 2
    # A run that keeps its schedule goes on keeping it, until it is told otherwise.
    assert api.configure_resumed(out, steps=14).schedule_steps == 10
    again = api.configure_resumed(out, steps=14, schedule="extend")
    assert again.schedule_steps == 0 and len([*api._surprises(again)]) == 1


def test_a_new_run_has_no_schedule_to_keep() -> None:
    done = forked.shardwise(
        "train", *map(str, MODEL), "--data", "stdlib", "--schedule", "keep", environment={}, timeout=LIMIT
    )
    assert done.returncode == 2 and "--schedule is for --resume" in done.stderr


def test_a_checkpoint_that_was_cut_off_is_named(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(root / "run", out)
    shutil.copytree(out / "checkpoints" / "step-10", out / "checkpoints" / "step-11")
    (out / "checkpoints" / "step-11" / "manifest.json").unlink()
    lines = [*api._surprises(api.configure_resumed(out, steps=12, schedule="keep"))]
    assert lines == [f"{out / 'checkpoints' / 'step-11'} is unfinished, its save was cut off: resuming step-10"]


def test_remains_of_a_killed_reshard_do_not_block_it(root: Path, tmp_path: Path) -> None:
    from shardwise.checkpoint import diff, reshard
    from shardwise.layout import Layout

    source, out = Checkpoint.open(root / "run" / "checkpoints" / "step-10"), tmp_path / "out"
    out.mkdir()
    for name in ("rank-00000.safetensors", "rank-00007.safetensors", "manifest.json.partial"):
        (out / name).write_text("cut off")
    reshard(source, out, Layout.parse("dp=2"))
    assert not diff(source, Checkpoint.open(out)) and not (out / "rank-00007.safetensors").exists()
    for mine in ("notes.txt", "manifest.json"):
        other = tmp_path / mine.partition(".")[0]
        other.mkdir()
        (other / mine).write_text("mine")
        with pytest.raises(UserError, match="nothing was overwritten"):
            reshard(source, other, Layout.parse("dp=2"))
        assert [path.name for path in other.iterdir()] == [mine]


def test_the_loss_of_a_step_is_that_of_all_replicas(root: Path) -> None:
    train(root, "apart", "dp=2,sync=local,every=3,precision=fp32", 6)
    train(root, "together", "dp=2,precision=fp32", 1)
    found, outer = losses(root / "apart"), losses(root / "apart", "outer_loss")
    assert found[1] == pytest.approx(losses(root / "together")[1], rel=1e-6)
    for step in (3, 6):
        assert outer[step] == pytest.approx(sum(found[each] for each in range(step - 2, step + 1)) / 3, rel=1e-6)
