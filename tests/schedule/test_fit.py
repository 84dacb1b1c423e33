"""Fitting: known figures come back, through noise and outliers; what cannot be told is refused or left out."""

import numpy as np
import pytest

from harness.today import some_of
from shardwise.cluster import Cluster, Device, Link, Speed
from shardwise.errors import UserError
from shardwise.schedule import algorithms, build
from shardwise.schedule.fit import Sample, accuracy, fit
from shardwise.schedule.network import Network
from shardwise.schedule.price import price

FIGURES = {"intra.beta": "bandwidth", "gamma": "addition", "local.beta": "copy", "again": "again"}
DEVICE = Device("X", "cuda", 10**9, None)
SPEEDS = (
    Speed(64 << 10, 50e9, 80e9, 40e9, 100e9),
    Speed(1 << 20, 30e9, 60e9, 20e9, 50e9),
    Speed(16 << 20, 8e9, 10e9, 5e9, 12e9),
)
LINK = Link(2e-6, 8e9, "", 5e-6, 1e-6, True, SPEEDS)
SIZES = [1 << k for k in range(10, 25)]
FITTED = [1 << 10, 1 << 12, *(int(speed.nbytes) for speed in SPEEDS)]


def samples(cluster: Cluster, ranks: int, sizes: list[int]) -> list[Sample]:
    network = Network.of(cluster, ranks, repeated=True)
    schedules = [build(a.collective, a.name, ranks) for a in algorithms()]
    return [Sample(s, nbytes, price(s, network, nbytes).seconds) for s in schedules for nbytes in sizes]


def figures(link: Link) -> np.ndarray:
    rows = [(speed.bandwidth, speed.addition, speed.copy, speed.again) for speed in link.speeds]
    return np.array([link.alpha, link.startup, link.copy_alpha, *np.ravel(rows)], dtype=float)


def disturbed(given: list[Sample], seed: int) -> list[Sample]:
    """Every time is off by 3%, and every tenth takes between two and ten times as long."""
    draw = np.random.default_rng(seed)
    noise = np.exp(0.03 * draw.standard_normal(len(given)))
    late = np.where(draw.random(len(given)) < 0.1, draw.uniform(2, 10, len(given)), 1.0)
    return [s._replace(seconds=s.seconds * a * b) for s, a, b in zip(given, noise, late, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_figures_without_noise_come_back(ranks):
    found = fit(samples(Cluster(1, ranks, DEVICE, LINK, LINK), ranks, FITTED), reads=True).link("intra", "")
    assert found.reads and [speed.nbytes for speed in found.speeds] == [speed.nbytes for speed in SPEEDS]
    assert figures(found) == pytest.approx(figures(LINK), rel=0.01)


@pytest.mark.parametrize("seed", some_of(range(3), 1, "noise"))
def test_noise_and_outliers_do_not_move_them(seed):
    cluster = Cluster(1, 4, DEVICE, LINK, LINK)
    given = samples(cluster, 4, FITTED)
    found = fit(disturbed(given, seed), reads=True)
    link = found.link("intra", "")
    true = figures(LINK)
    assert figures(link)[:2] == pytest.approx(true[:2], rel=0.05)  # latency and start
    inside = [
        figure.low * 0.99 <= 1 / getattr(speed, what) <= figure.high * 1.01
        for name, what in FIGURES.items()
        for figure, speed in zip(found.sized[name], SPEEDS, strict=True)
    ]
    assert sum(inside) >= 8 and all(figure.low <= figure.value <= figure.high for figure in found.sized["gamma"])
    again = Cluster(1, 4, DEVICE, link, link)
    assert accuracy(samples(cluster, 4, SIZES), Network.of(again, 4, repeated=True)).median_error < 0.02


def test_links_between_nodes_have_their_own():
    inside, between = Link(1e-6, 50e9), Link(8e-6, 4e9)
    cluster = Cluster(2, 2, Device("X", "cuda", 10**9, 3e11), inside, between)
    found = fit(samples(cluster, 4, [1 << 10, 1 << 20, 1 << 22]), node=[0, 0, 1, 1])
    for tier, link in (("intra", inside), ("inter", between)):
        fitted = found.link(tier, "")
        assert fitted.alpha == pytest.approx(link.alpha, rel=0.02)
        for speed in fitted.speeds:
            assert speed.bandwidth == pytest.approx(link.bandwidth, rel=0.02)
            assert speed.addition == pytest.approx(1e11, rel=0.02)


def test_one_node_tells_nothing_of_links_between_nodes():
    found = fit(samples(Cluster(1, 2, DEVICE, LINK, LINK), 2, FITTED), reads=True)
    assert FIGURES.keys() == found.sized.keys()
    assert "inter.alpha" not in found.constant and "inter.beta" not in found.sized
    with pytest.raises(UserError, match="measure larger sizes"):
        found.link("inter", "")


def test_what_is_not_measured_is_left_out():
    ring = build("all-gather", "ring", 4)
    network = Network.flat(4, 1e-6, 1e-10)
    found = fit([Sample(ring, n, price(ring, network, n).seconds) for n in (1 << 10, 1 << 18, 1 << 22)])
    assert "gamma" not in found.sized and "local.beta" not in found.sized
    assert {(speed.addition, speed.copy) for speed in found.link("intra", "").speeds} == {(None, None)}


@pytest.mark.parametrize("seconds", [[], [1e-6, 0.0]])
def test_times_that_are_none_are_refused(seconds):
    ring = build("all-gather", "ring", 4)
    with pytest.raises(UserError, match="measured times"):
        fit([Sample(ring, 1024, value) for value in seconds])


def test_accuracy_is_held_against_what_was_measured():
    network = Network.flat(4, 1e-6, 1e-10, 1e-10)
    names = ("ring", "tree", "one-shot")
    priced = {name: price(build("all-reduce", name, 4), network, 1e6).seconds for name in names}
    best = min(priced, key=priced.get)

    def cells(slower: float):
        measured = {name: seconds * (slower if name == best else 1) for name, seconds in priced.items()}
        given = [Sample(build("all-reduce", name, 4), 1e6, measured[name]) for name in names]
        return accuracy(given, network), measured

    right, _ = cells(1.0)
    assert right.median_error == 0 and right.chosen_well() == 1 and right.cells[0].predicted == best
    wrong, measured = cells(100.0)
    (cell,) = wrong.cells
    assert cell.predicted == best != cell.measured and wrong.chosen_well() == 0
    assert cell.behind == pytest.approx(measured[best] / min(measured.values()) - 1)
    assert max(wrong.errors["all-reduce"]) == pytest.approx(0.99)
    nothing = accuracy([], network)
    assert nothing.median_error is None and nothing.chosen_well() is None
