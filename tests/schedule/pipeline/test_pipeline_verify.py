from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_executor import Broken, mutate, run, schedules, works

from harness.cases import from_table
from shardwise.schedule.pipeline import Action, PipelineSchedule, build, complete, completion, generators
from shardwise.schedule.pipeline.plan import loop
from shardwise.schedule.pipeline.verify import verify

NAMES = [g.name for g in generators()]
MISTAKES = ("swap", "drop", "double", "wrong peer", "reorder")


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_right(name):
    """A sample; `shardwise pipeline verify --all` does all of p = 1 to 16, m = 1 to 64, v = 1 to 4."""
    found = next(g for g in generators() if g.name == name)
    random = Random(name)
    cases = [(p, m, v) for p in range(1, 17) for m in range(1, 65) for v in range(1, 5) if not found.objection(p, m, v)]
    for p, m, v in random.sample(cases, 12):
        assert [str(finding) for finding in verify(build(name, p, m, v))] == []


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_sends_that_wait_for_their_receives_never_stop_a_schedule(ahead):
    cases = [("breadth-first", p, m, v) for p in (2, 3, 5) for m in (3 * p - 1, 3 * p, 5 * p + 1) for v in (2, 3)]
    cases += [("decode", p, m, 1) for p in (2, 3, 5) for m in (p, 3 * p, 4 * p + 1)]
    cases += [("interleaved", p, m, v) for p, m in ((2, 3), (5, 14), (6, 16), (7, 18), (8, 20)) for v in (2, 3)]
    for name, p, m, v in cases:
        assert [str(finding) for finding in verify(build(name, p, m, v, ahead=ahead))] == [], (name, p, m, v)


def test_a_send_whose_receive_is_posted_too_late_is_a_deadlock():
    """Each rank posts its receive behind a send that waits for the other's; a send that went on at once would do."""
    zero = [Action("F", 0, 0), Action("F", 0, 1), Action("F", 2, 0), Action("F", 2, 1)]
    one = [Action("F", 1, 0), Action("F", 1, 1), Action("F", 3, 0), Action("F", 3, 1)]
    schedule = complete("loop", [zero, one], loop(2, 2), 2, train=False)
    assert verify(schedule) == [] and works(schedule)
    late = [action for action in schedule.actions[0] if action.kind != "RECV_F"]
    late[4:4] = [action for action in schedule.actions[0] if action.kind == "RECV_F"]
    mine = list(schedule.actions[1])
    mine.remove(second := Action("RECV_F", 1, 1, 0))
    mine.insert(mine.index(Action("SEND_F", 1, 0, 0)) + 1, second)
    stuck = replace(schedule, actions=(tuple(late), tuple(mine)))
    assert not works(stuck)
    assert str(verify(stuck)[0]) == (
        "deadlock: rank 0, action 3 (0SEND_F1) waits for 1RECV_F1 of rank 1; "
        "rank 1, action 2 (1SEND_F0) waits for 2RECV_F0 of rank 0"
    )


def test_exchanges_at_which_ranks_stand_still_have_one_place_in_all_lists():
    """The loss is a sum over all ranks, and the tied table's messages go with those of stages."""
    schedule = build("interleaved", 2, 2, 2, tied=True)
    early = without(schedule, 1, "3SHARE_LOSS")
    at = [str(a) for a in early.actions[1]].index("3F1") + 1
    mine = (*early.actions[1][:at], Action("SHARE_LOSS", 3, peer=1), *early.actions[1][at:])
    early = replace(early, actions=(early.actions[0], mine))
    assert "(3SHARE_LOSS) waits for 3SHARE_LOSS of rank 0; rank 0, action" in "\n".join(map(str, verify(early)))
    assert not works(early)
    words = [str(a) for a in schedule.actions[1]]
    mine = [a for a in schedule.actions[1] if a.kind != "SUM_TIED"]
    mine.insert(words.index("3REDUCE_GRAD") + 1, schedule.actions[1][words.index("3SUM_TIED")])
    tied = replace(schedule, actions=(schedule.actions[0], tuple(mine)))
    assert verify(tied) and not works(tied)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_what_is_right_runs(schedule):
    assert verify(schedule) == []
    run(schedule)


