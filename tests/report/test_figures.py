"""Figures: scales, cut bars, the standalone picture."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_strategies import held, names

from shardwise.report import Bytes
from shardwise.report.figures import CUT, byte_ticks, memory_bar, scale, tick_label, ticks
from shardwise.report.page.bar_figure import byte_figure
from shardwise.report.page.line_chart import thin


@given(st.floats(min_value=1e-12, max_value=1e18))
def test_ticks_are_few_round_and_inside(limit):
    marks = ticks(limit)
    assert 3 <= len(marks) <= 12 and marks[0] == 0 and marks[-1] <= limit * 1.00001
    step = marks[1]
    digit = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert round(digit, 6) in (1, 2, 5, 10)


def test_byte_ticks_are_round_in_their_unit():
    assert byte_ticks(100e9)[1] % 1e9 == 0
    assert byte_ticks(100 * 2**30, binary=True)[1] % 2**30 == 0
    assert [tick_label(text) for text in ("20.0 MB", "1.50 GB", "100 kB", "0 B")] == [
        "20 MB",
        "1.5 GB",
        "100 kB",
        "0 B",
    ]


@given(st.lists(st.lists(st.builds(memory_bar, names, names, held), min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_bars_make_well_formed_markup(groups):
    figure = ElementTree.fromstring(byte_figure(groups, binary=False, capacity=80 * 10**9))
    assert len([node for node in figure.iter("svg") if node.get("class") == "bar"]) == sum(map(len, groups))


def test_a_figure_shows_totals_and_cut_bars():
    groups = [
        [memory_bar("ZeRO-0", "8 GPUs", Bytes(optimizer=10**12)), memory_bar("ZeRO-3", "8 GPUs", Bytes(17_600_000_000))]
    ]
    source = byte_figure(groups, binary=False, capacity=80 * 10**9)
    found = set(ElementTree.fromstring(source).itertext())
    assert {"1.00 TB", "17.6 GB", "ZeRO-0", "8 GPUs"} <= found
    assert source.count('class="torn"') == 1


def test_scale_holds_every_bar_unless_the_capacity_is_far_below():
    bars = [memory_bar("", "", Bytes(saved=n)) for n in (10, 250)]
    assert scale(bars, None) >= 250 and scale(bars, 100) >= 250
    assert scale(bars, 20) == CUT * 20
    assert scale(bars, 1000) >= 1000


def test_bar_lengths_are_in_proportion():
    source = byte_figure([[memory_bar("a", "", Bytes(100, 300))]], binary=False)
    widths = [
        float(node.get("width").rstrip("%"))
        for node in ElementTree.fromstring(source).iter("rect")
        if "seg" in (node.get("class") or "") and node.get("width").endswith("%")
    ]
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=3000))
def test_thinning_keeps_order_and_extremes(ys):
    points = [(float(i), y) for i, y in enumerate(ys)]
    kept = thin(points)
    assert len(kept) <= 602 and list(kept) == sorted(kept, key=lambda p: p[0]) and set(kept) <= set(points)
    assert min(y for _, y in kept) == min(ys) and max(y for _, y in kept) == max(ys)
