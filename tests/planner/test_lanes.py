"""Many candidates by one evaluation of a formula have the numbers that each has alone."""

import random

import numpy as np
import pytest

from harness.today import EVERYTHING, seed
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.units import usual_backend
from shardwise.model.catalog import get
from shardwise.model.lora import Lora
from shardwise.planner.bounds import Diverged, Lanes, MemoryBound, by_path
from shardwise.planner.runnable import widened
from shardwise.planner.space import BatchChoice, LayoutColumns, Space
from shardwise.predict.time import engine

CASES = [
    ("llama-3-8b", "2x8xH100"), ("gpt2", "8xcpu"), ("gemma-2-9b", "8xA100"), ("mixtral-8x7b", "2x8xH100"),
    ("deepseek-v2-lite", "2x8xH100"), ("olmo-2-7b", "8xcpu"), ("gpt-neox-20b", "2x8xcpu"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_rows_together_have_the_bytes_of_each_alone(name, devices):
    draw, cluster = random.Random(f"lanes {name} {seed()}"), Cluster.parse(devices)
    model = get(name)
    if draw.random() < 0.3 and not (model.experts or model.latent_attention):
        model = model.replace(lora=Lora(16))
    workload = Workload(1024, draw.choice([48, 64, 96]), isolate_documents=draw.random() < 0.3)
    space = Space(model, cluster, workload, widened(engine("megatron-bridge")))
    bound = MemoryBound(model, workload, space.attention, usual_backend(cluster))
    bound.add(space.frames)
    rows = {bound._key(frame, row): (frame, row) for frame in space.frames for row in frame.rows}
    for key, (frame, row) in draw.sample(sorted(rows.items(), key=str), min(len(rows), 300 if EVERYTHING else 20)):
        assert bound._table[:, bound._places[key]].tolist() == alone(bound, frame, row), (workload, key)


def alone(bound: MemoryBound, frame: LayoutColumns, row: BatchChoice) -> list[float]:
    """Bytes of one micro-batch by the plan of its own layout."""
    sorts = []
    for model in bound._one_block:
        ep = frame.ep if model.experts else 1
        layout = Layout(
            dp=ep, tp=frame.tp, ep=ep, cp=row.cp, sp=row.sp, micro=row.micro, recompute=row.recompute,
            attention=bound.attention,
        )  # fmt: skip
        plan = unit_plan(model, layout, bound.workload, backend=bound.backend)
        vars(plan)["micro_batches"] = 1
        sorts.append(bound._micro_batch(plan, row.recompute, frame.tp, ep, row.cp, row.micro))
    return [float(min(numbers)) for numbers in zip(*sorts, strict=True)]


def test_each_lane_takes_its_own_path():
    def formula(a, b):
        largest = max(a, 3 * b, 7)
        even = 2 * a if a % 2 == 0 else -a
        return largest, even, sum([a, b]) // 2, (10 - b if b else 0), range(b)[-1] if b else -1, {b: 5}[b]

    draw = random.Random(3)
    a, b = ([draw.randrange(0, 12) for _ in range(60)] for _ in range(2))
    together = np.array(by_path(formula, [a, b])).T.tolist()
    assert together == [list(map(float, formula(x, y))) for x, y in zip(a, b, strict=True)]


def test_one_answer_for_lanes_that_differ_is_an_error():
    lanes = Lanes(np.array([1, 2, 3]))
    assert lanes > 0 and not lanes > 3 and max(lanes, 0) is lanes
    with pytest.raises(Diverged):
        int(lanes)
    with pytest.raises(Diverged):
        bool(lanes > 2)
