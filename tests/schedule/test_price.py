from dataclasses import dataclass

import numpy as np
import pytest
from collective_formulas import chain, double_tree, hierarchical, hierarchical_half, hierarchical_masters
from collective_reference import PAIRS_LISTED
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.play import play
from harness.rounds import with_rounds
from shardwise.cluster import KINDS, Cluster, Device, Link
from shardwise.errors import UserError
from shardwise.schedule import CommSchedule, RepeatedRounds, algorithms, build
from shardwise.schedule.closed_forms import CLOSED_FORMS, lower_bounds
from shardwise.schedule.network import Network, Tier
from shardwise.schedule.price import price, profile
from shardwise.schedule.sending import lower

ALPHA, BETA, GAMMA = 3.1e-6, 7.3e-11, 1.7e-12
INTRA, INTER = Tier(1e-6, 1e-11), Tier(5e-6, 3e-11)
POWERS = [2**k for k in range(1, 11)]


@dataclass(frozen=True)
class NetworkClock:
    """A network as the engine's clock: seconds by elements of `element_bytes` bytes. NICs are not shared in it."""

    network: Network
    element_bytes: float = 1

    def message(self, src: int, dst: int, elements: int) -> float:
        alpha, beta = self.network.intra if self.network.node[src] == self.network.node[dst] else self.network.inter
        return alpha + elements * self.element_bytes * beta

    def addition(self, elements: int) -> float:
        return elements * self.element_bytes * self.network.gamma


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-300)


def terms(found: object) -> tuple[float, float, float]:
    return found.alpha, found.beta, found.gamma  # type: ignore[attr-defined]


@pytest.mark.parametrize(("collective", "name"), CLOSED_FORMS)
def test_the_closed_forms_come_out(collective, name):
    form = CLOSED_FORMS[collective, name]
    most = 64 if name in PAIRS_LISTED or (collective, name) == ("all-to-all", "bruck") else 1024
    for p in (1, *POWERS, 3, 6, 12, 100, 1000):
        if p <= most and form.holds(p):
            network = Network.flat(p, ALPHA, BETA, GAMMA)
            found = profile(build(collective, name, p), network)
            for nbytes in (1000, 123_456_789):
                assert terms(found.at(nbytes)) == near(terms(form.at(p, nbytes, ALPHA, BETA, GAMMA))), (p, nbytes)


def test_every_algorithm_has_a_closed_form():
    apart = {"chain", "double-tree", "hierarchical", "hierarchical-masters"}
    assert {(a.collective, a.name) for a in algorithms() if a.name not in apart} == CLOSED_FORMS.keys()


