"""Resharding without a run, in bounded memory, and the comparison of two checkpoints."""

import math
import shutil
import tracemalloc

import numpy as np
import pytest
from simulated import LLAMA, MODELS, layouts_of, same_bits, save, state_of

from shardwise.checkpoint import (
    Checkpoint,
    Manifest,
    PartEntry,
    Piece,
    TensorSpec,
    commit,
    diff,
    model_of,
    reshard,
    resharding,
    shapes,
    write_part,
    writes,
)
from shardwise.checkpoint.dtypes import convert
from shardwise.checkpoint.geometry import full
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout

SMALL = LLAMA.replace(hidden=16, heads=2, kv_heads=2, head_dim=8, layers=1, ffn=10, vocab=23)


def own_pieces(checkpoint: Checkpoint) -> dict[str, set]:
    return {part.name: {(s.tensor, s.piece) for s in part.pieces} for part in checkpoint.manifest.parts}


@pytest.fixture
def narrow_bands(monkeypatch):
    """Bands of 100 bytes, so that small tensors have many."""
    monkeypatch.setattr(resharding, "BAND", 100)


@pytest.mark.parametrize("name", MODELS)
def test_as_if_written_under_the_other_layout(name, tmp_path, narrow_bands):
    model = MODELS[name]
    state = state_of(model, kinds=("model",))
    texts = layouts_of(model)
    saved = {text: save(tmp_path / f"step-{i}", model, text, state) for i, text in enumerate(texts)}
    # Each layout once as source and once as target.
    for a, b in zip(texts, [*texts[1:], texts[0]], strict=True):
        reshard(saved[a], tmp_path / "out", Layout.parse(b))
        out = Checkpoint.open(tmp_path / "out")
        out.verify()
        assert own_pieces(out) == own_pieces(saved[b])
        assert all(same_bits(out.read(tensor), values.reshape(-1)) for tensor, values in state.items())
        assert (out.manifest.step, out.manifest.samples, out.manifest.seed) == (7, 28, 3)
        assert Layout.parse(out.manifest.about["layout"]) == Layout.parse(b)
        shutil.rmtree(tmp_path / "out")


def test_more_ranks_than_files_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(resharding, "OPEN_FILES", 3)
    state = state_of(SMALL)
    source = save(tmp_path / "a", SMALL, "dp=1", state)
    reshard(source, tmp_path / "b", Layout.parse("dp=4,tp=2,zero=1"))
    assert diff(source, Checkpoint.open(tmp_path / "b")) == []


def test_memory_stays_within_its_bound(tmp_path):
    """A checkpoint of 200 MB from 8 ranks to 3, with 64 MB."""
    model = LLAMA.replace(vocab=12007, hidden=640, heads=10, kv_heads=2, head_dim=64, ffn=1000, layers=1)
    layout = Layout.parse("dp=4,tp=2,zero=1")
    pool = np.random.default_rng(0).standard_normal(1 << 21, np.float32)
    records = []
    for rank in range(layout.ranks):
        entries = [
            PartEntry(f"{kind}/{held.name}", TensorSpec(held.shape, "float32"), held.stored)
            for kind in ("model", "first", "second")
            for held in writes(model, layout, rank)
        ]
        records.append(write_part(tmp_path / "a", rank, entries, (pool[: entry.piece.numel] for entry in entries)))
    about = {"model": model.to_json()}
    commit(tmp_path / "a", Manifest.of(records, step=1, samples=1, seed=0, optimizer_steps=1, about=about))
    source = Checkpoint.open(tmp_path / "a")
    assert source.manifest.nbytes > 200e6
    tracemalloc.start()
    try:
        reshard(source, tmp_path / "b", Layout.parse("dp=3,zero=2"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 16e6 < peak < 64e6
    assert diff(source, Checkpoint.open(tmp_path / "b")) == []
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")


def test_refusals_leave_nothing_behind(tmp_path):
    source = save(tmp_path / "a", SMALL, "tp=2", state_of(SMALL))
    with pytest.raises(LayoutError, match="tp=3 does not suit"):
        reshard(source, tmp_path / "b", Layout.parse("tp=3"))
    with pytest.raises(UserError, match="is not empty; nothing was overwritten"):
        reshard(source, tmp_path / "a", Layout())
    path = source.folder / source.manifest.parts[1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"rank-00001\.safetensors is damaged"):
        reshard(source, tmp_path / "b", Layout())
    assert not list((tmp_path / "b").iterdir())


def test_a_manifest_that_names_another_model(tmp_path):
    state = state_of(SMALL, kinds=("model",))
    for i, model in enumerate((SMALL.replace(layers=2), SMALL.replace(layers=10**9), None, {"name": "x"})):
        folder = tmp_path / str(i)
        checkpoint = save(folder, SMALL, "dp=1", state)
        about = model if model is None or isinstance(model, dict) else model.to_json()
        checkpoint.manifest.about["model"] = about
        with pytest.raises(UserError, match="model"):
            model_of(checkpoint)
    assert shapes(SMALL, ["model"]).keys() == state.keys()


def test_equal_checkpoints(tmp_path, narrow_bands):
    state = state_of(SMALL)
    a = save(tmp_path / "a", SMALL, "tp=2", state)
    b = save(tmp_path / "b", SMALL, "dp=3,zero=3", state)
    assert diff(a, b) == []


def test_what_differs(tmp_path, narrow_bands):
    state = state_of(SMALL)
    a = save(tmp_path / "a", SMALL, "tp=2", state)
    changed = {name: values.copy() for name, values in state.items()}
    changed["model/embedding.tokens.weight"][3, 4] += 0.5
    changed["model/embedding.tokens.weight"][20, 1] -= 0.25
    changed["first/head.norm.weight"][2] = np.nan
    changed["second/head.norm.weight"][0] = 0.0  # was -0.0
    del changed["second/embedding.tokens.weight"]
    found = {d.tensor: d for d in diff(a, save(tmp_path / "b", SMALL, "dp=1", state | changed))}
    assert found.keys() == {
        "model/embedding.tokens.weight", "first/head.norm.weight", "second/head.norm.weight",
    }  # fmt: skip
    first = found["model/embedding.tokens.weight"]
    assert first.elements == 2 and first.largest == pytest.approx(0.5, abs=1e-6)
    assert found["first/head.norm.weight"].elements == 1 and math.isnan(found["first/head.norm.weight"].largest)
    assert (found["second/head.norm.weight"].elements, found["second/head.norm.weight"].largest) == (1, 0.0)


def test_other_tensors_shapes_and_dtypes(tmp_path):
    def one(folder, name: str, shape: tuple[int, ...], dtype: str) -> Checkpoint:
        spec = TensorSpec(shape, dtype)
        values = convert(np.arange(spec.numel, dtype=np.float64), "float64", dtype)
        record = write_part(folder, 0, [PartEntry(name, spec, Piece.whole(full(shape)))], [values])
        commit(folder, Manifest.of([record], step=1, samples=1, seed=0, optimizer_steps=1, about={}))
        return Checkpoint.open(folder)

    base = one(tmp_path / "base", "model/a", (4,), "float32")
    (d,) = diff(base, one(tmp_path / "1", "model/a", (5,), "float32"))
    assert "shape (4,) and (5,)" in d.what
    (d,) = diff(base, one(tmp_path / "2", "model/a", (4,), "bfloat16"))
    assert (d.what, d.elements, d.largest) == ("dtype float32 and bfloat16", 0, 0.0)
    missing, more = diff(base, one(tmp_path / "3", "model/b", (4,), "float32"))
    assert "only in" in missing.what and missing.what.endswith("base") and more.what.endswith("3")
