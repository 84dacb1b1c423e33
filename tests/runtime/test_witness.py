"""The runtime's own ledger against an independent witness of what passes through the process groups."""

import pytest

from harness.pool import run_ranks
from harness.space import Point, point, sample
from harness.today import seed
from harness.witness import realised

POINTS = (
    point(model="qwen3", dp=2, tp=2, zero=3, sp=True, accumulate=2, recompute="full"),
    point(model="mqa", dp=4, zero=2, shard=2, accumulate=3, recompute="input"),
    point(model="neox", dp=2, tp=2, zero=1, accumulate=2),
    point(model="gpt2", dp=3, accumulate=2, recompute="full"),
    point(model="llama", tp=4, documents=True, attention="math", recompute="selective"),
    *sample(seed(), count=7, most_ranks=4),
)


@pytest.mark.parametrize("point", [p for p in POINTS if p.layout.ranks > 1], ids=lambda p: p.id)
def test_the_ledger_is_what_passes(point: Point) -> None:
    for rank, (ledger, seen) in enumerate(
        run_ranks("harness.witness:watch", point.layout.ranks, (point.case, point.layout, False))
    ):
        assert sum(seen.values()) > 0
        assert realised(point.case, point.layout, rank, ledger) == seen


def test_the_sample_of_witnessed_layouts_is_broad() -> None:
    points = [p for p in POINTS if p.layout.ranks > 1]
    assert len(points) >= 8
    assert {p.layout.stage for p in points} == {0, 1, 2, 3}
    assert any(p.layout.tp > 1 and not p.layout.sp for p in points)
    assert any(p.layout.sp for p in points)
    assert any(p.layout.stage and p.layout.replicate_ranks > 1 for p in points)


def test_a_collective_that_is_not_in_the_ledger_is_noticed() -> None:
    smuggled = point(model="llama", dp=2, zero=2)
    for rank, (ledger, seen) in enumerate(
        run_ranks("harness.witness:watch", 2, (smuggled.case, smuggled.layout, True))
    ):
        extra = seen - realised(smuggled.case, smuggled.layout, rank, ledger)
        assert extra == {("allreduce_", (0, 1), 7, "float32"): 1}