@pytest.mark.parametrize(("g", "nodes", "nics"), [(8, 8, 8), (8, 8, 1), (8, 4, 2), (4, 3, 4), (6, 2, 3), (8, 125, 8)])
def test_the_hierarchical_forms_come_out(g, nodes, nics):
    network = Network(np.arange(g * nodes) // g, INTRA, INTER, GAMMA, nics)
    found = {name: price(build("all-reduce", name, g * nodes, node=g), network, 1e8)
             for name in ("hierarchical", "hierarchical-masters")}  # fmt: skip
    assert terms(found["hierarchical"]) == near(hierarchical(g, nodes, 1e8, INTRA, INTER, GAMMA, nics))
    assert terms(found["hierarchical-masters"]) == near(hierarchical_masters(g, nodes, 1e8, INTRA, INTER, GAMMA))
    for collective in ("all-gather", "reduce-scatter"):
        half = price(build(collective, "hierarchical", g * nodes, node=g), network, 1e8)
        assert terms(half)[:2] == near(hierarchical_half(g, nodes, 1e8, INTRA, INTER, nics)[:2])


@given(st.integers(2, 40), st.integers(1, 40))
@settings(deadline=None)
def test_pipelines_take_the_rounds_they_should(p, segments):
    network = Network.flat(p, ALPHA, BETA, GAMMA)
    a, b, _ = chain(p, segments)
    assert terms(price(build("broadcast", "chain", p, segments=segments), network, 1e6))[:2] == near(
        (a * ALPHA, b * 1e6 * BETA)
    )
    two = price(build("all-reduce", "double-tree", p, segments=2 * segments), network, 1e6)
    # The form counts two rounds a level and whole levels for the last segment: a few rounds more than are needed.
    assert p < 4 or 0 <= double_tree(p, 2 * segments)[0] - two.alpha / ALPHA <= 8


@given(st.sampled_from(algorithms()), st.integers(1, 17), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_the_engine_agrees_message_by_message(algorithm, p, k):
    """Sizes that divide. Where ranks read, without the latency that a message has and a read has not. In two trees some
    ranks still add while others go on: the sum of the rounds is a little more."""
    schedule = build(algorithm.collective, algorithm.name, p)
    network = Network.flat(p, 0.0 if algorithm.reads else ALPHA, BETA, GAMMA)
    elements = schedule.chunks * k
    played = play(lower(schedule, elements), NetworkClock(network, 4))
    paid = price(schedule, network, 4 * elements)
    assert played.seconds == pytest.approx(paid.seconds, rel=1e-9) or (
        algorithm.name == "double-tree" and paid.seconds - paid.gamma <= played.seconds <= paid.seconds
    )


@given(st.sampled_from([a for a in algorithms() if not a.reads]), st.integers(1, 17))
@settings(max_examples=60, deadline=None)
def test_on_two_tiers_the_engine_is_never_slower(algorithm, p):
    """Rounds may overlap there: a price waits for the slowest link of every round, a program for its own messages."""
    schedule = build(algorithm.collective, algorithm.name, p)
    network = Network(np.arange(p) // 4, INTRA, INTER, GAMMA, nics=4)
    played = play(lower(schedule, 100 * schedule.chunks), NetworkClock(network))
    assert played.seconds <= price(schedule, network, 100 * schedule.chunks).seconds * (1 + 1e-9)


@given(st.sampled_from(algorithms()), st.integers(1, 24), st.sampled_from([1, 2, 4]), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_one_round_speaks_for_all_of_its_stage_and_of_those_alike(algorithm, p, nics, segments):
    options = {"segments": segments} if "segments" in algorithm.options else {}
    schedule = build(algorithm.collective, algorithm.name, p, **options)
    network = Network(np.arange(p) // 4, INTRA, INTER, GAMMA, nics)
    each = with_rounds(schedule, list(schedule.rounds()))
    assert terms(price(schedule, network, 1e6)) == near(terms(price(each, network, 1e6)))


@given(st.sampled_from([a for a in algorithms() if "segments" in a.options]), st.integers(2, 40), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_stages_that_are_alike_have_the_same_messages_but_for_which_chunks(algorithm, p, segments):
    known: dict[object, list[tuple[object, ...]]] = {}
    for stage in build(algorithm.collective, algorithm.name, p, segments=segments).stages:
        (round,) = stage.rounds()
        rows = list(zip(*(getattr(round, name).tolist() for name in ("src", "dst", "count", "reduce")), strict=True))
        assert stage.price_key is not None and known.setdefault(stage.price_key, rows) == rows


def test_ranks_of_a_node_share_its_nics():
    exchange = build("all-to-all", "pairwise", 8)

    def beta(nics: int, sharing: int = 1) -> float:
        network = Network(np.arange(8) // 4, Tier(0, 0), Tier(0, 1e-9), 0.0, nics, sharing)
        last = RepeatedRounds.once(list(exchange.rounds())[4])
        return price(CommSchedule("all-to-all", "by hand", 8, 8, (last,), ("data", "out"), "out"), network, 8e9).beta

    # All four ranks of each node send an eighth across: one second through a NIC of their own.
    assert [beta(nics) for nics in (4, 8, 2, 1)] == near([1.0, 1.0, 2.0, 4.0])  # type: ignore[comparison-overlap]
    assert beta(4, sharing=2) == near(2.0)


def test_a_group_is_priced_where_it_lies():
    cluster = Cluster.parse("4x8xH100")
    inside, across = Network.of(cluster, range(8, 16)), Network.of(cluster, range(3, 32, 8))
    assert (inside.nodes, inside.per_node, across.nodes, across.per_node) == (1, 8, 4, 1)
    assert inside.nics == 8 and inside.gamma == near(3 / 3.35e12) and inside.notes == ()
    assert across.inter.alpha == KINDS["network"].alpha and "2.7 µs" in across.notes[0]
    assert Network.of(cluster, 12).per_node is None and Network.of(cluster, 16).per_node == 8


def test_what_is_not_known_is_asked_for():
    with pytest.raises(UserError, match=r"inside a node.*\[intra\] alpha and bandwidth"):
        Network.of(Cluster.parse("4xcpu"), 4)
    device = Device("X", "cpu", None, None)
    known = Cluster(2, 4, device, Link(1e-6, 1e9), Link(None, 1e9))
    assert Network.of(known, 4).gamma == 0.0 and "additions" in Network.of(known, 4).notes[0]
    with pytest.raises(UserError, match="latency of the link between nodes"):
        Network.of(known, 8)
    for ranks in (0, [0, 0], [-1], 9):
        with pytest.raises(UserError, match=r"rank|fit"):
            Network.of(known, ranks)


@given(st.sampled_from(algorithms()), st.integers(1, 24), st.sampled_from([1, 4]), st.floats(1, 1e10))
@settings(max_examples=100, deadline=None)
def test_no_price_is_below_a_bound(algorithm, p, nics, nbytes):
    network = Network(np.arange(p) // 4, INTRA, INTER, GAMMA, nics)
    paid = price(build(algorithm.collective, algorithm.name, p), network, nbytes)
    least = lower_bounds(algorithm.collective, network, nbytes, algorithm.reads)
    assert paid.seconds >= max(least) * (1 - 1e-12)
    flat = Network.flat(p, ALPHA, BETA, GAMMA)
    paid = price(build(algorithm.collective, algorithm.name, p), flat, nbytes)
    for have, need in zip(terms(paid), lower_bounds(algorithm.collective, flat, nbytes, algorithm.reads), strict=True):
        assert have >= need * (1 - 1e-12)


def test_bytes_sent_are_those_of_the_busiest_rank():
    network = Network.flat(8, ALPHA, BETA)
    assert price(build("all-reduce", "ring", 8), network, 800).bytes_sent == 1400
    assert price(build("broadcast", "binomial", 8), network, 800).bytes_sent == 2400
    assert price(build("all-reduce", "hierarchical", 8, node=4), network, 800).bytes_sent == 1400


def test_sixteen_thousand_ranks_look_at_a_few_rounds():
    network = Network.flat(16384, ALPHA, BETA, GAMMA)
    for name in ("ring", "hierarchical", "rabenseifner", "recursive-doubling"):
        schedule = build("all-reduce", name, 16384)
        found = profile(schedule, network)
        assert found.steps == schedule.steps and len(found.loads) <= 30
