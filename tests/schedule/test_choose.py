import pytest

from shardwise.cluster import Cluster, Device, Link
from shardwise.errors import UserError
from shardwise.schedule import build
from shardwise.schedule.choose import Cost, choose, cost, crossovers, pricer
from shardwise.schedule.comm import COLLECTIVES
from shardwise.schedule.price import price

DEVICE = Device("X", "cuda", 10**9, 3e12)
FLAT = Cluster(1, 16, DEVICE, Link(1e-6, 1e9), Link(1e-6, 1e9))
NODES = Cluster(4, 4, DEVICE, Link(1e-6, 100e9), Link(5e-6, 10e9))


def test_choices_come_cheapest_first_with_their_bounds():
    ranked = choose("all-reduce", 64e6, 16, NODES)
    seconds = [choice.price.seconds for choice in ranked]
    assert seconds == sorted(seconds) and ranked[0].name == "hierarchical" and ranked[0].options == {"node": 4}
    assert {"one-shot", "two-shot"}.isdisjoint(choice.name for choice in ranked)
    for choice in ranked:
        assert all(part is None or 0 <= part <= 1 + 1e-12 for part in choice.fractions.values())


def test_reading_and_nodes_are_offered_where_they_exist():
    one = {choice.name for choice in choose("all-reduce", 1e6, 4, NODES)}
    assert {"one-shot", "two-shot"} <= one and "hierarchical" not in one
    uneven = {choice.name for choice in choose("all-reduce", 1e6, 6, NODES)}
    assert "hierarchical" not in uneven and "ring" in uneven


def test_segments_suit_the_size():
    def segments(nbytes: float) -> int:
        return next(c.options["segments"] for c in choose("broadcast", nbytes, 16, FLAT) if c.name == "chain")

    assert segments(1e3) <= 4 < segments(1e6) < segments(1e9) <= 512
    found = next(c for c in choose("broadcast", 1e6, 16, FLAT) if c.name == "chain")
    least = 1e6 / 1e9 + 14e-6 + 2 * (14 * 1e-6 * 1e6 / 1e9) ** 0.5
    assert found.price.seconds == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(("collective", "name"), [("broadcast", "chain"), ("all-reduce", "double-tree")])
