"""Writing: valid safetensors files, an order that a kill cannot harm, and errors in one line."""

import contextlib
import errno
import fcntl
import os
import random
import resource
import signal
import tempfile
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LLAMA, load_rank, same_bits, save, state_of, write_rank

from shardwise.checkpoint import (
    Checkpoint,
    Manifest,
    PartEntry,
    PartImage,
    PartWriter,
    Piece,
    TensorSpec,
    commit,
    keep_last,
    latest,
    shapes,
    write_part,
)
from shardwise.checkpoint import file_io as direct_io
from shardwise.checkpoint.dtypes import convert
from shardwise.checkpoint.file_io import DirectFile
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


# -- Files written past the page cache hold what was written, on file systems that refuse to, and on full disks, too


def written(path: Path, parts: list[bytes]) -> bytes:
    file = DirectFile(path)
    for part in parts:
        file.write(memoryview(part))
    assert file.finish() == sum(map(len, parts))
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40_000), max_size=8), st.integers(0, 2**32 - 1))
def test_parts_of_any_length_follow_each_other(sizes, seed):
    values = np.random.default_rng(seed)
    parts = [values.bytes(size) for size in sizes]
    # A small chunk, so that parts cross its end in every way.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "CHUNK", 8192)
        assert written(Path(folder) / "file", parts) == b"".join(parts)


def written_from_image(path: Path, parts: list[bytes]) -> bytes:
    image = direct_io.memory(sum(map(len, parts)) or 1)
    at, file = 0, DirectFile(path, image)
    for part in parts:
        image[at : at + len(part)] = part
        at += len(part)
        file.write(memoryview(part))
    assert file.finish() == at
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40_000), max_size=8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([8192, 4097]),
    st.booleans(),
)
def test_what_lies_in_an_image_is_written_from_there(sizes, seed, chunk, direct):
    """Chunks of 4,097 bytes stand in for a disk that wants more than a page; the last bytes never fill one."""
    values = np.random.default_rng(seed)
    parts = [values.bytes(size) for size in sizes]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "CHUNK", chunk)
        if not direct:
            patch.setattr(fcntl, "fcntl", refuse)
        assert written_from_image(Path(folder) / "file", parts) == b"".join(parts)


