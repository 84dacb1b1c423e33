"""Reading each other's memory is safe whatever the ranks' speeds: plans played in random orders."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.play import play
from harness.rounds import with_rounds
from shardwise.runtime.transport.plan import CopyPlan, RankPlan, rank_plan
from shardwise.schedule import algorithms, build
from shardwise.schedule.comm import Round
from shardwise.schedule.program import lower

NAMES = [(found.collective, found.name) for found in algorithms()]


class Rank:
    """A rank's memory and flags. private: the caller's. sight: what peers see, the same where all of it is in sight."""

    def __init__(self, plan: RankPlan, memory: np.ndarray, copies: CopyPlan, resident: bool) -> None:
        self.plan, self.private, self.copies = plan, memory, copies
        self.sight = memory if resident else np.full_like(memory, -1)
        self.resident = resident
        self.ready = self.read = 0
        self.finished = False

    def at(self, span: tuple[int, int], seen: bool) -> np.ndarray:
        return (self.sight if seen else self.private)[slice(*span)]


def life(rank: Rank, peers: list[Rank]) -> Iterator[None]:
    """What a rank does, in the order in which it does it; it stops wherever others may come in between."""
    if not rank.resident:
        for a, b in rank.copies.enter:
            rank.sight[a:b] = rank.private[a:b]
            yield
    for step, places in zip(rank.plan.steps, rank.copies.places, strict=True):
        rank.ready = step.number + 1
        for fence in step.before:
            while peers[fence.peer].read <= fence.round:
                yield
        aside = {}
        for i, (transfer, place) in enumerate(zip(step.transfers, places, strict=True)):
            yield
            if transfer.peer == rank.plan.rank:
                source = rank.at(transfer.source, place.source)
            else:
                while peers[transfer.peer].ready <= step.number:
                    yield
                source = peers[transfer.peer].sight[slice(*transfer.source)]
            if transfer.aside is not None:
                aside[i] = source.copy()
                continue
            old = rank.at(transfer.target, place.old)
            rank.at(transfer.target, place.new)[...] = old + source if transfer.reduce else source
        rank.read = step.number + 1
        for fence in step.between:
            while peers[fence.peer].read <= fence.round:
                yield
        for i, source in aside.items():
            transfer, place = step.transfers[i], places[i]
            old = rank.at(transfer.target, place.old)
            rank.at(transfer.target, place.new)[...] = old + source if transfer.reduce else source
            yield
    for fence in rank.plan.after:
        while peers[fence.peer].read <= fence.round:
            yield
    if not rank.resident:
        for a, b in rank.copies.leave:
            rank.private[a:b] = rank.sight[a:b]
    # The caller has its memory back, and does something else with what the peers saw.
    rank.finished = True
    if not rank.resident:
        rank.sight[...] = -7


def raced(plans: list[RankPlan], inputs: list[np.ndarray], resident: bool, order: random.Random) -> list[np.ndarray]:
    """The ranks' memories after all have run, one little thing at a time, at whatever speeds `order` gives them."""
    ranks = [
        Rank(plan, memory.copy(), plan.in_sight if resident else plan.copy_plan, resident)
        for plan, memory in zip(plans, inputs, strict=True)
    ]
    lives = {i: life(rank, ranks) for i, rank in enumerate(ranks)}
    speeds = [order.choice((1, 1, 5, 50)) for _ in ranks]
    for _ in range(1_000_000):
        if not lives:
            return [rank.private for rank in ranks]
        (i,) = order.choices(list(lives), [speeds[k] for k in lives])
        if next(lives[i], 0) == 0:
            del lives[i]
    raise AssertionError("the ranks wait for each other")


def played(schedule, elements: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The same by the engine that verifies schedules, where nothing can come too early."""
    program = lower(schedule, elements)
    memory = [np.concatenate([values, np.zeros(program.elements - len(values), int)]) for values in inputs]
    assert not play(program, memory=memory).stuck
    return [values[: len(inputs[0])] for values in memory]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 9),
    elements=st.integers(1, 40),
    resident=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_whatever_the_speeds_the_result_is_the_schedules(name, ranks, elements, resident, seed) -> None:
    check(build(*name, ranks), elements, resident, random.Random(seed))


@pytest.mark.parametrize("name", NAMES, ids=" ".join)
def test_every_algorithm(name) -> None:
    order = random.Random(str(name))
    for ranks in (2, 3, 4, 6, 8):
        for resident in (True, False):
            check(build(*name, ranks), order.randrange(1, 50), resident, order)


def check(schedule, elements: int, resident: bool, order: random.Random, change=lambda plan: plan) -> None:
    size = int(schedule.bounds(elements)[-1])
    inputs = [np.array([order.randrange(1000) for _ in range(size)]) for _ in range(schedule.ranks)]
    plans = [change(rank_plan(schedule, elements, rank)) for rank in range(schedule.ranks)]
    for mine, right in zip(raced(plans, inputs, resident, order), played(schedule, elements, inputs), strict=True):
        a, b = schedule.region(schedule.result), schedule.region(schedule.result) + schedule.chunks
        span = slice(*(int(edge) for edge in (schedule.bounds(elements)[a], schedule.bounds(elements)[b])))
        assert (mine[span] == right[span]).all()


def hasty(plan: RankPlan) -> RankPlan:
    return replace(plan, steps=tuple(step._replace(before=(), between=()) for step in plan.steps))


# Rank 0 is written in the round after it was read, by a rank that does not wait for the reader.
HANDED_ON = with_rounds(build("broadcast", "binomial", 3), [Round.of(0, 1, 0), Round.of(2, 0, 0)])


@pytest.mark.parametrize(
    "schedule", [build("all-reduce", "recursive-doubling", 4), HANDED_ON], ids=["between", "before"]
)
def test_without_fences_somebody_is_too_early(schedule) -> None:
    wrong = 0
    for trial in range(40):
        check(schedule, 16, True, random.Random(trial))
        try:
            check(schedule, 16, True, random.Random(trial), hasty)
        except AssertionError:
            wrong += 1
    assert wrong


def test_nobody_gives_its_memory_back_while_it_is_read() -> None:
    wrong = 0
    for trial in range(40):
        try:
            schedule = build("all-gather", "one-shot", 4)
            check(schedule, 16, False, random.Random(trial), lambda plan: replace(plan, after=()))
        except AssertionError:
            wrong += 1
    assert wrong


def test_as_little_as_can_be_is_copied() -> None:
    """Two ranks that reduce in two shots show each other the half that the other one adds up, and get half back."""
    plan = rank_plan(build("all-reduce", "two-shot", 2), 10, 1)
    assert plan.copy_plan.enter == ((0, 5),) and plan.copy_plan.leave == ((5, 10),)
    plan = rank_plan(build("all-gather", "one-shot", 4), 16, 1)
    assert plan.copy_plan.enter == ((4, 8),) and plan.copy_plan.leave == ()