def test_random_mutations_are_caught_and_named():
    """40 of each kind. Dropping, doubling and wrong peers are never neutral; those swaps and moves are left out that
    an executor cannot tell from the schedule: it comes to the same result."""
    random = Random(6)
    caught: Counter[str] = Counter()
    bases = [
        build(name, 4, 8, v, zero=random.randrange(4), tied=random.random() < 0.5)
        for name in NAMES
        for v in (1, 2, 3)
        if not next(g for g in generators() if g.name == name).objection(4, 8, v)
    ]
    while sum(caught.values()) < 200:
        kind = MISTAKES[sum(caught.values()) % 5]
        base = random.choice([b for b in bases if b.tied or kind != "wrong peer"])
        wrong, touched = mutate(base, kind, random)
        if kind in ("swap", "reorder") and works(wrong):
            continue
        found = verify(wrong)
        text = "\n".join(map(str, found))
        assert found, f"{base.name}: {kind} of {touched} is not found"
        names = [str(leaf) for action in touched for leaf in action.leaves()]
        assert text.startswith("deadlock: rank") or any(name in text for name in names), (kind, names, text)
        for finding in found:
            assert finding.index < 0 or finding.action in (
                action := wrong.actions[finding.rank][finding.index],
                *action.leaves(),
            )
        caught[kind] += 1
    assert set(caught.values()) == {40}


@settings(max_examples=150, deadline=None)
@given(schedules(), st.sampled_from(MISTAKES), st.integers(0, 2**32))
def test_verification_and_the_executor_agree(schedule, kind, seed):
    """Also on mutations that turn out to be neutral: these are not refused."""
    if kind == "wrong peer" and not any(a.peer >= 0 for mine in schedule.actions for a in mine if len(mine) > 2):
        kind = "drop"
    if all(len(mine) <= 2 for mine in schedule.actions):
        return
    if kind == "wrong peer" and any(all(a.peer < 0 for a in mine) for mine in schedule.actions):
        return
    wrong, touched = mutate(schedule, kind, Random(seed))
    assert (verify(wrong) == []) == works(wrong), (kind, list(map(str, touched)), list(map(str, verify(wrong))))


def test_a_deadlock_names_who_waits_for_whom():
    """Each rank does first what needs the other's last, though each list by itself is in order."""
    zero = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    one = [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)]
    found = verify(complete("crossed", [zero, one], loop(2, 1), 2))
    assert [(f.rank, f.index, str(f.action)) for f in found] == [(0, 4, "0B0"), (1, 2, "1F1")]
    assert str(found[0]) == (
        "deadlock: rank 0, action 4 (0B0) waits for 1SEND_B0 of rank 1; "
        "rank 1, action 2 (1F1) waits for 0SEND_F1 of rank 0"
    )


def without(schedule: PipelineSchedule, rank: int, word: str, put: tuple[Action, ...] = ()) -> PipelineSchedule:
    mine = schedule.actions[rank]
    at = [str(action) for action in mine].index(word)
    lists = list(schedule.actions)
    lists[rank] = (*mine[:at], *put, *mine[at + 1 :])
    return replace(schedule, actions=tuple(lists))


@from_table
def test_messages_say_what_is_wrong(rank, word, put, words):
    found = verify(without(build("1f1b", 3, 4), rank, word, put))
    assert any(words in str(finding) for finding in found), list(map(str, found))


@pytest.mark.parametrize(
    "parts",
    [
        (Action("F", 0, 1), Action("F", 0, 1)),
        (Action("B", 0, 0), Action("B", 0, 1)),
        (Action("F", 0, 1),),
        (Action("REDUCE_GRAD", 0), Action("F", 0, 1)),
    ],
)
def test_what_is_overlapped_is_one_forward_and_one_backward(parts):
    mine = build("gpipe", 1, 2).actions[0]
    at = next(index for index, action in enumerate(mine) if action in parts)
    kept = [action for action in mine if action not in parts]
    kept.insert(at, Action("OVERLAP_F_B", parts=parts))
    wrong = replace(build("gpipe", 1, 2), actions=(tuple(kept),))
    assert f"action {at} ({kept[at]}): an OVERLAP_F_B is made of one F and one B" in str(verify(wrong)[0])


def test_parameters_must_be_there():
    schedule = build("interleaved", 2, 4, 4, zero=3, resident=1)
    assert verify(schedule) == []
    late = without(schedule, 0, "4UNSHARD")
    assert "(4F0): the parameters are not there: 4UNSHARD must stand before it" in str(verify(late)[0])
    kept = without(schedule, 0, "6RESHARD")
    assert any("the parameters are there already" in str(f) or "still there" in str(f) for f in verify(kept))


