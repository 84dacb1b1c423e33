import numpy as np
import pytest

from harness.play import Compute, play
from shardwise.schedule import build
from shardwise.schedule.sending import Instruction, Program, lower


class Unit:
    """A clock: a message takes a second an element, an addition half of one."""

    def message(self, src: int, dst: int, elements: int) -> float:
        return float(elements)

    def addition(self, elements: int) -> float:
        return elements / 2


def program(*ranks: list[Instruction]) -> Program:
    return Program(tuple(map(tuple, ranks)), 4)


def send(peer: int, *after: int, elements: int = 1) -> Instruction:
    return Instruction("send", peer, ((0, elements),), after=after)


def recv(peer: int, *after: int, elements: int = 1) -> Instruction:
    return Instruction("recv", peer, ((0, elements),), after=after)


def test_sends_that_wait_for_each_other_are_a_deadlock():
    """Both send first and receive when that is complete: fine with buffers, stuck under rendezvous."""
    played = play(program([send(1), recv(1, 0)], [send(0), recv(0, 0)]))
    assert len(played.stuck) == 4
    assert played.deadlock == (
        "rank 0, action 0 (send to rank 1) waits for its partner; "
        "rank 1, action 0 (send to rank 0) waits for its partner"
    )


def test_posting_receives_first_is_none():
    played = play(program([recv(1), send(1)], [recv(0), send(0)]))
    assert played.stuck == [] and played.deadlock == ""


def test_a_circle_of_three_is_named_in_full():
    ring = [[send((r + 1) % 3), recv((r + 2) % 3, 0)] for r in range(3)]
    assert [f"rank {r}, action 0" in play(program(*ring)).deadlock for r in range(3)] == [True] * 3


def test_a_message_nobody_waits_for_is_found():
    played = play(program([send(1), send(1)], [recv(0)]))
    assert [(stuck.rank, stuck.index, stuck.posted) for stuck in played.stuck] == [(0, 1, True)]


def test_an_action_that_waits_for_a_later_one_is_found():
    played = play(program([Compute(after=(1,)), Compute()]))
    assert played.deadlock.startswith("rank 0, action 0 (compute)") and not played.stuck[0].posted


def test_sizes_that_differ_are_a_problem():
    (problem,) = play(program([send(1, elements=2)], [recv(0, elements=3)])).problems
    assert "rank 0 sends 2 elements to rank 1, which expects 3" in problem


def test_a_port_carries_one_message_at_a_time_each_way():
    """Rank 0 sends 1 and 2 elements, and receives 4 at the same time."""
    played = play(
        program(
            [send(1), send(2, elements=2), recv(1, elements=4)], [recv(0), send(0, elements=4)], [recv(0, elements=2)]
        ),
        Unit(),
    )
    assert played.seconds == 4.0
    assert played.spans[0] == [(0.0, 1.0), (1.0, 3.0), (0.0, 4.0)]


def test_a_message_that_can_go_does_not_wait_for_one_that_cannot():
    """Rank 2's port is busy with rank 1 until 3; rank 0 meanwhile sends to rank 3."""
    played = play(
        program(
            [send(2, elements=2), send(3)], [send(2, elements=3)], [recv(1, elements=3), recv(0, elements=2)], [recv(0)]
        ),
        Unit(),
    )
    assert played.spans[0] in ([(3.0, 5.0), (0.0, 1.0)], [(0.0, 2.0), (2.0, 3.0)])
    assert played.seconds == 5.0


def test_computations_and_additions_occupy_the_rank_one_at_a_time():
    add = Instruction("reduce", spans=((0, 2),), source=((2, 4),))
    played = play(program([Compute(2.0), add, Compute(1.0, after=(1,))]), Unit())
    assert played.spans[0] == [(0.0, 2.0), (2.0, 3.0), (3.0, 4.0)]


def test_values_are_those_of_the_moment():
    memory = [np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])]
    swap = [Instruction("recv", 1, ((2, 4),)), Instruction("send", 1, ((0, 2),))]
    back = [Instruction("recv", 0, ((2, 4),)), Instruction("send", 0, ((0, 2),))]
    add = [Instruction("reduce", spans=((0, 2),), source=((2, 4),), after=(0, 1))]
    play(program(swap + add, back), memory=memory)
    assert memory[0].tolist() == [11, 22, 10, 20] and memory[1].tolist() == [10, 20, 1, 2]


@pytest.mark.parametrize("p", [2, 5])
def test_a_lowered_round_receives_sends_then_adds(p):
    program = lower(build("all-reduce", "ring", p), 3 * p)
    first = program.actions[0][:3]
    assert [action.kind for action in first] == ["recv", "send", "reduce"]
    assert [action.peer for action in first] == [p - 1, 1, -1]
    assert first[2].after == (0, 1) and program.actions[0][3].after == (2,)
    assert first[0].spans == first[2].source and first[0].spans[0][0] >= 3 * p


def test_pieces_without_elements_are_not_sent():
    actions = lower(build("all-reduce", "ring", 8), 3).actions
    assert sum(action.kind == "send" for mine in actions for action in mine) == 3 * 2 * 7
