"""Reading: any piece in any dtype, little of the files, and never a byte that is not what was written."""

import os
import random

import numpy as np
import pytest
from simulated import LLAMA, load_rank, same_bits, save, state_of

from shardwise.checkpoint import Checkpoint, Manifest, PartEntry, Piece, TensorSpec, commit, shapes, write_part
from shardwise.checkpoint.dtypes import convert
from shardwise.checkpoint.manifest import BLOCK, NAME
from shardwise.errors import UserError
from shardwise.layout import Layout

SMALL = LLAMA.replace(hidden=16, heads=2, kv_heads=2, head_dim=8, layers=1, ffn=10, vocab=23)
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
