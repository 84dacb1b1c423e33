"""Collectives in the time of a step: what is left out to be quick changes no price."""

import pytest

from shardwise.cluster import Cluster
from shardwise.predict.time import Pricing
from shardwise.predict.time.network import _worth_asking
from shardwise.schedule.choose import pricer


@pytest.mark.parametrize(
    ("cluster", "op", "ranks", "stride"),
    [
        ("64x8xH100", "all_reduce", 16, 1), ("64x8xH100", "all_reduce", 8, 4), ("64x8xL40S", "all_reduce", 8, 8),
        ("64x4xA100", "all_reduce", 16, 1), ("64x8xA100", "reduce_scatter", 48, 2),
        ("64x8xA100", "reduce_scatter", 64, 1),
    ],
)  # fmt: skip
def test_algorithms_that_are_not_asked_are_never_the_cheapest(cluster, op, ranks, stride):
    on = Cluster.parse(cluster)
    prices = pricer(op, tuple(i * stride for i in range(ranks)), on, sharing=stride)
    asked = [found.name for found in prices.candidates if _worth_asking(found, ranks, False)]
    assert len(asked) < len([found for found in prices.candidates if not found.reads])
    for nbytes in (1e3, 1e5, 1e7, 1e9, 1e11):
        mine = min(prices.pick(nbytes, name)[1].seconds for name in asked)
        assert mine == pytest.approx(prices.pick(nbytes, "best")[1].seconds, rel=1e-12)


def test_groups_with_the_same_links_have_one_price():
    price = Pricing(Cluster.parse("64x8xH100")).collectives.seconds
    assert price("all_reduce", 1e8, 4, 1) == price("all_reduce", 1e8, 4, 2)
    assert price("all_gather_into", 1e8, 8, 8) == price("all_gather_into", 1e8, 8, 64)
    assert price("all_gather_into", 1e8, 8, 8) > price("all_gather_into", 1e8, 8, 1)
