"""Writing: valid safetensors files, an order that a kill cannot harm, and errors in one line."""

import os
import random
import resource
import signal
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from simulated import LLAMA, same_bits, save, state_of, write_rank

from shardwise.checkpoint import (
    Checkpoint,
    Manifest,
    PartEntry,
    PartImage,
    PartWriter,
    Piece,
    TensorSpec,
    commit,
    direct_io,
    keep_last,
    latest,
    write_part,
)
from shardwise.checkpoint.manifest import BLOCK, NAME
from shardwise.errors import UserError
from shardwise.layout import Layout

SMALL = LLAMA.replace(hidden=16, heads=2, kv_heads=2, head_dim=8, layers=1, ffn=10, vocab=23)


def test_one_rank_writes_plain_safetensors(tmp_path):
    """Whole tensors have their own names and shapes: anyone can read them."""
    state = state_of(SMALL)
    checkpoint = save(tmp_path / "step-1", SMALL, "dp=1", state)
    (part,) = checkpoint.manifest.parts
    loaded = safetensors.numpy.load_file(checkpoint.folder / part.name)
    assert loaded.keys() == state.keys()
    assert all(same_bits(loaded[name], values) for name, values in state.items())


def test_every_part_is_a_safetensors_file(tmp_path):
    state = state_of(SMALL)
    checkpoint = save(tmp_path / "step-1", SMALL, "tp=2,dp=2,zero=3", state)
    assert len(checkpoint.manifest.parts) == 4
    total = 0
    for part in checkpoint.manifest.parts:
        with safetensors.safe_open(checkpoint.folder / part.name, framework="numpy") as file:
            assert file.metadata()["written_by"] == "shardwise"
            total += sum(file.get_tensor(key).size for key in file.keys())  # noqa: SIM118
    assert total == sum(values.size for values in state.values())


