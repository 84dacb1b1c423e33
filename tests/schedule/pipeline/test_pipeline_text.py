"""Texts and CSV read back what was written, and torch's own parser reads ours, and we its schedules."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from pipeline_executor import schedules

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.schedule.pipeline import build, parse_action
from shardwise.schedule.pipeline.text import from_csv, from_text, to_csv, to_text
from shardwise.schedule.pipeline.verify import verify


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