def test_no_other_power_of_two_of_segments_is_cheaper(collective, name):
    """Across nodes, too, where few of a pipeline's messages take the slow link, or most of the latency is elsewhere."""
    slow_start = Cluster(4, 4, DEVICE, Link(1e-4, 1e11), Link(1e-6, 1e10))
    many = Cluster.parse("16x8xA100")
    for ranks, cluster in ((13, FLAT), (13, NODES), (13, slow_start), (125, many)):
        prices = pricer(collective, ranks, cluster)
        for nbytes in (0, 1e4, 1e5, 1e6, 1e8):
            (found,) = (choice for choice in prices.ranked(nbytes) if choice.name == name)
            others = [
                price(build(collective, name, ranks, segments=1 << k), prices.network, nbytes).seconds
                for k in range(10)
            ]
            assert found.price.seconds == pytest.approx(min(others), rel=1e-9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_cheapest_is_the_first_of_the_ranked(collective):
    for ranks, cluster in ((1, NODES), (4, NODES), (16, NODES), (13, NODES), (16, FLAT)):
        prices = pricer(collective, ranks, cluster)
        for nbytes in (0, 1e3, 1e6, 1e9):
            assert prices.cheapest(nbytes).price.seconds == prices.ranked(nbytes)[0].price.seconds
            assert not prices.cheapest(nbytes, reads=False).algorithm.reads


def test_crossovers_are_where_two_cost_the_same():
    found = crossovers("all-to-all", 16, FLAT)
    assert [change.algorithm for change in found] == ["bruck", "pairwise"] and found[0].nbytes == 256
    # 4 α + 4 n/2 β = 15 α + 15/16 n β
    assert found[1].nbytes == pytest.approx(11 * 1e-6 / (2 - 15 / 16) * 1e9, rel=0.01)
    for change in found:
        assert choose("all-to-all", change.nbytes, 16, FLAT)[0].name == change.algorithm


def test_a_winner_between_two_sizes_that_another_wins_is_not_missed():
    """Scatter and all-gather are the cheapest for a range of less than a doubling."""
    slow = Cluster(4, 2, DEVICE, Link(3.7843933775288635e-05, 27091481874.937958), Link(7.02e-06, 1012844417.1559147))
    found = crossovers("broadcast", 5, slow, 1 << 8, 1 << 30)
    assert [change.algorithm for change in found] == ["binomial", "chain", "scatter-allgather", "chain"]
    _, _, begin, end = found
    assert end.nbytes < 2 * begin.nbytes
    for nbytes in (begin.nbytes, round((begin.nbytes + end.nbytes) / 2)):
        assert choose("broadcast", nbytes, 5, slow)[0].name == "scatter-allgather"


def test_equally_cheap_algorithms_do_not_change_places():
    """A ring and pairwise exchanges of large messages cost the same up to the order in which they are summed."""
    slow = Device("X", "cuda", 10**9, 57808770556.405716)
    links = Link(1.883619987681936e-05, 16116663645.179518), Link(3.6412718421799135e-06, 2303296557.259545)
    found = crossovers("reduce-scatter", 31, Cluster(4, 8, slow, *links))
    assert len({change.algorithm for change in found}) == len(found)


def test_a_cost_is_one_collective_of_a_ledger():
    ring = cost("all_reduce", 16e6, 16, FLAT, "ring")
    assert ring == Cost(pytest.approx(30e-6 + 30e-3 + 15 / 16 * 16e6 * 3 / 3e12), 30_000_000, 30)
    assert cost("all_gather_into", 16e6, 16, FLAT, "ring").seconds == pytest.approx(15e-6 + 15e-3)
    assert cost("all_to_all", 16e6, 16, FLAT, "ring") == cost("all_to_all", 16e6, 16, FLAT, "pairwise")
    assert cost("broadcast", 16e6, 16, FLAT, "ring").steps > 15
    best = cost("all_reduce", 16e6, 16, FLAT)
    assert best.seconds <= ring.seconds
    assert best.seconds > choose("all-reduce", 16e6, 16, FLAT)[0].price.seconds, "reads are not messages"
    assert (
        cost("reduce_scatter", 1e6, [5], NODES)
        == Cost(0.0, 0, 0)
        == cost("all_reduce", 8, 1, Cluster.parse("4xcpu"), "ring")
    )


def test_a_group_across_nodes_shares_their_nics_with_its_siblings():
    """Four groups of four nodes, and a NIC for each device: 2 * 3/4 * 4 MB at 10 GB/s."""
    found = cost("all_reduce", 4e6, range(1, 16, 4), NODES, "ring", sharing=4)
    assert found == Cost(pytest.approx(6 * 5e-6 + 1.5 * 4e6 / 10e9 + 0.75 * 4e6 * 1e-12), 6_000_000, 6)
    assert pricer("all-reduce", range(1, 16, 4), NODES, sharing=4).pick(4e6, "best")[0] == "rabenseifner"
    assert pricer("all-reduce", range(1, 16, 4), NODES, nics=1, sharing=4).network.sharing == 4


def test_mistakes_are_told():
    with pytest.raises(UserError, match="no collective 'all_redcue'"):
        cost("all_redcue", 1, 4, NODES)
    with pytest.raises(UserError, match="17 ranks do not fit"):
        choose("all-reduce", 1, 17, NODES)
    with pytest.raises(UserError, match="no algorithm 'rings'; did you mean ring"):
        cost("all_reduce", 1, 4, NODES, "rings")
    with pytest.raises(UserError, match="not negative"):
        choose("all-reduce", -1, 4, NODES)
    with pytest.raises(UserError, match="in order"):
        crossovers("all-reduce", 4, NODES, 100, 10)
