"""Every generated layout with experts against one device, the predicted ledger and the predicted memory; and each pair
of a token and an expert is computed exactly once, by that expert, or dropped once."""

from collections import Counter, defaultdict

import pytest
import torch

from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, judge
from harness.expert_jobs import Pair, Plain, Routed, Traced, plain_routing
from harness.experts import settled
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.reference import Case
from harness.space import Point, selected


def train(point: Point, case: Case) -> list[Traced]:
    asked = Training(case, point.layout, judge(case), transport=point["transport"])
    return run_ranks("harness.expert_jobs:traced", point.layout.ranks, asked)


def outcomes(point: Point, case: Case) -> list[RankOutcome]:
    return [rank.outcome for rank in train(point, case)]


@pytest.mark.layouts(lambda point: point.layout)
@pytest.mark.parametrize("point", selected("experts"), ids=lambda p: p.id)
def test_layout(point: Point) -> None:
    case, layout = settled(point.case), point.layout
    traced = train(point, case)
    ranks = [rank.outcome for rank in traced]
    assert_parity(case, layout, ranks, again=lambda drawn: outcomes(point, drawn))
    assert_replicas_equal(ranks)
    expected = plain_routing(case)
    assert_conserved(case, expected, [rank.routed for rank in traced])
    assert_loads(case, expected, traced)
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


def assert_conserved(case: Case, expected: dict[str, Plain], ranks: list[dict[str, Routed]]) -> None:
    """Each pair is routed once, and computed once by the chosen expert or dropped; where tensor parallelism splits
    experts, by each part of it."""
    assert {name for rank in ranks for name in rank} == set(expected)
    for name, plain in expected.items():
        chosen, takes = plain.chosen, plain.takes
        parts: dict[int, list[Routed]] = defaultdict(list)
        for rank in ranks:
            if name in rank:
                parts[rank[name].etp].append(rank[name])
        for part in parts.values():
            routed = _routed(part)
            assert sorted(routed) == list(range(len(chosen))), f"{name}: pairs that are not routed, or twice"
            dropped = [pair for seen in part for pair in seen.dropped]
            arrived = Counter(pair for seen in part for pair in seen.arrived)
            assert set(arrived.values()) == {1}, f"{name}: a row comes twice"
            assert set(arrived) == {(pair, routed[pair]) for pair in set(routed) - set(dropped)}, name
            assert sum(seen.sent for seen in part) == sum(seen.received for seen in part) == len(arrived)
            if case.precision == "fp64":
                assert [routed[pair] for pair in range(len(chosen))] == chosen.tolist(), name
                assert sorted(dropped) == (~takes).nonzero().flatten().tolist(), name


def _routed(part: list[Routed]) -> dict[Pair, int]:
    found: dict[Pair, int] = {}
    for seen in part:
        assert not found.keys() & seen.chosen.keys(), "two ranks route the same token"
        found |= seen.chosen
    return found


def assert_loads(case: Case, expected: dict[str, Plain], ranks: list[Traced]) -> None:
    assert case.model.experts is not None
    for rank in ranks:
        for name, load in rank.loads.items():
            plain = expected[name]
            assert sum(load.tokens) == len(plain.chosen)
            if case.precision == "fp64":
                assert list(load.tokens) == torch.bincount(plain.chosen, minlength=case.model.experts.count).tolist()
                assert load.dropped == int((~plain.takes).sum())
                assert load.auxiliary_loss == pytest.approx(plain.auxiliary_loss, rel=1e-9)