def refuse(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_system_that_knows_no_direct_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(direct_io, "CHUNK", 4096)
    parts = [b"a" * 5000, b"b" * 9001]
    assert written(tmp_path / "file", parts) == b"".join(parts)


def test_a_file_system_that_takes_the_flag_and_not_the_writes(tmp_path, monkeypatch):
    """Chunks that are no multiple of what the disk wants stand in for one that wants more than a page."""
    monkeypatch.setattr(direct_io, "CHUNK", 4097)
    parts = [b"a" * 5000, b"b" * 9001]
    assert written(tmp_path / "file", parts) == b"".join(parts)


@pytest.mark.parametrize("from_image", [False, True])
def test_direct_writes_leave_nothing_in_the_page_cache(tmp_path, from_image):
    """What makes it worth having; only the last page goes through it. Skips where the temporary folder's file system
    refuses direct writes. Of three files one is enough: the kernel may take others through the cache on a busy disk."""
    size = 3 * direct_io.CHUNK // 2 + 5
    held = []
    for number in range(3):
        file = DirectFile(tmp_path / f"{number}", direct_io.memory(size) if from_image else None)
        if not file._straight:
            pytest.skip("no direct writes here")
        file.write(memoryview(bytes(size)))
        file.finish()
        held.append([page for page in (0, direct_io.CHUNK, size - 5 - 4096) if cached(tmp_path / f"{number}", page)])
    assert [] in held


def cached(file: Path, page: int) -> bool:
    with file.open("rb") as read, contextlib.suppress(BlockingIOError):
        return os.preadv(read.fileno(), [bytearray(4096)], page, os.RWF_NOWAIT) > 0
    return False


def test_a_new_file_never_replaces_one(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


def test_what_the_disk_refuses_is_raised(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        file.finish()
    file.close()


# -- Reading: any piece in any dtype, little of the files, and never a byte that is not what was written


TENSOR = "model/embedding.tokens.weight"


@pytest.fixture
def state():
    return state_of(SMALL)


@pytest.fixture
def checkpoint(tmp_path, state):
    return save(tmp_path / "step-1", SMALL, "tp=2,dp=2,zero=1", state)


def load_everything(folder) -> None:
    """What a run does to go on: every rank reads what it needs."""
    checkpoint, layout = Checkpoint.open(folder), Layout.parse("dp=3,zero=1")
    for rank in range(layout.ranks):
        for kind in ("model", "first", "second"):
            load_rank(checkpoint, SMALL, layout, rank, kind)


def test_any_piece(checkpoint, state):
    rng = random.Random(0)
    values = state[TENSOR]
    for _ in range(200):
        box = tuple(sorted(rng.sample(range(n + 1), 2)) for n in values.shape)
        inside = values[tuple(slice(*run) for run in box)].reshape(-1)
        first, last = sorted((rng.randint(0, inside.size), rng.randint(0, inside.size)))
        piece = Piece(tuple(map(tuple, box)), first, last)
        assert same_bits(checkpoint.read(TENSOR, piece), inside[first:last])
    assert same_bits(checkpoint.read(TENSOR), values.reshape(-1))


def test_into_an_array_and_into_another_dtype(checkpoint, state):
    values = state[TENSOR].reshape(-1)
    out = np.full(values.size + 2, 7, np.float32)
    assert np.shares_memory(checkpoint.read(TENSOR, out=out[1:-1]), out)
    assert same_bits(out[1:-1], values) and out[0] == out[-1] == 7
    for dtype in ("float64", "bfloat16", "float16"):
        assert same_bits(checkpoint.read(TENSOR, dtype=dtype), convert(values, "float32", dtype))


def test_padding_is_left_alone(checkpoint, state):
    rows, columns = state[TENSOR].shape
    local = Piece(((rows - 2, rows + 2), (0, columns)), 0, 4 * columns)
    out = np.full(4 * columns, 7, np.float32)
    checkpoint.read(TENSOR, local, out=out)
    assert same_bits(out[: 2 * columns], state[TENSOR][-2:].reshape(-1)) and (out[2 * columns :] == 7).all()
    assert (checkpoint.read(TENSOR, local)[2 * columns :] == 0).all()


def test_only_the_blocks_that_are_needed_are_read(tmp_path, monkeypatch):
    rows, columns = 64, BLOCK // 16
    values = np.arange(rows * columns, dtype=np.float32)
    whole = Piece.whole(((0, rows), (0, columns)))
    record = write_part(tmp_path, 0, [PartEntry("a", TensorSpec((rows, columns), "float32"), whole)], [values])
    commit(tmp_path, Manifest.of([record], step=1, samples=1, seed=0, optimizer_steps=1, about={}))
    read = []
    original = os.preadv

    def preadv(handle, buffers, offset):
        read.append(sum(map(len, buffers)))
        return original(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    checkpoint = Checkpoint.open(tmp_path)
    assert not read
    piece = Piece(((10, 13), (5, columns)), 3, 2 * columns)
    expected = values.reshape(rows, columns)[10:13, 5:].reshape(-1)[3 : 2 * columns]
    assert same_bits(checkpoint.read("a", piece), expected)
    assert sum(read) <= 2 * BLOCK + record.part.header < rows * columns * 4 // 4


def test_every_flipped_byte_is_found_and_its_file_named(checkpoint):
    """By `verify`, and by going on from the checkpoint alone, which reads every block somewhere."""
    rng = random.Random(1)
    files = sorted(checkpoint.folder.iterdir())
    assert len(files) == 5
    sizes = [path.stat().st_size for path in files]
    for _ in range(200):
        (path,) = rng.choices(files, sizes)
        data = path.read_bytes()
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(changed)
        for use in (lambda folder: Checkpoint.open(folder).verify(), load_everything):
            with pytest.raises(UserError, match=path.name.replace(".", r"\.")) as error:
                use(checkpoint.folder)
            assert "\n" not in str(error.value)
        path.write_bytes(data)
    checkpoint.verify()


def test_every_header_byte_is_covered(checkpoint):
    part = checkpoint.manifest.parts[1]
    path = checkpoint.folder / part.name
    data = path.read_bytes()
    for at in range(0, part.header, 37):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match="its header is wrong"):
            load_everything(checkpoint.folder)
    path.write_bytes(data)


def test_truncated_longer_and_missing_files(checkpoint):
    for path in sorted(checkpoint.folder.iterdir()):
        data = path.read_bytes()
        for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            path.write_bytes(changed)
            with pytest.raises(UserError, match=path.name.replace(".", r"\.")):
                Checkpoint.open(checkpoint.folder)
        path.unlink()
        with pytest.raises(UserError, match=path.name.replace(".", r"\.")):
            Checkpoint.open(checkpoint.folder)
        path.mkdir()
        with pytest.raises(UserError, match=path.name.replace(".", r"\.")):
            Checkpoint.open(checkpoint.folder)
        path.rmdir()
        path.write_bytes(data)
    Checkpoint.open(checkpoint.folder).verify()


def test_a_file_that_is_cut_or_goes_while_it_is_read(checkpoint):
    path = checkpoint.folder / checkpoint.manifest.parts[0].name
    os.truncate(path, 10)
    with pytest.raises(UserError, match="cut short"):
        checkpoint.verify()
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        checkpoint.verify()


def test_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=f"holds no checkpoint: it has no {NAME}"):
        Checkpoint.open(tmp_path)
    with pytest.raises(UserError, match="holds no checkpoint"):
        Checkpoint.open(tmp_path / "nowhere")


def test_another_model(checkpoint):
    kinds = ("model", "first", "second")
    checkpoint.require(shapes(SMALL, kinds))
    for model, words in (
        (SMALL.replace(layers=2), "has no model/blocks.1"),
        (SMALL.replace(vocab=29), r"embedding.tokens.weight has shape \(23, 16\), not \(29, 16\)"),
        (SMALL.replace(tied=True), "has .*head.out.weight, which this one lacks"),
    ):
        with pytest.raises(UserError, match=words):
            checkpoint.require(shapes(model, kinds))
    with pytest.raises(UserError, match="no tensor model/x"):
        checkpoint.read("model/x")


def test_progress_reaches_the_end(checkpoint):
    seen = []
    checkpoint.verify(seen.append)
    assert seen == sorted(seen) and seen[-1] == checkpoint.manifest.nbytes