def test_every_dtype(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "float64": rng.standard_normal(5), "float32": rng.standard_normal(5, np.float32),
        "bfloat16": rng.integers(0, 1 << 16, 5, np.uint16), "float16": rng.standard_normal(5).astype(np.float16),
    }  # fmt: skip
    entries = [PartEntry(f"model/{dtype}", TensorSpec((5,), dtype), Piece.whole(((0, 5),))) for dtype in arrays]
    record = write_part(tmp_path / "step-1", 0, entries, arrays.values())
    commit(tmp_path / "step-1", Manifest.of([record], step=1, samples=1, seed=0, optimizer_steps=1, about={}))
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    assert all(same_bits(checkpoint.read(f"model/{dtype}"), values) for dtype, values in arrays.items())
    stored = dict(safetensors.deserialize((tmp_path / "step-1" / record.part.name).read_bytes()))
    assert {name.removeprefix("model/"): entry["dtype"] for name, entry in stored.items()} == {
        "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    }  # fmt: skip


def test_chunks_give_the_same_file_as_whole_arrays(tmp_path):
    count = 3 * BLOCK // 4 + 12345
    values = np.random.default_rng(1).standard_normal(count, np.float32)
    entries = [PartEntry("model/a", TensorSpec((count,), "float32"), Piece.whole(((0, count),)))]
    whole = write_part(tmp_path / "whole", 0, entries, [values])
    cuts = [0, 1, 1, 5000, 262144, 262145, 800001, count]
    chunked = write_part(tmp_path / "cut", 0, entries, (values[a:b] for a, b in pairwise(cuts)))
    assert whole == chunked and len(whole.part.pieces[0].crc32) == 4
    assert (tmp_path / "whole" / whole.part.name).read_bytes() == (tmp_path / "cut" / whole.part.name).read_bytes()


def test_an_image_is_written_as_the_same_file(tmp_path, monkeypatch):
    """Of entries of any length, an empty one among them, and again with other values in the same memory."""
    monkeypatch.setattr(direct_io, "CHUNK", 1 << 16)
    rng = np.random.default_rng(2)
    sizes, dtypes = [7, 0, BLOCK // 4 + 12345, 1, 50_001], ["float32", "float64", "float32", "float32", "float64"]
    entries = [
        PartEntry(f"model/{i}", TensorSpec((size + 3,), dtype), Piece(((0, size + 3),), 1, size + 1))
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]
    image = PartImage(entries)
    for attempt in ("a", "b"):
        arrays = [rng.standard_normal(size).astype(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        plain = write_part(tmp_path / "plain" / attempt, 0, entries, arrays)
        for own, array in zip(image.arrays, (array for array in arrays if array.size), strict=True):
            own[:] = array
        assert write_part(tmp_path / "image" / attempt, 0, entries, image.arrays, image) == plain
        files = [tmp_path / folder / attempt / plain.part.name for folder in ("plain", "image")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_an_image_that_the_disk_does_not_take(tmp_path):
    entries = [PartEntry("model/a", TensorSpec((40_000,), "float32"), Piece.whole(((0, 40_000),)))]
    image = PartImage(entries)
    with largest_file(100_000), pytest.raises(UserError, match=r"cannot write checkpoint .*: File too large"):
        write_part(tmp_path / "step-1", 0, entries, image.arrays, image)
    assert not list((tmp_path / "step-1").iterdir())


def test_what_does_not_fit_the_entries_is_a_defect(tmp_path):
    entries = [PartEntry("model/a", TensorSpec((4,), "float32"), Piece.whole(((0, 4),)))]
    for arrays in ([], [np.zeros(3, np.float32)], [np.zeros(5, np.float32)], [np.zeros(4)]):
        with pytest.raises(AssertionError):
            write_part(tmp_path / "step-1", 0, entries, arrays)
    assert not list((tmp_path / "step-1").iterdir())


def test_files_are_on_the_disk_before_the_manifest_names_them(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
        sync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    folder = tmp_path / "checkpoints" / "step-1"
    save(folder, SMALL, "tp=2", state_of(SMALL, kinds=("model",)))
    assert events == [
        ("sync", "rank-00000.safetensors"), ("sync", "rank-00001.safetensors"), ("sync", "step-1"),
        ("sync", f"{NAME}.partial"), ("rename", NAME), ("sync", "step-1"), ("sync", "checkpoints"),
    ]  # fmt: skip


def test_saving_a_step_again_keeps_the_old_one_until_the_new_one_is_whole(tmp_path):
    old, new = state_of(SMALL, 1, ("model",)), state_of(SMALL, 2, ("model",))
    folder = tmp_path / "step-1"
    save(folder, SMALL, "tp=2", old)
    layout = Layout.parse("dp=2,zero=1")
    for _ in range(2):  # the first attempt gets no manifest
        records = [write_rank(folder, SMALL, layout, rank, new) for rank in range(2)]
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify()
        assert all(same_bits(checkpoint.read(name), values.reshape(-1)) for name, values in old.items())
    common = {"step": 1, "samples": 1, "seed": 0, "optimizer_steps": 1, "about": {}}
    commit(folder, Manifest.of(records, **common))
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    assert all(same_bits(checkpoint.read(name), values.reshape(-1)) for name, values in new.items())
    assert {path.name for path in folder.iterdir()} == {NAME, *(record.part.name for record in records)}


@contextmanager
def largest_file(size: int):
    """No file of this process may grow beyond `size` bytes: writing then fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_one_line_and_no_checkpoint(tmp_path):
    state = state_of(SMALL, kinds=("model",))
    save(tmp_path / "step-1", SMALL, "dp=1", state)
    for size in (100, 4000):
        with largest_file(size), pytest.raises(UserError) as error:
            save(tmp_path / "step-2", SMALL, "dp=1", state)
        assert "cannot write checkpoint" in str(error.value) and "step-2" in str(error.value)
        assert "\n" not in str(error.value) and "earlier checkpoints are untouched" in str(error.value)
        assert not list((tmp_path / "step-2").iterdir())
    found = latest(tmp_path)
    assert found is not None and found.folder == tmp_path / "step-1"
    found.verify()


def test_a_disk_that_fills_up_for_the_manifest(tmp_path):
    state = state_of(SMALL, kinds=("model",))
    record = write_rank(tmp_path / "step-2", SMALL, Layout(), 0, state)
    manifest = Manifest.of([record], step=2, samples=1, seed=0, optimizer_steps=1, about={})
    with largest_file(1000), pytest.raises(UserError, match=r"cannot write checkpoint .*manifest\.json"):
        commit(tmp_path / "step-2", manifest)
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == [record.part.name]
    commit(tmp_path / "step-2", manifest)
    Checkpoint.open(tmp_path / "step-2").verify()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "step-1", Path("/proc/step-1")):
        with pytest.raises(UserError, match="cannot write checkpoint") as error:
            save(folder, SMALL, "dp=1", state_of(SMALL, kinds=("model",)))
        assert "\n" not in str(error.value)


def test_a_part_that_is_gone_is_not_committed(tmp_path):
    record = write_rank(tmp_path / "step-1", SMALL, Layout(), 0, state_of(SMALL))
    (tmp_path / "step-1" / record.part.name).unlink()
    manifest = Manifest.of([record], step=1, samples=1, seed=0, optimizer_steps=1, about={})
    with pytest.raises(UserError, match=r"rank-00000\.safetensors is missing"):
        commit(tmp_path / "step-1", manifest)
    assert not (tmp_path / "step-1" / NAME).exists()


def test_a_writer_that_is_left_early_leaves_no_file(tmp_path):
    entries = [PartEntry("model/a", TensorSpec((4,), "float32"), Piece.whole(((0, 4),)))]
    with pytest.raises(KeyboardInterrupt), PartWriter(tmp_path, 0, entries) as writer:
        writer.write(np.zeros(2, np.float32))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


# -- killed while saving

KILLED = LLAMA.replace(vocab=997, hidden=64, heads=2, kv_heads=2, head_dim=32, layers=1, ffn=64)
LAYOUTS = ("tp=2", "dp=3,zero=1", "dp=1")


def save_on_and_on(folder: Path, start: int, tell: int) -> None:
    """A run that does nothing but save; tells each step once its checkpoint is committed."""
    for step in range(start, start + 10_000):
        save(folder / f"step-{step}", KILLED, LAYOUTS[step % 3], state_of(KILLED, step, ("model",)), step=step)
        os.write(tell, b"%d\n" % step)
        keep_last(folder, 2)


def kill_at(folder: Path, start: int, after: float) -> list[int]:
    """Run `save_on_and_on` in a process that is killed; returns the steps that it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_on_and_on(folder, start, writer)
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the run ended by itself"
    with os.fdopen(reader) as file:
        return [int(line) for line in file]


def test_a_kill_at_any_moment_leaves_the_last_good_checkpoint(tmp_path):
    rng = random.Random(5)
    last, told_steps, cut_off = 0, 0, 0
    for _ in range(25):
        told = kill_at(tmp_path, last + 1, rng.uniform(0.01, 0.12))
        told_steps += len(told)
        found = latest(tmp_path)
        newest = found.manifest.step if found else 0
        # A checkpoint may be whole although the run did not live to tell; none that was told may be lost.
        assert newest >= max([last, *told])
        cut_off += any(not (path / NAME).exists() for path in tmp_path.iterdir())
        if found:
            found.verify()
            expected = state_of(KILLED, newest, ("model",))
            assert all(same_bits(found.read(name), values.reshape(-1)) for name, values in expected.items())
        last = newest
    assert told_steps and cut_off, "no kill met a save: the test tests nothing"
