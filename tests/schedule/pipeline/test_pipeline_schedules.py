"""The generators: what they refuse, that they are torch's where torch has them, and the form of what they make."""

import re
import time
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_executor import schedules

from harness.cases import from_table
from quoted.pipelines import of_total
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint
from shardwise.schedule.pipeline import build, find, generators, parse_action
from shardwise.schedule.pipeline import closed_forms as bubbles
from shardwise.schedule.pipeline.action import COMPUTE
from shardwise.schedule.pipeline.closed_forms import FORMS, PipelineShape, curve, least_micro
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.plan import PipelineSchedule, StageLayers
from shardwise.schedule.pipeline.show import from_csv, from_text, to_csv, to_text
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times, parse_times, seconds_of
from shardwise.schedule.pipeline.verify import verify


def computed(schedule, rank: int) -> str:
    return " ".join(str(action) for action in schedule.actions[rank] if action.kind in COMPUTE)


@from_table
def test_orders_are_the_published_ones(name, rank, order):
    assert computed(build(name, 3, 4), rank) == order


def test_receives_are_posted_ahead_and_reductions_follow_the_last_gradient():
    assert " ".join(map(str, build("1f1b", 3, 3).actions[1])) == (
        "1RECV_F0 1RECV_F1 1RECV_B0 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1RECV_B1 1B0 1SEND_B0 "
        "1F2 1SEND_F2 1RECV_B2 1B1 1SEND_B1 1B2 1SEND_B2 1REDUCE_GRAD 2SHARE_LOSS"
    )
    last = " ".join(map(str, build("interleaved", 2, 2, 2).actions[1]))
    assert last.index("3REDUCE_GRAD") < last.index("1B0"), "a stage is reduced while another still computes"


@given(st.integers(0, 4))
def test_ahead_is_how_many_buffers_there_are(ahead):
    schedule = build("gpipe", 4, 8, ahead=ahead)
    assert peaks(schedule)[3].buffers == ahead + 1


def test_early_a_gradient_leaves_before_those_of_weights():
    assert " ".join(map(str, build("1f1b", 3, 2, early=True).actions[1])) == (
        "1RECV_F0 1RECV_F1 1RECV_B0 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B1 1I0 1SEND_B0 1W0 "
        "1I1 1SEND_B1 1W1 1REDUCE_GRAD 2SHARE_LOSS"
    )
    assert computed(build("1f1b", 3, 2, early=True), 0) == "0F0 0F1 0B0 0B1", "nobody waits for the first stage"
    overlapped = [a for a in build("dualpipe-v", 2, 8, 2, early=True).actions[0] if a.kind == "OVERLAP_F_B"]
    assert overlapped and all(part.kind in "FB" for action in overlapped for part in action.parts), "those stay whole"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=st.integers(2, 6), rounds=st.integers(1, 4), f=st.integers(1, 9), w=st.integers(1, 9), i=st.integers(1, 9))
def test_early_sends_take_the_other_ranks_weights_out_of_the_chain(name, p, rounds, f, i, w):
    """The last micro-batch's gradient comes down through p - 1 ranks that no longer compute those of weights first."""
    m = p * rounds
    whole, early = (
        simulate(build(name, p, m, early=early), Times.equal(p, f, i, w)).makespan for early in (False, True)
    )
    assert whole == (m + p - 1) * (f + i + w)
    assert whole - early == (p - 1) * w if name == "gpipe" else 0 < whole - early <= (p - 1) * w
    assert verify(build(name, p, m, early=True)) == []


