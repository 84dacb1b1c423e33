"""The search against one candidate at a time: the same figures, the same winners, nothing left out that could win."""

import random
from itertools import pairwise

import numpy as np
import pytest

from harness.today import some_of
from shardwise.cluster import Cluster
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.planner import Space, price_one, search
from shardwise.planner.exact import ExactMemory
from shardwise.planner.ranking import blocks
from shardwise.planner.shortfall import usable_bytes
from shardwise.predict.time import Pricing, engine

SEARCHES = {
    "tiny-llama": ("4xL4", 512, 4, "megatron-bridge", {"cp": 1}),
    "gpt2": ("4xA10G", 1024, 2, "megatron-lm-2022", {"cp": 1}),
    "llama-3.2-1b": ("3xRTX4090", 2048, 6, "llm-foundry", {}),
    "sparse": ("4xL4", 512, 4, "megatron-bridge", {"cp": 1, "micro": 1}),
}
SPARSE = get("tiny-llama").replace(name="sparse", experts=Experts(4, 2, 128, shared=1, dense_layers=1), heads=4)


def model_of(name: str) -> ModelConfig:
    return SPARSE if name == "sparse" else get(name)


def space_of(name: str) -> tuple[Space, Pricing]:
    cluster, seq, batch, software, fixed = SEARCHES[name]
    on = Cluster.parse(cluster)
    return Space(model_of(name), on, Workload(seq, batch), engine(software), fixed), Pricing(on)


def one_at_a_time(space: Space, pricing: Pricing, usable: float):
    """All candidates that fit, each priced alone."""
    exact, found = ExactMemory(space.model, space.workload, space.cluster, engine=space.engine.name), []
    for frame in space.frames:
        for r, row in enumerate(frame.rows):
            for sharding in frame.shardings:
                for o, order in enumerate(frame.orders):
                    if frame.possible[r][o]:
                        layout = frame.layout(row, sharding, order)
                        found.append(price_one(space.model, layout, space.workload, space.engine, pricing, exact))
    return [one for one in found if one.held.total <= usable]


@pytest.mark.parametrize("name", some_of(SEARCHES, 2, "winners"))
def test_the_winners_are_those_of_a_loop_over_all(name):
    space, pricing = space_of(name)
    # A limit that some exceed.
    every = one_at_a_time(space, pricing, float("inf"))
    usable = float(np.median([one.held.total for one in every]))
    fitting = [one for one in every if one.held.total <= usable]
    fast = search(space, pricing, "throughput", 7, usable)
    lean = search(space, pricing, "memory", 7, usable)
    assert fast.considered == len(every) == space.size and len(fitting) <= fast.fitting < 1.2 * len(fitting)
    by_time = sorted(fitting, key=lambda one: (one.seconds, one.held.total))
    by_bytes = sorted(fitting, key=lambda one: (one.held.total, one.seconds))
    for found, wanted in ((fast, by_time), (lean, by_bytes)):
        figures = [(one.seconds, one.held.total) for one in found.best]
        assert figures == [pytest.approx((one.seconds, one.held.total), rel=1e-12) for one in wanted[:7]]
    front = search(space, pricing, "pareto", usable=usable).best
    assert front[0].seconds == pytest.approx(by_time[0].seconds, rel=1e-12)
    for one in fitting:
        assert any(f.seconds <= one.seconds * (1 + 1e-12) and f.held.total <= one.held.total for f in front)
    for one, other in pairwise(front):
        assert one.seconds < other.seconds and one.held.total > other.held.total


@pytest.mark.parametrize(
    ("name", "cluster", "seq", "batch", "software", "count"),
    some_of(
        [
            ("megatron-1t", "512x8xA100", 2048, 4096, "megatron-lm-2022", 60),
            ("llama-3-70b", "8x8xH100", 8192, 256, "megatron-bridge", 60),
            ("qwen2.5-14b", "3x8xH100", 4096, 48, "llm-foundry", 40),
            ("mixtral-8x7b", "4x8xH100", 4096, 64, "megatron-bridge", 60),
            ("deepseek-v3", "64x8xH200", 4096, 512, "megatron-bridge", 60),
            ("bloom-176b", "48x8xA100", 2048, 96, "megatron-deepspeed-bf16", 30),
            ("llama-3-8b", "2x4xL40S", 4096, 32, "shardwise", 60),
        ],
        3,
        "figures",
    ),
)
def test_figures_are_those_of_one_at_a_time(name, cluster, seq, batch, software, count):
    on = Cluster.parse(cluster)
    fixed = {"cp": 1, "micro": 1} if name in ("megatron-1t", "deepseek-v3") else {}
    space = Space(get(name), on, Workload(seq, batch), engine(software), fixed)
    pricing, draw = Pricing(on), random.Random(name)
    exact = ExactMemory(space.model, space.workload, on, engine=space.engine.name)
    seen = [block for _, block in blocks(space, exact, pricing, usable_bytes(on), overlaps=name == "megatron-1t")]
    seen = [block for block in seen if block.seconds is not None]
    for _ in range(count):
        block = draw.choice(seen)
        at = draw.choice(np.flatnonzero(np.isfinite(block.seconds)).tolist())
        place = block.place(at)
        one = price_one(space.model, place.layout, space.workload, place.engine, pricing, exact)
        assert one.seconds == pytest.approx(float(block.seconds.flat[at]), rel=1e-12, abs=0), place.layout
        assert one.held.total >= float(block.nbytes.flat[at])


def test_more_memory_finds_nothing_slower():
    space, pricing = space_of("tiny-llama")
    least = search(space, pricing, "memory", 1).best[0].held.total
    best = [search(space, pricing, top=1, usable=least * more).best[0].seconds for more in (1, 1.5, 3, 1e9)]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]
    assert not search(space, pricing, usable=least * 0.99).best


def test_overlapping_more_is_among_the_variants():
    space, pricing = space_of("gpt2")
    plain, varied = (search(space, pricing, top=1, overlaps=overlaps) for overlaps in (False, True))
    assert varied.considered > plain.considered == space.size
    assert varied.best[0].seconds <= plain.best[0].seconds


def test_what_just_fits_is_found():
    """By event, no byte is between what is usable and what a layout needs."""
    space, pricing = space_of("tiny-llama")
    least = search(space, pricing, "memory", 3)
    for one in least.best:
        found = search(space, pricing, usable=one.held.total)
        assert one.layout in [other.layout for other in search(space, pricing, "memory", 3, one.held.total).best]
        assert all(other.held.total <= one.held.total for other in found.best)
