from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, Device, Link, Speed
from shardwise.schedule import algorithms, build
from shardwise.schedule.choose import choose, cost, pricer
from shardwise.schedule.closed_forms import lower_bounds
from shardwise.schedule.network import Network, Tier
from shardwise.schedule.price import price

ALPHA, BETA, GAMMA = 2e-6, 1e-10, 3e-11
FLAT = Network.flat(4, ALPHA, BETA, GAMMA)
DEVICE = Device("X", "cpu", 10**9, None)
SPEEDS = (Speed(1e4, 50e9, 80e9, 40e9, 90e9), Speed(1e6, 10e9, 20e9))
LINK = Link(ALPHA, 10e9, "", 5e-6, 1e-6, True, SPEEDS)


def seconds(network: Network, collective: str, name: str, nbytes: float = 1e6) -> float:
    return price(build(collective, name, network.ranks), network, nbytes).seconds


@given(st.sampled_from(algorithms()), st.integers(2, 9), st.floats(1, 1e9))
@settings(max_examples=60, deadline=None)
def test_a_start_is_paid_once(algorithm, p, nbytes):
    schedule = build(algorithm.collective, algorithm.name, p)
    network = Network.flat(p, ALPHA, BETA, GAMMA)
    plain, started = (price(schedule, each, nbytes) for each in (network, replace(network, startup=1e-5)))
    assert started.alpha == pytest.approx(plain.alpha + 1e-5) and started.seconds >= plain.seconds


def test_one_rank_pays_nothing():
    cluster = Cluster(1, 2, DEVICE, LINK, LINK)
    assert cost("all_reduce", 1e6, 1, cluster).seconds == 0


def test_copies_within_a_rank_are_paid_where_there_are_any():
    copying = replace(FLAT, local=Tier(1e-6, 2e-11))
    assert seconds(copying, "all-gather", "ring") == seconds(FLAT, "all-gather", "ring")
    # Its own buffer to where the sum is made.
    more = seconds(copying, "all-reduce", "one-shot") - seconds(FLAT, "all-reduce", "one-shot")
    assert more == pytest.approx(1e-6 + 1e6 * 2e-11)


def test_who_is_read_where_he_writes_puts_aside():
    copying = replace(FLAT, local=Tier(0.0, 2e-11))
    reading = replace(copying, reads=True)
    more = seconds(reading, "all-reduce", "recursive-doubling") - seconds(copying, "all-reduce", "recursive-doubling")
    assert more == pytest.approx(2 * (ALPHA + 1e6 * 2e-11))  # both swaps
    for name in ("ring", "rabenseifner", "tree"):
        assert seconds(reading, "all-reduce", name) == seconds(copying, "all-reduce", name)


def test_who_repeats_finds_in_his_cache_what_nobody_writes():
    again = replace(FLAT, reads=True, repeated=True, saved=4e-11)
    for name, all_read in (("one-shot", 3e6), ("two-shot", 0), ("ring", 0), ("tree", 0)):
        saved = seconds(FLAT, "all-reduce", name) - seconds(again, "all-reduce", name)
        assert saved == pytest.approx(all_read * 4e-11, abs=1e-15)
    # The own piece is not written, those handed on are; of reading there is no more than of handing on.
    assert seconds(FLAT, "all-gather", "ring") - seconds(again, "all-gather", "ring") == pytest.approx(1e-5)
    assert seconds(FLAT, "all-gather", "one-shot") - seconds(again, "all-gather", "one-shot") == pytest.approx(3e-5)
    cluster = Cluster(1, 4, DEVICE, LINK, LINK)
    assert not Network.of(cluster, 4).repeated  # a program's data is new each time


def test_speeds_go_by_the_memory_of_a_rank():
    network = Network.of(Cluster(1, 4, DEVICE, LINK, LINK), 4)
    assert not network.notes and network.intra == Tier(ALPHA, 1e-10)

    def flat(beta: float, gamma: float, copy: float) -> Network:
        return replace(
            Network.flat(4, ALPHA, beta, gamma), startup=5e-6, local=Tier(1e-6, copy), reads=True, nics=network.nics
        )

    small, large = flat(1 / 50e9, 1 / 80e9, 1 / 40e9), flat(1 / 10e9, 1 / 20e9, 0.0)
    for algorithm in algorithms("all-reduce"):
        schedule = build("all-reduce", algorithm.name, 4)
        regions = len(schedule.regions)
        for nbytes, share in ((1.0, 0.0), (1e4, 0.0), (1e5, 0.5), (1e6, 1.0), (1e9, 1.0)):
            nbytes /= regions  # a rank's memory has so many times the buffer's bytes
            found = price(schedule, network, nbytes)
            low, high = (price(schedule, each, nbytes) for each in (small, large))
            assert found.seconds == pytest.approx((1 - share) * low.seconds + share * high.seconds, rel=1e-9)
            assert (found.steps, found.bytes_sent) == (low.steps, low.bytes_sent)
    middle = lower_bounds("all-reduce", network, 1e5)
    ends = [lower_bounds("all-reduce", each, 1e5) for each in (small, large)]
    assert middle == pytest.approx(np.mean(ends, axis=0))


def test_two_links_have_sizes_of_their_own():
    slow = Link(5e-6, 1e9, speeds=(Speed(1e5, 2e9, 4e9), Speed(1e7, 1e9)))
    network = Network.of(Cluster(2, 2, DEVICE, LINK, slow), 4)
    assert [size for size, _ in network.sizes] == [1e4, 1e5, 1e6, 1e7]
    assert [each.inter.beta for _, each in network.sizes] == pytest.approx([1 / 2e9, 1 / 2e9, 0.75e-9, 1e-9])
    assert [each.intra.beta for _, each in network.sizes][2:] == pytest.approx([1e-10, 1e-10])
    assert network.sizes[0][1].gamma == 1 / 4e9  # the slower of the two


def test_memory_that_is_read_is_among_the_best():
    for link, name in ((LINK, "one-shot"), (replace(LINK, reads=False), None)):
        cluster = Cluster(1, 2, DEVICE, link, link)
        algorithm, _ = pricer("all-reduce", 2, cluster).pick(1024, "best")
        assert "one-shot" in {choice.name for choice in choose("all-reduce", 1024, 2, cluster)}
        assert algorithm == name if name else algorithm != "one-shot"
