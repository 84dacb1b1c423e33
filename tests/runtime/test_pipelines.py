"""Every generated pipeline against one device, the predicted ledger and the predicted memory (rules 1 to 3).

A sample by the day's seed; every case with SHARDWISE_ALL=1; SHARDWISE_SEED repeats another day.
"""

from functools import partial

import pytest

from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, train
from harness.pipelines import CHOICES, pipeline_cases, selected_pipelines
from harness.reference import Case
from harness.space import MODELS, SEQ, Point
from shardwise.layout import Layout, Workload


@pytest.mark.layouts(lambda point: point.layout)
@pytest.mark.parametrize("point", selected_pipelines(), ids=lambda p: p.id)
def test_pipeline(point: Point) -> None:
    trained = partial(train, layout=point.layout, transport=point["transport"])
    ranks = trained(point.case)
    assert_parity(point.case, point.layout, ranks, again=trained)
    assert_replicas_equal(ranks)
    assert_ledger(point.case, point.layout, ranks)
    assert_memory(point.case, point.layout, ranks)


def test_messages_that_wait_for_other_stages_of_their_rank() -> None:
    """Breadth-first leaves m - p messages between two chunks: over gloo a send is not complete before its receive."""
    layout = Layout.parse("pp=2,virtual=2,schedule=breadth-first,precision=fp64")
    case = Case(MODELS["llama"].replace(layers=4), Workload(SEQ, 7), layout.precision, layout.attention, steps=2)
    ranks = train(case, layout, transport="gloo")
    assert_parity(case, layout, ranks)
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


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
