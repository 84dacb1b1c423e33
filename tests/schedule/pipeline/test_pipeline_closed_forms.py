"""Simulated bubbles and counted peaks against the table of the literature, exactly, where it holds."""

from fractions import Fraction
from itertools import product

import pytest

from harness.cases import from_table
from quoted.pipelines import of_total
from shardwise.schedule.pipeline import bubbles, build, find
from shardwise.schedule.pipeline.bubbles import curve, least_micro
from shardwise.schedule.pipeline.closed_forms import FORMS, PipelineShape
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

GRID = [(p, m, v) for p in range(1, 6) for m in (1, 2, 3, 4, 5, 6, 8, 9, 11, 12) for v in (1, 2, 3)]
TIMES = list(product((1, 2, 3), repeat=3))


def cases(name: str):
    """(p, m, v) that a schedule is for."""
    return [case for case in GRID if not find(name).objection(*case)]


def lost(name: str, schedule, f: float, i: float, w: float):
    """The bubble that the formula is about, in whole numbers: a stage takes f, i, w."""
    simulated = simulate(schedule, Times.equal(schedule.stages, f, i, w))
    return max(simulated.own_idle if FORMS[name].own else simulated.idle)


@pytest.mark.parametrize("name", FORMS)
def test_bubbles_are_the_formulas_where_these_hold_and_bounds_where_they_are(name):
    form = FORMS[name]
    exact = 0
    for p, m, v in cases(name):
        schedule = build(name, p, m, v)
        for f, i, w in TIMES:
            case = PipelineShape(p, m, v, f * v, i * v, w * v)
            found = lost(name, schedule, f, i, w)
            if form.exact(case):
                exact += 1
                assert found == form.bubble(case), case
            elif form.below(case):
                assert found >= form.bubble(case), case
    assert exact >= 20


@from_table
def test_conditions_are_needed(name, case):
    """Outside of them the formula is a bound only: it is exceeded."""
    p, m, v, f, i, w = case
    case = PipelineShape(p, m, v, f * v, i * v, w * v)
    assert not FORMS[name].exact(case) and lost(name, build(name, p, m, v), f, i, w) > FORMS[name].bubble(case)


def test_dualpipe_v_s_formula_is_an_upper_bound_where_f_is_less_than_i_and_too_little_where_it_is_more():
    for p, m in ((2, 4), (3, 8), (4, 9)):
        schedule = build("dualpipe-v", p, m, 2)
        for f, i, w in TIMES:
            if w > i:
                continue
            found = lost("dualpipe-v", schedule, f, i, w)
            formula = FORMS["dualpipe-v"].bubble(PipelineShape(p, m, 2, 2 * f, 2 * i, 2 * w))
            assert (found < formula) == (f < i) and (found > formula) == (f > i)


@pytest.mark.parametrize("name", [name for name in FORMS if find(name).train])
def test_peaks_are_the_formulas(name):
    form = FORMS[name]
    for p, m, v in cases(name):
        schedule = build(name, p, m, v)
        found = [Fraction(peak.both, schedule.virtual) for peak in peaks(schedule)]
        wanted = [form.peak(p, m, schedule.virtual, rank) for rank in range(p)]
        assert all(have <= most + 1e-9 for have, most in zip(found, wanted, strict=True))
        if name == "dualpipe-v":
            assert max(found) == wanted[0]
        elif m >= form.full(p):
            assert found == pytest.approx(wanted)


def test_what_is_held_at_most_is_as_many_micro_batches_as_are_counted():
    """Also beside an overlapped F&B, whose F saves before its B frees."""
    for p, m in ((2, 4), (4, 8), (4, 16)):
        for peak in peaks(build("dualpipe-v", p, m, 2)):
            assert peak.both / 2 == peak.held == (2 * p + 1) / 2


def test_interleaved_s_first_rank_holds_what_the_table_says():
    for p, v in product((2, 3, 4, 8), (2, 3, 4)):
        assert FORMS["interleaved"].peak(p, 4 * p, v, 0) == (2 * (p - 1) + (v - 1) * p + 1) / v


def test_both_definitions_of_the_bubble():
    for p, m in product((1, 2, 4, 8), (1, 4, 16)):
        for name in ("gpipe", "1f1b"):
            simulated = simulate(build(name, p, m), Times.equal(p, 2, 3, 1))
            assert simulated.bubble == pytest.approx((p - 1) / m)
            assert simulated.bubble_of_total == pytest.approx(of_total(p, m))
    naive = simulate(build("naive", 4, 5), Times.equal(4, 1, 1, 1))
    assert naive.bubble_of_total == 3 / 4


def test_zero_bubble_is_own_span():
    """The makespan still has (p - 1)F, unless the ranks do not wait for each other between steps."""
    for name, v in (("zb-h2", 1), ("zb-v", 2)):
        simulated = simulate(build(name, 4, 12, v), Times.equal(4 * v, 1, 1, 1))
        assert set(simulated.own_idle) == {0} and set(simulated.idle) == {3}


@pytest.mark.parametrize("hop", [0, 0.5, 3])
@pytest.mark.parametrize(
    ("name", "p", "v"), [("1f1b", 2, 1), ("1f1b", 3, 1), ("interleaved", 2, 2), ("dualpipe-v", 2, 2)]
)
def test_no_smaller_number_of_micro_batches_has_the_wanted_bubble(name, p, v, hop):
    """With hops bubbles go up and down with m, so that halving would miss some."""

    def timing(schedule):
        return Times.equal(schedule.stages, 1, 3, 1).with_hop(hop)

    found = {m: s.bubble_of_total for m, s in curve(name, p, v, list(range(1, 25)), timing)}
    for wanted in sorted(found.values())[::4]:
        least = least_micro(name, p, v, wanted, timing)
        assert least.micro == min(m for m, bubble in found.items() if bubble <= wanted * (1 + 1e-9)) <= least.tried


def test_the_bubble_of_zb_v_goes_up_and_down_without_hops_too():
    def timing(schedule):
        return Times.equal(schedule.stages, 1, 1, 3)

    found = {m: s.bubble_of_total for m, s in curve("zb-v", 5, 2, list(range(1, 15)), timing)}
    assert found[7] < 0.08 < found[8]
    assert least_micro("zb-v", 5, 2, 0.08, timing).micro == min(m for m, bubble in found.items() if bubble <= 0.08) == 7


def test_where_not_all_numbers_can_be_tried_it_is_said(monkeypatch):
    monkeypatch.setattr(bubbles, "TRIED", 2 * 8 * 8 // 2)
    monkeypatch.setattr(bubbles, "LARGEST", 2 * 20)
    found = {wanted: least_micro("gpipe", 2, 1, wanted, lambda s: Times.equal(2, 1, 1, 1).with_hop(0.5))
             for wanted in (0.5, 0.1, 0.01)}  # fmt: skip
    assert found == {0.5: (2, 20, 20), 0.1: (12, 8, 20), 0.01: (None, 8, 20)}
