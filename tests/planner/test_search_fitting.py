"""Bytes of many candidates at once are those of `predict_bytes`, one rank at a time."""

import random
from dataclasses import replace

import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.planner import Space, price_one
from shardwise.planner.fitting import CLASSES, Memory
from shardwise.planner.pricing import frame_of
from shardwise.planner.runnable import widened
from shardwise.predict.memory.step import predict_bytes
from shardwise.predict.time import Pricing, engine

CASES = {
    "llama-3-8b": ("2x8xH100", 4096, 64), "llama-3.2-1b": ("8xH100", 2048, 32), "gpt2-large": ("8xA100", 1024, 32),
    "megatron-22b": ("2x8xA100", 2048, 32), "qwen3-4b": ("8xH100", 4096, 16),
}  # fmt: skip
WIDE = widened(engine("megatron-bridge"))
"""All schedules and stages."""

ACTIONS = 3000
"""Longer lists of a rank's actions take long to follow one by one."""


def sample(name: str, schedules: tuple[str, ...], piped: bool, count: int, bare: bool = False) -> list[Layout]:
    cluster, seq, batch = CASES[name]
    space = Space(get(name), Cluster.parse(cluster), Workload(seq, batch), WIDE)
    chosen, draw = [], random.Random(name)
    frames = [frame for frame in space.frames if (frame.pp > 1, frame.bare) == (piped, bare)]
    while len(chosen) < count:
        frame = draw.choice(frames)
        r, o = draw.randrange(len(frame.rows)), draw.randrange(len(frame.orders))
        order = frame.orders[o]
        short = frame.counts[r] * frame.pp * order.virtual <= ACTIONS
        if frame.possible[r][o] and order.schedule in schedules and short:
            chosen.append(frame.layout(frame.rows[r], draw.choice(frame.shardings), order))
    return chosen


def both(name: str, layout: Layout, workload: Workload | None = None):
    """(as the search has it, as `predict_bytes` has its fullest rank)."""
    _, seq, batch = CASES[name]
    model, workload = get(name), workload or Workload(seq, batch)
    held = Memory(model, workload, layout.attention).of(frame_of(model, layout, workload))
    mesh = Mesh.of(layout, model)
    ends = {0, min(1, layout.pp - 1), layout.pp // 2, layout.pp - 1}
    ranks = (mesh.rank(pp=stage) for stage in ends)
    exact = (predict_bytes(unit_plan(model, layout, workload, rank=rank, backend="nccl")) for rank in ranks)
    return held, max(exact, key=lambda each: each.total)


@pytest.mark.parametrize("name", CASES)
def test_without_a_pipeline_every_byte_is_there(name):
    for layout in sample(name, ("1f1b",), False, 25):
        held, exact = both(name, layout)
        assert float(np.ravel(held.total)[0]) == exact.total, layout
        for kind in CLASSES:
            assert float(np.ravel(getattr(held, kind))[0]) == getattr(exact, kind), (layout, kind)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("schedules", "bound", "mean"),
    [(("1f1b", "gpipe"), 0.013, 0.002), (("interleaved",), 0.09, 0.012), (("zb-h1",), 0.025, 0.004)],
)
def test_pipelines_are_within_their_bounds(name, schedules, bound, mean):
    off = []
    for layout in sample(name, schedules, True, 15):
        held, exact = both(name, layout)
        off.append(abs(float(np.ravel(held.total)[0]) / exact.total - 1))
        assert off[-1] <= bound, layout
    assert sum(off) / len(off) <= mean


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2-large"])
def test_pipelines_whose_ends_have_no_layers_are_within_their_bounds(name):
    off = []
    for layout in sample(name, ("interleaved",), True, 8, bare=True):
        held, exact = both(name, layout)
        off.append(abs(float(np.ravel(held.total)[0]) / exact.total - 1))
    assert max(off) <= 0.05 and sum(off) / len(off) <= 0.02


@pytest.mark.parametrize(
    ("name", "text", "seq", "batch"),
    [
        ("llama-3.2-1b", "tp=2,pp=3,micro=2", 512, 4), ("llama-3.2-1b", "pp=9,cp=2,micro=4,schedule=gpipe", 512, 12),
        ("llama-3-8b", "dp=2,pp=9,recompute=selective", 512, 4), ("qwen3-4b", "pp=2,recompute=full", 512, 4),
        ("llama-3.2-1b", "tp=2,pp=6,micro=2,recompute=full", 1024, 36),
    ],
)  # fmt: skip
def test_gradients_that_outweigh_activations_are_counted_where_they_arrive(name, text, seq, batch):
    """With short sequences or few micro-batches it is an accumulator beside the gradient that goes into it, or a tied
    table's gradients of both ends, that fills a rank."""
    held, exact = both(name, Layout.parse(text), Workload(seq, batch))
    assert float(np.ravel(held.total)[0]) == pytest.approx(exact.total, rel=0.008)


@pytest.mark.parametrize(("text", "place"), [("pp=4,dp=2,micro=2", 0), ("pp=4,dp=2,micro=2,schedule=gpipe", 3)])
def test_the_fullest_rank_is_named(text, place):
    """1f1b holds most on the first rank; with gpipe the last one has the logits of all micro-batches."""
    layout, (cluster, seq, batch) = Layout.parse(text), CASES["llama-3.2-1b"]
    model, workload = get("llama-3.2-1b"), Workload(seq, batch)
    one = price_one(model, layout, workload, engine("megatron-bridge"), Pricing(Cluster.parse(cluster)))
    assert one.place == place


def test_a_frame_has_what_each_of_its_candidates_has_alone():
    space = Space(get("llama-3-8b"), Cluster.parse("2x8xH100"), Workload(4096, 64), WIDE)
    memory, draw = Memory(space.model, space.workload, space.attention), random.Random(3)
    for frame in draw.sample(space.frames, 6):
        together = np.broadcast_to(memory.of(frame).total, frame.shape)
        for _ in range(20):
            r, z, o = (draw.randrange(n) for n in frame.shape)
            if frame.possible[r][o]:
                alone = frame_of(
                    space.model, frame.layout(frame.rows[r], frame.shardings[z], frame.orders[o]), space.workload
                )
                assert float(np.ravel(memory.of(alone).total)[0]) == together[r, z, o]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2"])
def test_rows_that_share_their_bytes_have_them_alone_too(name):
    """Rows of one number of tokens are computed once, with fused attention."""
    space = Space(get(name), Cluster.parse("2x8xH100"), Workload(1024, 64), WIDE)
    draw = random.Random(7)
    for frame in draw.sample(space.frames, 4):
        total = Memory(space.model, space.workload, space.attention).total(frame)
        assert total.shape == frame.shape
        for r in draw.sample(range(len(frame.rows)), min(12, len(frame.rows))):
            alone = replace(frame, rows=(frame.rows[r],))
            fresh = Memory(space.model, space.workload, space.attention).of(alone).total
            assert (np.broadcast_to(fresh, alone.shape)[0] == total[r]).all(), frame.rows[r]