def test_zero_adds_gathers_and_reductions():
    kinds = {zero: [a.kind for a in build("1f1b", 2, 4, zero=zero).actions[0]] for zero in range(4)}
    assert [kinds[zero].count("REDUCE_GRAD") for zero in range(4)] == [1, 1, 4, 4]
    assert [kinds[zero].count("UNSHARD") for zero in range(4)] == [0, 0, 0, 1]
    few, many = (
        [str(a) for a in build("interleaved", 2, 4, 4, zero=3, resident=n).actions[0] if "SHARD" in a.kind]
        for n in (1, 4)
    )
    assert sorted(many) == sorted(f"{stage}{kind}" for stage in (0, 2, 4, 6) for kind in ("UNSHARD", "RESHARD"))
    assert len(few) > 8 and few[:4] == ["0UNSHARD", "0RESHARD", "2UNSHARD", "2RESHARD"]


def test_a_raised_warm_up_hides_hops():
    """costs.md: p = 4, m = 8, hop = F/2: 1F1B loses 17, GPipe 12; with more warm-up it does not lose to it."""
    lost = {}
    for name, options in (("gpipe", {}), ("1f1b", {}), ("1f1b", {"warmup": 6})):
        schedule = build(name, 4, 8, **options)
        simulated = simulate(schedule, Times.equal(4, 1, 1, 1).with_hop(0.5))
        lost[name, options.get("warmup", 0)] = max(simulated.idle)
    assert lost == {("gpipe", 0): 12, ("1f1b", 0): 17, ("1f1b", 6): 12}
    assert [peak.forward for peak in peaks(build("1f1b", 4, 8, warmup=6))] == [7, 5, 3, 1]


def test_decode_goes_round_and_keeps_ranks_busy():
    schedule = build("decode", 3, 4, tokens=3)
    assert schedule.micro == 12 and schedule.ring == 4
    assert "0RECV_F4" in map(str, schedule.actions[0]) and "2SEND_F7" in map(str, schedule.actions[2])
    assert "2SEND_F8" not in map(str, schedule.actions[2]), "the last token goes nowhere"
    simulated = simulate(schedule, Times.equal(3, 1, 1, 1))
    assert set(simulated.own_idle) == {0} and simulated.makespan == 12 + 2


@from_table
def test_illegal_numbers_say_what_would_be_legal(name, p, m, v, words):
    with pytest.raises(UserError, match=words) as error:
        build(name, p, m, v)
    assert "\n" not in str(error.value)


def test_what_is_said_to_be_legal_is():
    for m in range(1, 40):
        for p in range(2, 9):
            said = find("interleaved").objection(p, m, 2)
            for word in said.split() if said else ():
                if word.startswith("m="):
                    assert find("interleaved").objection(p, int(word[2:]), 2) == ""


@from_table
def test_options_are_checked(options, words):
    with pytest.raises(UserError, match=words):
        build("1f1b", 4, 8, **options)


def test_every_generator_says_what_it_is():
    for found in generators():
        assert found.summary and found.source and not found.objection(4, 16, found.virtual)
        assert find(found.name.upper().replace("-", "_")) is found


def test_stages_of_very_many_ranks_are_found_at_once():
    began = time.process_time()
    many = PipelineSchedule("any", 1, tuple(range(20_000)), ((),) * 20_000)
    assert many.held == tuple((rank,) for rank in range(20_000)) and time.process_time() - began < 2


def test_the_number_of_actions_and_the_makespan_of_a_large_one():
    schedule = build("interleaved", 16, 64, 4)
    computations, messages = 2 * 64 * 64, 2 * 63 * 64
    assert sum(map(len, schedule.actions)) == computations + 2 * messages + 64 + 16
    assert simulate(schedule, Times.equal(64, 1, 1, 1)).makespan == 64 * 12 + 15 * 3


# -- stages


@given(st.integers(1, 12), st.data())
def test_trap_21_every_part_of_a_model_is_on_exactly_one_stage(stages, data):
    layers = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    if stages > 2:
        layers[0], layers[-1] = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    found = StageLayers.parse("/".join(map(str, layers)), stages, sum(layers))
    whole = ["embedding", *(f"blocks.{i}" for i in range(sum(layers))), "head"]
    cut = blueprint(get("tiny-gpt").replace(layers=sum(layers))).stages(found.layers)
    assert len(cut) == stages and [part for parts in cut for part in parts] == whole
    assert StageLayers.parse(str(found), stages) == found and abs(sum(found.shares(head=2)) - 1) < 1e-12


