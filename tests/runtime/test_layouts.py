"""Every generated layout against one device, the predicted ledger and the predicted memory (the design's rules 1 to 3).

A sample by the day's seed; every case with SHARDWISE_ALL=1; SHARDWISE_SEED repeats another day. Those with experts are
in `test_experts.py`.
"""

from functools import partial
from zlib import crc32

import pytest

from harness.checks import assert_rules, train
from harness.reference import Case
from harness.space import MODELS, SEQ, SPACES, WORLDS, Point, cases, sample, selected
from shardwise.layout import Layout, Workload

DENSE, PIPELINES = (SPACES[name]["choices"] for name in ("dense", "pipelines"))
POINTS = [point for name in ("dense", "pipelines", "contexts") for point in selected(name)]


def transport_of(point: Point) -> str:
    """Of layouts that say nothing of it every fourth goes over gloo, as several hosts would."""
    return dict(point.choices).get("transport") or ("gloo" if crc32(point.id.encode()) % 4 == 0 else "shared")


@pytest.mark.layouts(lambda point: point.layout)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.id)
def test_layout(point: Point) -> None:
    trained = partial(train, layout=point.layout, transport=transport_of(point))
    ranks = trained(point.case)
    assert_rules(point.case, point.layout, ranks, again=trained)


def test_messages_that_wait_for_other_stages_of_their_rank() -> None:
    """Breadth-first leaves m - p messages between two chunks: over gloo a send is not complete before its receive."""
    layout = Layout.parse("pp=2,virtual=2,schedule=breadth-first,precision=fp64")
    case = Case(MODELS["llama"].replace(layers=4), Workload(SEQ, 7), layout.precision, layout.attention, steps=2)
    ranks = train(case, layout, transport="gloo")
    assert_rules(case, layout, ranks)


def test_the_space_is_covered() -> None:
    points = cases("dense")
    assert len({p.id for p in points}) == len(points) >= 130
    assert sum(p.layout.ranks == 8 for p in points) <= len(points) / 10
    for name, values in DENSE.items():
        assert {p[name] for p in points} == set(values), name
    for zero in DENSE["zero"]:
        for model in DENSE["model"]:
            assert any(p["zero"] == zero and p["model"] == model for p in points), (zero, model)


def test_the_space_of_pipelines_is_covered() -> None:
    points = cases("pipelines")
    assert len({p.id for p in points}) == len(points) >= 80
    for name, values in PIPELINES.items():
        assert {p[name] for p in points} == set(values), name
    for schedule in PIPELINES["schedule"]:
        mine = [p for p in points if p["schedule"] == schedule]
        assert {p["zero"] for p in mine} == {0, 1, 2, 3}, schedule
        assert {p.case.model.tied for p in mine} == {False, True}, schedule
        assert any(p["tp"] > 1 for p in mine) and any(p["dp"] > 1 for p in mine), schedule


@pytest.mark.parametrize("seed", range(20261121, 20261136))
def test_every_sample_has_every_stratum(seed: int) -> None:
    points = sample(seed)
    assert points == sample(seed)
    assert len(set(points)) == len(points) == SPACES["dense"]["sample"]
    for name in ("zero", "sp", "tpkind", "recompute", "attention", "precision", "model"):
        assert {p[name] for p in points} == set(DENSE[name]), name
    assert {p.layout.ranks for p in points} == set(WORLDS)
    assert sum(p.layout.ranks == 8 for p in points) == 1
