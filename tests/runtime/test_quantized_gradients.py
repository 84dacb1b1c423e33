"""Sums of gradients in 4 bits (qgz): each rank's part is rounded once a hop and added up in fp32, and no more."""

from dataclasses import replace

import numpy as np
import pytest

from harness.cases import table
from harness.checks import assert_ledger, assert_memory, assert_replicas_equal, judge
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.quantized import GRADIENT_POINTS, rounded
from harness.quantized_jobs import Summed, numbers
from harness.space import MODELS, Point, point
from harness.today import QUANTIZED, by_turns, of_some
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.units import GRADIENT_BITS
from shardwise.layout.wire import BLOCK, packed_bytes
from shardwise.model.catalog import get
from shardwise.predict.traffic.ledger import predict_ledger

LAYOUTS = table(__file__, "LAYOUTS")


def summed(parts: list[np.ndarray], runs: tuple[tuple[int, int], ...] = ()) -> np.ndarray:
    """The sum of what is sent of each part, whose blocks begin anew with each run; all of a part is one by default."""
    runs = runs or ((0, len(parts[0])),)
    sent = [np.concatenate([rounded(part[start:stop]) for start, stop in runs]) for part in parts]
    total = sent[0]
    for one in sent[1:]:
        total = total + one
    return total


@pytest.mark.parametrize("text", LAYOUTS)
def test_trap_27_the_sum_has_the_bits_of_its_hops(text: str) -> None:
    layout = Layout.parse(f"{text},qgz,precision=fp32")
    asked = Summed(MODELS["llama"].replace(hidden=50), layout, "blocks.0", seed=len(text), adds="hpz" in text)
    unit = unit_plan(asked.model, layout, Workload(8, layout.dp)).by_name["blocks.0"]
    given = [numbers(asked, rank, unit.padded).numpy().reshape(layout.dp, -1) for rank in range(layout.ranks)]
    near = layout.hpz or layout.dp
    for rank, (found, ledger) in enumerate(run_ranks("harness.quantized_jobs:packed_sum", layout.ranks, asked)):
        place, tp_rank = divmod(rank, layout.tp)
        of_rank = [given[other * layout.tp + tp_rank][place] for other in range(layout.dp)]
        groups = [of_rank[f * near : (f + 1) * near] for f in range(layout.dp // near)]
        sums = [summed(group, unit.block_cuts[place]) for group in groups]
        expected = sums[0] if len(sums) == 1 else summed(sums, unit.block_cuts[place])
        assert np.array_equal(found.numpy(), expected + np.float32(7) if asked.adds else expected)
        packed = unit.packed_bytes(GRADIENT_BITS)
        axes = ["dp"] if len(sums) == 1 else ["hpz", "hpz-across"]
        sent = [layout.dp * packed, layout.dp // near * packed][: len(axes)]
        rows = [(row.op, row.axes, row.dtype, row.elements) for row in ledger]
        assert rows == [("all_to_all", *row) for row in zip(axes, ("uint8",) * len(axes), sent, strict=True)]


def feeds(point: Point) -> bool:
    """Every second point has error feedback."""
    return GRADIENT_POINTS.index(point) % 2 == 1


def train(point: Point, layout: Layout) -> list[RankOutcome]:
    asked = Training(point.case, layout, judge(point.case), transport=dict(point.choices).get("transport", "shared"))
    return run_ranks("harness.jobs:train", layout.ranks, asked)


@of_some("gradients", QUANTIZED, 2)
@pytest.mark.layouts(lambda point: replace(point.layout, qgz=True, feedback=feeds(point)))
@pytest.mark.parametrize("point", by_turns(GRADIENT_POINTS, 3, "quantized gradients"), ids=lambda p: p.id)
def test_ledger_and_bytes_are_exact(point: Point) -> None:
    layout = replace(point.layout, qgz=True, feedback=feeds(point))
    ranks = train(point, layout)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, layout, ranks)
    assert_memory(point.case, layout, ranks)


def test_errors_of_hops_grow_as_they_are_said_to() -> None:
    """Relative errors of normal numbers over 8 ranks: one hop, two hops, and a ring that rounds at every hop."""
    draw = np.random.default_rng(5)
    parts = [draw.standard_normal(64 * BLOCK).astype(np.float32) for _ in range(8)]
    true = np.sum(np.array(parts, dtype=np.float64), 0)

    def error(found: np.ndarray) -> float:
        return float(np.linalg.norm(found - true) / np.linalg.norm(true))

    ring = parts[0]
    for part in parts[1:]:
        ring = rounded(ring) + part
    one, two = error(summed(parts)), error(summed([summed(parts[:4]), summed(parts[4:])]))
    assert one < two < error(rounded(ring))
    assert (one, two) == pytest.approx((0.126, 0.178), rel=0.1)


def test_a_model_learns_as_without() -> None:
    case = point(model="llama", dp=4, zero=3, precision="fp32").case
    case = replace(case, steps=5)
    plain = Layout(dp=4, zero=3, precision="fp32")
    outcomes = [
        run_ranks("harness.jobs:train", 4, Training(case, layout, judge(case), memory=False))[0].losses
        for layout in (plain, replace(plain, qgz=True, qwz=True, hpz=2))
    ]
    assert outcomes[1] != outcomes[0] and outcomes[1] == pytest.approx(outcomes[0], rel=0.02)


def test_all_of_it_sends_a_quarter_between_nodes() -> None:
    """Bytes into a node of 8, by the ledger: what is gathered over all comes there once, and each of its ranks has its
    part of what goes across."""
    model, workload = get("llama-3-8b"), Workload(4096, 64)
    plain = Layout(dp=64, zero=3)

    def between(layout: Layout) -> int:
        times, names = {"dp": 1, "hpz-across": 8}, {unit.name for unit in unit_plan(model, layout, workload).units}
        rows = predict_ledger(unit_plan(model, layout, workload, backend="nccl"))
        return sum(row.payload_bytes * times.get(row.axes, 0) for row in rows if row.unit in names)

    packed = replace(plain, hpz=8, qwz=True, qgz=True)
    units = unit_plan(model, packed, workload).units
    gathers = sum(64 * packed_bytes(unit.shard_numel, 8) for unit in units)
    sums = sum(8 * 8 * packed_bytes(unit.shard_numel, 4) for unit in units)
    assert between(packed) == gathers + sums
    assert between(packed) / between(plain) == pytest.approx(0.27, abs=0.005)  # embedding and head: one gather
    assert between(replace(plain, hpz=8)) / between(plain) == pytest.approx(0.7, abs=0.01)
