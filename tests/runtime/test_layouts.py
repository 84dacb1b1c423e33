"""Every generated layout against one device, the predicted ledger and the predicted memory (the design's rules 1 to 3).

A sample by the day's seed; every case with SHARDWISE_ALL=1; SHARDWISE_SEED repeats another day.
"""

from functools import partial
from zlib import crc32

import pytest

from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, train
from harness.space import CHOICES, SAMPLE, WORLDS, Point, all_cases, sample, selected


def transport_of(point: Point) -> str:
    """Every fourth goes over gloo, as several hosts would."""
    return "gloo" if crc32(point.id.encode()) % 4 == 0 else "shared"


@pytest.mark.layouts(lambda point: point.layout)
@pytest.mark.parametrize("point", selected(), ids=lambda p: p.id)
def test_layout(point: Point) -> None:
    trained = partial(train, layout=point.layout, transport=transport_of(point))
    ranks = trained(point.case)
    assert_parity(point.case, point.layout, ranks, again=trained)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, point.layout, ranks)
    assert_memory(point.case, point.layout, ranks)


def test_the_space_is_covered() -> None:
    points = all_cases()
    assert len({p.id for p in points}) == len(points) >= 130
    assert sum(p.layout.ranks == 8 for p in points) <= len(points) / 10
    for name, values in CHOICES.items():
        assert {p[name] for p in points} == set(values), name
    for zero in CHOICES["zero"]:
        for model in CHOICES["model"]:
            assert any(p["zero"] == zero and p["model"] == model for p in points), (zero, model)


@pytest.mark.parametrize("seed", range(20261121, 20261136))
def test_every_sample_has_every_stratum(seed: int) -> None:
    points = sample(seed)
    assert points == sample(seed)
    assert len(set(points)) == len(points) == SAMPLE
    for name in ("zero", "sp", "tpkind", "recompute", "attention", "precision", "model"):
        assert {p[name] for p in points} == set(CHOICES[name]), name
    assert {p.layout.ranks for p in points} == set(WORLDS)
    assert sum(p.layout.ranks == 8 for p in points) == 1