def test_even_stages_put_more_first():
    assert str(StageLayers.even(82, 4)) == "21/21/20/20"
    assert str(StageLayers.even(66, 16)) == "2x5/14x4"


def test_ends_that_count_as_layers_have_fewer():
    assert str(StageLayers.weighed(126, 64, (1, 1))) == "1/62x2/1"
    assert str(StageLayers.weighed(32, 4, (0, 2))) == "8/9/9/6"
    with pytest.raises(UserError, match="every stage needs layers"):
        StageLayers.weighed(4, 4, (0, 2))


@pytest.mark.parametrize("text", ["3x", "x3", "0x3/4", "-1x3/4", "99999999x3", "2x2x2"])
def test_texts_that_are_no_stages(text):
    with pytest.raises(UserError, match="give layers for each stage, such as 21/20/20/19 or 1/6x2/1"):
        StageLayers.parse(text, 4)


def test_two_stages_more_than_layers_leave_the_ends_to_the_embedding_and_the_head():
    stages = StageLayers.even(126, 128)
    assert stages.layers == (0, *(1,) * 126, 0)
    cut = blueprint(get("tiny-gpt").replace(layers=126)).stages(stages.layers)
    assert (cut[0], cut[1], cut[127]) == (["embedding"], ["blocks.0"], ["head"])


@from_table
def test_stages_that_do_not_fit(text, words):
    with pytest.raises(UserError, match=words):
        StageLayers.parse(text, 4, 80)


def test_more_stages_than_layers():
    with pytest.raises(UserError, match="give at most 3, or 5: the embedding and the head alone"):
        StageLayers.even(3, 4)


def test_uneven_stages_wait_for_the_slowest():
    schedule = build("gpipe", 4, 8)
    times = Times.shared(schedule, 8, 8, 8, StageLayers.parse("2/1/1/0", 4).shares())
    simulated = simulate(schedule, times)
    assert simulated.busy == (384, 192, 192, 0) and simulated.makespan == 8 * 16 + 2 * 8 + 2 * 16 + 8 * 32


def test_times_are_read():
    assert parse_times("F=20ms, I=1s,W=3us") == {"F": 0.02, "I": 1.0, "W": pytest.approx(3e-6)}
    assert parse_times("F=1,B=2") == {"F": 1, "I": 1, "W": 1}
    for text in ("F=1", "F=1,I=1", "F=x,B=1", "F=1,F=1,B=2", "", "FI=1"):
        with pytest.raises(UserError):
            parse_times(text)
    assert seconds_of("1e-3") == 1e-3


# -- docs/pipelines.md: its Python runs, and its figures are what the commands that it names print


