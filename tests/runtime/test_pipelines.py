"""Every generated pipeline against one device, the predicted ledger and the predicted memory (rules 1 to 3).

A sample by the day's seed; every case with SHARDWISE_ALL=1; SHARDWISE_SEED repeats another day.
"""

from __future__ import annotations

import pytest

from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, train
from harness.pipelines import CHOICES, pipeline_cases, selected_pipelines
from harness.space import Point


@pytest.mark.parametrize("point", selected_pipelines(), ids=lambda p: p.id)
def test_pipeline(point: Point) -> None:
    ranks = train(point.case, point.layout, transport=point["transport"])
    assert_parity(point.case, point.layout, ranks)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, point.layout, ranks)
    assert_memory(point.case, point.layout, ranks)


def test_the_space_of_pipelines_is_covered() -> None:
    points = pipeline_cases()
    assert len({p.id for p in points}) == len(points) >= 80
    for name, values in CHOICES.items():
        assert {p[name] for p in points} == set(values), name
    for schedule in CHOICES["schedule"]:
        mine = [p for p in points if p["schedule"] == schedule]
        assert {p["zero"] for p in mine} == {0, 1, 2, 3}, schedule
        assert {p.case.model.tied for p in mine} == {False, True}, schedule
        assert any(p["tp"] > 1 for p in mine) and any(p["dp"] > 1 for p in mine), schedule