def test_a_weight_version_is_one_step():
    """A computation after its stage's reduction would see, or add to, other weights than those before it."""
    schedule = build("gpipe", 2, 2)
    mine = [action for action in schedule.actions[0] if str(action) != "0B1"]
    mine.insert([str(a) for a in mine].index("0REDUCE_GRAD") + 1, Action("B", 0, 1))
    found = list(map(str, verify(replace(schedule, actions=(tuple(mine), schedule.actions[1])))))
    assert "0W1 or 0B1 must stand before it" in found[0] and "weight version is over" in found[1]


# -- traps, as far as they are about schedules: the mistakes are put back


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_trap_01_both_ends_of_a_tied_table_sum_once_after_their_reductions(name):
    schedule = build(name, 3, 6, 2 if name == "interleaved" else 1, tied=True)
    last = schedule.stages - 1
    assert [[str(a) for a in mine if a.kind == "SUM_TIED"] for mine in schedule.actions] == [
        ["0SUM_TIED"],
        [],
        [f"{last}SUM_TIED"],
    ]
    assert [a.peer for mine in schedule.actions for a in mine if a.kind == "SUM_TIED"] == [2, 0]
    for rank, word in ((0, "0SUM_TIED"), (2, f"{last}SUM_TIED")):
        assert f"({word}): it is missing" in str(verify(without(schedule, rank, word))[0])
    doubled = without(schedule, 0, "0SUM_TIED", (Action("SUM_TIED", 0, peer=2),) * 2)
    assert "a second time" in str(verify(doubled)[0])
    early = without(
        without(schedule, 0, "0SUM_TIED"), 0, "0REDUCE_GRAD", (Action("SUM_TIED", 0, peer=2), Action("REDUCE_GRAD", 0))
    )
    assert "0REDUCE_GRAD must stand before it" in str(verify(early)[0])


def test_trap_01_one_end_that_sums_alone_is_caught(monkeypatch):
    ends = PipelineSchedule.tied_ends
    monkeypatch.setattr(PipelineSchedule, "tied_ends", property(lambda self: ends.fget(self)[:0]))
    with pytest.raises(Broken, match="tied"):
        run(build("1f1b", 3, 4, tied=True))


def test_trap_01_a_v_has_both_ends_on_one_rank():
    schedule = build("zb-v", 3, 6, 2, tied=True)
    assert not any(a.kind == "SUM_TIED" for mine in schedule.actions for a in mine)
    run(schedule)
    moved = [a for a in schedule.actions[0] if str(a) not in ("5W5", "5REDUCE_GRAD")]
    at = [str(a) for a in moved].index("0REDUCE_GRAD") + 1
    moved[at:at] = [Action("W", 5, 5), Action("REDUCE_GRAD", 5)]
    late = replace(schedule, actions=(tuple(moved), *schedule.actions[1:]))
    assert verify(replace(late, tied=False)) == [] and not works(late)
    assert "(0REDUCE_GRAD): 5W5 or 5B5 must stand before it" in str(verify(late)[0])


@pytest.mark.parametrize(("name", "root"), [("1f1b", 3), ("zb-v", 0), ("dualpipe-v", 0)])
def test_trap_05_and_18_every_rank_gets_the_loss_from_where_it_is(name, root):
    schedule = build(name, 4, 8, 1 if name == "1f1b" else 2)
    assert [[a.peer for a in mine if a.kind == "SHARE_LOSS"] for mine in schedule.actions] == [[root]] * 4
    for rank in range(4):
        word = f"{schedule.stages - 1}SHARE_LOSS"
        assert "it is missing" in str(verify(without(schedule, rank, word))[0])


def test_trap_18_the_last_rank_taken_for_the_last_stage_s_is_caught(monkeypatch):
    monkeypatch.setattr(PipelineSchedule, "loss_rank", property(lambda self: self.ranks - 1))
    run(build("1f1b", 4, 8))
    with pytest.raises(Broken, match="loss"):
        run(build("zb-v", 4, 8, 2))


def test_trap_05_a_rank_without_the_loss_is_caught(monkeypatch):
    whole = completion.endings
    monkeypatch.setattr(completion, "endings", lambda bare, rank: whole(bare, rank) if rank else [])
    assert "rank 0, (3SHARE_LOSS): it is missing" in str(verify(build("1f1b", 4, 8))[0])