TEXT = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
(USE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_its_python_runs():
    exec(USE, {})


@from_table
def test_its_figures_are_printed(argv, figures, capsys):
    assert main(["pipeline", "simulate", *argv.split(), "--ranks", "4", "--micro", "8"]) == 0
    out = capsys.readouterr().out
    for figure in figures:
        assert figure in out
        assert figure.replace(".0", "").strip() in TEXT or figure == " 0.00 s  "


def test_the_large_one_has_as_many_actions():
    p, m, v = 64, 512, 4
    computations, messages = 2 * p * v * m, 2 * (p * v - 1) * m
    assert f"{computations + 2 * messages + p * v + p:,} actions" in TEXT


# -- Texts and CSV read back what was written, and torch's own parser reads ours, and we its schedules


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_our_text_has_everything(schedule):
    assert from_text(to_text(schedule)) == schedule


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_csv_has_all_but_names_and_options(schedule):
    if schedule.ring and not any(str(action).startswith("0RECV_F") for action in schedule.actions[0]):
        return  # without such a message nothing in it tells that tokens go round
    read = from_csv(to_csv(schedule), schedule.name, tied=schedule.tied)
    assert replace(read, options=schedule.options) == schedule


def test_blank_lines_at_the_end_are_no_ranks():
    assert from_csv("0F0,0B0\n\n\n") == from_csv("0F0,0B0\n")


def test_rows_that_say_what_they_gather_take_no_zero():
    text = to_csv(build("1f1b", 2, 2, zero=3))
    assert from_csv(text).gather
    with pytest.raises(UserError, match="zero is for computations alone"):
        from_csv(text, zero=3)


@pytest.mark.parametrize("text", ["0F0,0B0\n1F1,1B1\n", "0B0,0F0\n1W0\n"])
def test_computations_that_are_missing_are_for_verify_to_say(text):
    assert verify(from_csv(text))


def test_computations_alone_are_completed():
    for zero in range(4):
        schedule = build("dualpipe-v", 3, 7, 2, zero=zero)
        assert from_csv(to_csv(schedule, "compute_only"), "dualpipe-v", zero=zero) == schedule


@from_table
def test_texts_that_are_none(text, words):
    with pytest.raises(UserError, match=words):
        from_text(text)


@from_table
def test_csv_that_is_none(text, words):
    with pytest.raises(UserError, match=words):
        from_csv(text)


# -- torch, the second opinion

CLASSES = {
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "breadth-first": ("ScheduleLoopedBFS", 3),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    "dualpipe-v": ("ScheduleDualPipeV", 2),
}


class Stage:
    """As much of a pipeline stage as torch's schedules look at before they run."""

    submod = None
    has_backward = True

    def __init__(self, index: int, stages: int, p: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, p, 0
        self.is_first, self.is_last = index == 0, index == stages - 1


def torch_schedule(name: str, p: int, m: int, v: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    return getattr(schedules, name)([Stage(p * chunk, p * v, p) for chunk in range(v)], m)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12), (5, 10)])
def test_torch_computes_in_the_same_order_and_reads_ours(name, p, m, tmp_path):
    file = tmp_path / "schedule.csv"
    theirs = torch_schedule(*CLASSES[name][:1], p, m, CLASSES[name][1])
    ours = build(name, p, m, CLASSES[name][1], zero=3)
    ours = replace(ours, reduce="step")
    theirs._dump_csv(file, "compute_only")
    assert to_csv(from_csv(file.read_text()), "compute_only") == to_csv(ours, "compute_only")
    for format in ("compute_only", "compute_comms"):
        file.write_text(to_csv(ours, format))
        theirs._load_csv(file, format)
        theirs._dump_csv(file, format)
        assert file.read_text() == to_csv(ours, format)


@pytest.mark.parametrize("name", [*(name for name, _ in CLASSES.values()), "ScheduleInterleavedZeroBubble"])
def test_torch_s_complete_schedules_are_right(name, tmp_path):
    """Also those that we have no generator for: their messages, gathers and reductions pass verification."""
    file = tmp_path / "schedule.csv"
    for p, m in ((2, 4), (3, 9), (4, 8)):
        torch_schedule(name, p, m, 3 if name == "ScheduleLoopedBFS" else 2)._dump_csv(file)
        schedule = from_csv(file.read_text())
        assert schedule.gather and [str(finding) for finding in verify(schedule)] == []


@settings(max_examples=100, deadline=None)
@given(schedules(most=4))
def test_every_action_is_torch_s(schedule):
    """Word by word, with torch's parser, but for the two kinds that torch has not."""
    action_of = pytest.importorskip("torch.distributed.pipelining.schedules")._Action.from_str
    for mine in schedule.actions:
        for action in mine:
            assert parse_action(str(action)) == action._replace(peer=-1)
            if action.kind not in ("SUM_TIED", "SHARE_LOSS"):
                theirs = action_of(str(action))
                assert str(theirs) == str(action) and (theirs.microbatch_index or 0) == max(action.micro, 0)


# -- Simulated bubbles and counted peaks against the table of the literature, exactly, where it holds


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
