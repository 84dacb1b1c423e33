"""Which checkpoint of a run counts, and which go."""

import numpy as np
import pytest
from simulated import LLAMA, save, state_of

from shardwise.checkpoint import (
    Checkpoint,
    DamagedError,
    find,
    keep_last,
    kept,
    latest,
    remove_unfinished,
    set_aside,
    with_older,
)
from shardwise.checkpoint.manifest import NAME
from shardwise.errors import UserError

SMALL = LLAMA.replace(hidden=8, heads=2, kv_heads=2, head_dim=4, layers=1, ffn=6, vocab=11)
NONFINITE = state_of(SMALL, kinds=("model",))
STATE = {name: np.nan_to_num(values) for name, values in NONFINITE.items()}


def make(folder, *steps: int, state=STATE) -> None:
    for step in steps:
        save(folder / f"step-{step}", SMALL, "tp=2", state, step=step)


def break_off(folder, step: int) -> None:
    make(folder, step)
    (folder / f"step-{step}" / NAME).unlink()


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_newest_whole_one_counts(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    make(tmp_path, 2, 10, 9)
    break_off(tmp_path, 11)
    (tmp_path / "step-12").touch()
    (tmp_path / "step-x").mkdir()
    warnings: list[str] = []
    assert latest(tmp_path, warnings.append).manifest.step == 10
    assert not warnings
    (tmp_path / "step-10" / "rank-00001.safetensors").unlink()
    assert latest(tmp_path, warnings.append).manifest.step == 9
    assert len(warnings) == 1 and "step-10" in warnings[0]


def test_keeping_the_last(tmp_path):
    make(tmp_path, 1, 2, 4, 6)
    break_off(tmp_path, 3)
    break_off(tmp_path, 7)
    (tmp_path / "notes").mkdir()
    removed = keep_last(tmp_path, 2)
    assert {path.name for path in removed} == {"step-1", "step-2", "step-3"}
    assert names(tmp_path) == {"step-4", "step-6", "step-7", "notes"}
    assert keep_last(tmp_path, 2) == []


def test_one_that_is_read_is_not_removed(tmp_path):
    make(tmp_path, 1, 2, 3)
    known: set = set()
    with kept(tmp_path / "step-1"), kept(tmp_path / "step-1"):
        assert {path.name for path in keep_last(tmp_path, 1, known)} == {"step-2"}
        Checkpoint.open(tmp_path / "step-1").verify()
    assert {path.name for path in keep_last(tmp_path, 1, known)} == {"step-1"}
    with kept(tmp_path / "step-1"):
        assert names(tmp_path) == {"step-3"}


@pytest.mark.parametrize("count", [1, 2])
def test_finite_ones_are_never_removed_for_others(tmp_path, count):
    make(tmp_path, 1, 2, 3)
    make(tmp_path, 4, 5, 6, state=NONFINITE)
    keep_last(tmp_path, count)
    assert names(tmp_path) == {f"step-{step}" for step in range(4 - count, 7)}
    make(tmp_path, 7, 8)
    keep_last(tmp_path, count, {tmp_path / "step-8"})
    assert names(tmp_path) == {f"step-{step}" for step in range(9 - count, 9)}


def test_of_none_that_is_finite_the_newest_stay(tmp_path):
    make(tmp_path, 1, 2, 3, state=NONFINITE)
    assert latest(tmp_path).manifest.nonfinite == tuple(sorted(NONFINITE))
    keep_last(tmp_path, 2)
    assert names(tmp_path) == {"step-2", "step-3"}


def test_what_is_set_aside_counts_no_more(tmp_path):
    make(tmp_path, 1, 2)
    for name in ("step-2.damaged", "step-2.damaged-2", "step-2.damaged-3"):
        assert set_aside(tmp_path / "step-2") == tmp_path / name
        assert latest(tmp_path).manifest.step == 1
        make(tmp_path, 2)
    assert keep_last(tmp_path, 1) == [tmp_path / "step-1"] and (tmp_path / "step-2.damaged").is_dir()
    assert set_aside(tmp_path / "step-9") is None


def test_known_ones_are_not_opened_again(tmp_path, monkeypatch):
    make(tmp_path, 1, 2, 4)
    known = {tmp_path / "step-4"}
    opened = []
    plain = Checkpoint.open

    def noted(path):
        opened.append(path.name)
        return plain(path)

    monkeypatch.setattr(Checkpoint, "open", noted)
    assert {path.name for path in keep_last(tmp_path, 2, known)} == {"step-1"}
    assert sorted(opened) == ["step-1", "step-2"] and known == {tmp_path / "step-2", tmp_path / "step-4"}
    make(tmp_path, 6)
    opened.clear()
    keep_last(tmp_path, 2, known | {tmp_path / "step-6"})
    assert opened == [] and names(tmp_path) == {"step-4", "step-6"}


def test_what_saves_that_were_cut_off_left_is_removed_where_all_are_kept(tmp_path):
    assert remove_unfinished(tmp_path / "nowhere") == []
    break_off(tmp_path, 1)
    assert remove_unfinished(tmp_path) == []
    make(tmp_path, 2, 4)
    break_off(tmp_path, 3)
    break_off(tmp_path, 5)  # may be being written
    (tmp_path / "step-4" / "rank-00000.safetensors").write_bytes(b"")
    assert remove_unfinished(tmp_path) == [tmp_path / "step-1", tmp_path / "step-3"]
    assert names(tmp_path) == {"step-2", "step-4", "step-5"} and remove_unfinished(tmp_path) == []


def test_the_last_good_one_is_never_removed(tmp_path):
    break_off(tmp_path, 1)
    assert keep_last(tmp_path, 1) == [] and names(tmp_path) == {"step-1"}
    make(tmp_path, 2, 3, 4)
    for step in (3, 4):  # damaged, not abandoned: for a person to look at
        (tmp_path / f"step-{step}" / "rank-00000.safetensors").write_bytes(b"")
    assert {path.name for path in keep_last(tmp_path, 1)} == {"step-1"}
    assert names(tmp_path) == {"step-2", "step-3", "step-4"}
    with pytest.raises(UserError, match="at least 1"):
        keep_last(tmp_path, 0)


def test_a_checkpoint_being_removed_is_none(tmp_path, monkeypatch):
    """Its manifest goes first: a kill in the middle leaves what the next time removes."""
    import shutil

    make(tmp_path, 1, 2)

    def killed(path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        keep_last(tmp_path, 1)
    assert not (tmp_path / "step-1" / NAME).exists() and (tmp_path / "step-1").exists()
    assert {path.name for path in keep_last(tmp_path, 1)} == {"step-1"}


def test_find(tmp_path):
    run = tmp_path / "run"
    make(run / "checkpoints", 1, 2)
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-2"):
        assert find(path).folder == run / "checkpoints" / "step-2"
    assert find(run / "checkpoints" / "step-1").manifest.step == 1
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        find(tmp_path)
    (run / "checkpoints" / "step-2" / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"step-2/rank-00001\.safetensors has 0 bytes"):
        find(run)
    for step in (1, 2):
        (run / "checkpoints" / f"step-{step}" / NAME).unlink()
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        find(run)


def test_an_older_checkpoint_is_named_beside_a_damaged_one(tmp_path):
    """Where the damaged one still opens, its bytes alone being wrong, the older one resumes elsewhere."""
    folder = tmp_path / "a run" / "checkpoints"
    make(folder, 1, 2, 3)
    (folder / "step-2" / "rank-00000.safetensors").unlink()
    part = folder / "step-3" / "rank-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    command = f"shardwise train --resume '{folder / 'step-1'}'"
    for path in (folder.parent, folder, folder / "step-3"):
        with pytest.raises(UserError) as caught:
            find(path)
        assert str(caught.value).startswith(f"{part} has ") and str(caught.value).endswith(f"; {THERE}{command}")
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError) as damaged:
        find(folder).verify()
    assert str(with_older(damaged.value, folder / "step-3")).endswith(f"{THERE}{command} --out NEW_RUN")
    assert with_older(damaged.value, folder / "step-1") is damaged.value


THERE = "the checkpoint before it is there: "
