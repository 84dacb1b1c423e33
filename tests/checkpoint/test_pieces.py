"""Save under every layout, load under every other: what each rank then holds is what slicing gives it, bit by bit."""

import numpy as np
import pytest
from simulated import LLAMA, MODELS, layouts_of, load_rank, same_bits, save, state_of, units_of

from shardwise.checkpoint import needs, writes
from shardwise.layout import Layout
from shardwise.model.parameters import parameters

KINDS = ("first", "model")


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_reads_every_layout(name, tmp_path):
    model = MODELS[name]
    state = state_of(model, kinds=KINDS)
    texts = layouts_of(model)
    assert len(texts) >= 9
    saved = {text: save(tmp_path / f"step-{i}", model, text, state) for i, text in enumerate(texts)}
    for to in texts:
        layout = Layout.parse(to)
        for rank in range(layout.ranks):
            # Ranks alternate between the kinds: which one it is changes nothing about geometry.
            kind = KINDS[rank % 2]
            expected = units_of(model, layout, rank, state, kind)
            for text, checkpoint in saved.items():
                loaded = load_rank(checkpoint, model, layout, rank, kind)
                assert loaded.keys() == expected.keys()
                assert all(same_bits(loaded[u], expected[u]) for u in expected), (text, to, rank)


@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_written_once_and_no_padding(name):
    model = MODELS[name]
    for text in layouts_of(model):
        layout = Layout.parse(text)
        counts = {p.name: np.zeros(p.shape, int) for p in parameters(model)}
        for rank in range(layout.ranks):
            for held in writes(model, layout, rank):
                box = counts[held.name][tuple(slice(*run) for run in held.stored.box)]
                flat = box.reshape(-1).copy()
                flat[held.stored.first : held.stored.last] += 1
                box[...] = flat.reshape(box.shape)
        assert all((count == 1).all() for count in counts.values()), text


def test_data_ranks_share_the_writing():
    """Replicas write equal shares: none of them is idle, none writes all."""
    for text in ("dp=4", "dp=4,zero=1", "dp=4,zero=1,shard=2", "cp=2,dp=2"):
        layout = Layout.parse(text)
        written = [sum(held.stored.numel for held in writes(LLAMA, layout, rank)) for rank in range(4)]
        assert max(written) - min(written) <= 0.01 * sum(written), text


def test_a_rank_needs_its_interval_only():
    total = sum(p.numel for p in parameters(LLAMA))
    needed = sum(held.stored.numel for held in needs(LLAMA, Layout.parse("dp=4,zero=1"), 2))
    assert needed < 0.26 * total
    assert sum(held.stored.numel for held in needs(LLAMA, Layout.parse("dp=4"), 2)) == total


def test_a_rank_of_nothing_but_padding(tmp_path):
    """ffn=5 on tp=4 leaves the last rank without a row of its own."""
    model = LLAMA.replace(ffn=5)
    state = state_of(model, kinds=("model",))
    checkpoint = save(tmp_path / "step-1", model, "tp=4", state)
    layout = Layout.parse("tp=4")
    for rank in range(4):
        loaded = load_rank(checkpoint, model, layout, rank, "model")
        expected = units_of(model, layout, rank, state, "model")
        assert all(same_bits(loaded[u], expected[u]) for u in expected)
