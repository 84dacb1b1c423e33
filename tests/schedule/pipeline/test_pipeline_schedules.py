"""The generators: what they refuse, that they are torch's where torch has them, and the form of what they make."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint
from shardwise.schedule.pipeline import build, find, generators
from shardwise.schedule.pipeline.action import COMPUTE
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.stages import StageLayers
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
    assert str(found) == "/".join(map(str, layers)) and abs(sum(found.shares(head=2)) - 1) < 1e-12


def test_even_stages_put_more_first():
    assert str(StageLayers.even(82, 4)) == "21/21/20/20"


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
