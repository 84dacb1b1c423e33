"""A plan's bytes are those of `estimate`, and the search's lower bound of them is one."""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from harness.cases import from_table
from harness.today import EVERYTHING, seed
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.layout.optimizers import OPTIMIZERS
from shardwise.layout.units import usual_backend
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.lora import Lora
from shardwise.planner import Space, price_one
from shardwise.planner.bounds import MemoryBound, state_floor
from shardwise.planner.exact import ExactMemory
from shardwise.planner.occupancy import moments
from shardwise.planner.runnable import widened
from shardwise.predict import estimate
from shardwise.predict.time import Pricing, engine
from shardwise.schedule.pipeline import build
from shardwise.schedule.pipeline.memory import peaks

WIDE = widened(engine("megatron-bridge"))
"""All schedules and stages."""

DENSE = [model for model in catalog().values() if not model.why_not_runnable()]
CLUSTERS = ("8xH100", "2x8xH100", "3x8xH100", "6x4xA100", "8x8xH100", "16x8xA100", "8xcpu", "2x8xcpu")


@cache
def pricing(cluster: Cluster) -> Pricing:
    return Pricing(cluster)


def candidates(draw: random.Random, count: int, models: list[ModelConfig]) -> Iterator[tuple[Space, Layout, float]]:
    while count > 0:
        model, cluster = draw.choice(models), Cluster.parse(draw.choice(CLUSTERS))
        seq = min(draw.choice([512, 1024, 2048, 4096, 8192]), model.max_positions)
        workload = Workload(seq, draw.choice([24, 48, 64, 96, 128, 512]), optimizer=draw.choice(list(OPTIMIZERS)))
        space = Space(model, cluster, workload, WIDE)
        if not space.frames:
            continue
        frame = draw.choice(space.frames)
        bound = MemoryBound(model, space.workload, space.attention, usual_backend(cluster)).total(frame)
        for _ in range(min(count, 5)):
            row, sharding, order = (draw.randrange(n) for n in frame.shape)
            if frame.possible[row][order]:
                layout = frame.layout(frame.rows[row], frame.shardings[sharding], frame.orders[order])
                yield space, layout, float(bound[row, sharding, order])
                count -= 1


@pytest.mark.parametrize("batch", range(40 if EVERYTHING else 4))
def test_a_plan_has_the_bytes_of_estimate(batch):
    """10,000 random legal candidates of all dense models of the catalog and all schedules, 200 of them today."""
    draw = random.Random(f"bytes {batch} {seed()}")
    for space, layout, bound in candidates(draw, 250 if EVERYTHING else 50, DENSE):
        model, workload, cluster = space.model, space.workload, space.cluster
        known = cluster.device.kind != "cpu"
        exact = ExactMemory(model, workload, cluster)
        held, place = exact.of(layout)
        if known:
            one = price_one(model, layout, workload, space.engine, pricing(cluster), exact)
            assert (one.held, one.place) == (held, place)
        report = estimate(model, layout, workload, backend=usual_backend(cluster))
        where = model.name, str(cluster), workload, str(layout)
        assert report.roles[place].bytes == held, where
        assert held.total == max(role.bytes.total for role in report.roles), where
        assert state_floor(space) <= bound <= held.total, where


def test_the_bound_of_adapters():
    """Of frozen weights a rank has no gradients and no optimizer state, which the bound must know."""
    draw = random.Random(f"adapters {seed()}")
    plain = [m for m in DENSE if not (m.experts or m.latent_attention)]
    models = [m.replace(lora=Lora(16, base=base)) for m in plain for base in ("", "int8", "nf4", "fp8")]
    ratios = []
    for space, layout, bound in candidates(draw, 200 if EVERYTHING else 40, models):
        held = ExactMemory(space.model, space.workload, space.cluster).total(layout)
        assert state_floor(space) <= held, (space.model.name, str(space.cluster), space.workload, str(layout))
        assert bound <= held, (space.model.name, str(space.cluster), space.workload, str(layout))
        ratios.append(bound / held)
    assert sorted(ratios)[len(ratios) // 2] > 0.8


def test_the_bound_is_near_the_bytes():
    """What may fit by the bound is followed event by event: few candidates should be in vain."""
    draw = random.Random("near")
    near = [
        bound / ExactMemory(space.model, space.workload, space.cluster).total(layout)
        for space, layout, bound in candidates(draw, 60, DENSE)
    ]
    assert np.median(near) > 0.98 and max(near) <= 1


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "bloom-176b"])
def test_the_bound_of_models_that_estimate_does_not_support(name):
    draw = random.Random(name)
    for space, layout, bound in candidates(draw, 20, [get(name)]):
        held = ExactMemory(space.model, space.workload, space.cluster).total(layout)
        where = str(space.cluster), space.workload, str(layout)
        assert state_floor(space) <= held and 0.5 * held < bound <= held, where


@from_table
def test_the_fullest_rank_is_named(name, text, batch, place):
    """1f1b holds most on the first rank; with gpipe the last one has the logits of all micro-batches."""
    layout, cluster = Layout.parse(text), Cluster.parse("3x8xH100")
    assert ExactMemory(get(name), Workload(2048, batch), cluster).of(layout).place == place


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [("1f1b", 4, 9, 1), ("gpipe", 3, 40, 1), ("zb-h1", 4, 12, 1), ("interleaved", 4, 8, 3), ("interleaved", 2, 6, 4)],
)
def test_occupancy_reaches_the_peak_of_the_schedule(schedule, p, m, v):
    for place, peak in enumerate(peaks(build(schedule, p, m, v))):
        rows = moments(schedule, p, m, v, place)
        assert max(sum(row.saved) for row in rows) == peak.forward
        assert all(sum(row.accumulated) <= v for row in rows)
