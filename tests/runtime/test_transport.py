"""Schedules run by real processes give torch's own results, on every transport."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.memories import held, lay_out, result
from harness.play import play
from harness.pool import run_ranks
from harness.rounds import with_rounds
from harness.today import EVERYTHING, seed
from harness.transport_jobs import REDUCING, Case, Payload
from shardwise.errors import UserError
from shardwise.runtime.transport.plan import CopyPlan, RankPlan, rank_plan
from shardwise.runtime.transport.sends import SendTransport
from shardwise.schedule import Algorithm, algorithms, build
from shardwise.schedule.comm import Round
from shardwise.schedule.sending import Instruction, Post, compile_steps, lower

RANKS = (2, 3, 4, 6, 8)
DTYPES = ("int64", "float32", "bfloat16")
REPLICATED = ("broadcast", "all-gather", "all-reduce")


def sizes(p: int) -> tuple[int, ...]:
    """Fewer elements than ranks, and sizes that do not divide."""
    return tuple(dict.fromkeys((1, p - 1, 3 * p + 1, 20_011)))


def options(algorithm: Algorithm, p: int, generator: random.Random) -> tuple[tuple[str, int], ...]:
    values = {"root": range(p), "segments": (1, 2, 3, 5), "node": [g for g in range(1, p + 1) if p % g == 0]}
    return tuple(
        (name, generator.choice(values[name]))
        for name in algorithm.options
        if name == "root" or generator.random() < 0.5
    )


def cases(p: int, transport: str) -> Iterator[Case]:
    """Every algorithm, with one size and type that rotate with the date; with all of them where SHARDWISE_ALL is 1."""
    everything = [(n, dtype) for n in sizes(p) for dtype in DTYPES]
    generator = random.Random(f"{seed()} {p} {transport}")
    for algorithm in algorithms():
        chosen = everything if EVERYTHING else [generator.choice(everything)]
        for n, dtype in chosen:
            yield Case(algorithm.collective, algorithm.name, n, dtype, options(algorithm, p, generator))


@pytest.fixture(params=["sends", "shared"])
def transport(request):
    return request.param


@pytest.mark.parametrize("p", RANKS)
def test_every_algorithm_gives_torch_s_result(transport, p):
    check(p, Payload(transport, tuple(cases(p, transport)), repeat=2))


def test_sends_as_devices_need_them_give_torch_s_result():
    check(4, Payload("together", tuple(cases(4, "together"))))


def test_a_plan_is_for_one_root_and_one_choice_of_options(transport):
    chosen = [("broadcast", "binomial", (("root", root),)) for root in range(3)]
    chosen += [("broadcast", "chain", (("root", 1), ("segments", segments))) for segments in (1, 2, 4)]
    check(3, Payload(transport, tuple(Case(*names, 13, "int64", options) for *names, options in chosen)))


def check(p: int, payload: Payload) -> None:
    by_rank = run_ranks("harness.transport_jobs:compare", p, payload)
    wrong = []
    for case, outcomes in zip(payload.cases, zip(*by_rank, strict=True), strict=True):
        wrong += [f"{case}, rank {r}: {outcome.problem}" for r, outcome in enumerate(outcomes) if outcome.problem]
        digests = {outcome.digest for outcome in outcomes}
        if case.collective in REPLICATED and len(digests) > 1:
            wrong.append(f"{case}: the ranks' results differ")
        assert digests != {""}, f"{case}: no rank has a result"
    assert not wrong, "\n".join(wrong)


def test_a_peer_lost_in_sends_is_told():
    """Shared memory's are in test_comms.py: there a rank that lives on is found by the time limit."""
    first, _ = run_ranks("harness.transport_jobs:lose_a_peer", 2, "sends")
    assert "onnection" in first and "no error" not in first


def test_plans_are_kept_and_bounded():
    for limits, most in (((5, 1 << 30), 5), ((100, 60), 100)):
        same, plans, nbytes = run_ranks("harness.transport_jobs:keep_plans", 2, limits)[0]
        assert same and plans <= most and (nbytes <= limits[1] or plans == 1)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(algorithms()), st.integers(1, 9), st.integers(0, 40))
def test_buffers_of_any_size_hold_what_the_collective_promises(data, algorithm, p, n):
    root = {"root": data.draw(st.integers(0, p - 1))} if "root" in algorithm.options else {}
    schedule = build(algorithm.collective, algorithm.name, p, **root)
    full = torch.arange(p * n).reshape(p, n) ** 2
    given_ = [full[r, slice(*held(schedule, r, n))] for r in range(p)]
    program = lower(schedule, n)
    spare = torch.zeros(program.elements - int(schedule.bounds(n)[-1]), dtype=torch.int64)
    memory = [torch.cat([lay_out(schedule, r, given_[r], n), spare]).numpy() for r in range(p)]
    play(program, memory=memory)
    for rank, values in enumerate(memory):
        found = result(schedule, rank, torch.from_numpy(values[: int(schedule.bounds(n)[-1])]))
        expected = promised(schedule.collective, full.numpy(), schedule.root, rank)
        assert (found is None) == (expected is None)
        assert found is None or np.array_equal(found.numpy(), expected)


def promised(collective: str, full: np.ndarray, root: int, rank: int) -> np.ndarray | None:
    """A rank's result, from the full tensors of all ranks, shape (p, n)."""
    p, n = full.shape
    cut = [i * n // p for i in range(p + 1)]
    mine = slice(cut[rank], cut[rank + 1])
    if collective in ("reduce", "gather") and rank != root:
        return None
    if collective in REDUCING:
        return full.sum(0)[mine] if collective == "reduce-scatter" else full.sum(0)
    if collective in ("gather", "all-gather"):
        return np.concatenate([full[r, cut[r] : cut[r + 1]] for r in range(p)])
    if collective == "all-to-all":
        blocks = np.pad(full, ((0, 0), (0, -n % p))).reshape(p, p, -1)
        return blocks[:, rank].ravel()
    return full[root, mine] if collective == "scatter" else full[root]


def test_only_messages_that_are_not_contiguous_are_packed():
    def packed(collective: str, algorithm: str) -> int:
        program = lower(build(collective, algorithm, 4), 8, 0)
        base = int(build(collective, algorithm, 4).bounds(8)[-1])
        steps, most = compile_steps(program.actions[0], base, program.elements)
        assert (most > program.elements) == any(isinstance(step, Post) and step.pack for step in steps)
        return most - program.elements

    assert packed("all-reduce", "ring") == packed("reduce-scatter", "halving") == 0
    # Bruck sends pieces 1 and 3, then 2 and 3: two spans of two elements on either side.
    assert packed("all-to-all", "bruck") == 8


def test_nothing_is_waited_for_before_it_is_needed():
    actions = [
        Instruction("recv", 1, ((0, 2),)),
        Instruction("send", 1, ((2, 4),)),
        Instruction("copy", -1, ((6, 7),), ((7, 8),)),
        Instruction("reduce", -1, ((4, 6),), ((0, 2),), after=(0,)),
    ]
    steps, _ = compile_steps(actions, 8, 8)
    assert [type(step).__name__ for step in steps] == ["Post", "Local", "Await", "Local", "Await"]
    assert [step.actions for step in steps if type(step).__name__ == "Await"] == [(0,), (1,)]


def test_what_is_staged_is_no_part_of_the_memory():
    # Two elements arrive at the memory's end, and two behind it that are to be added.
    steps, most = compile_steps([Instruction("recv", 1, ((6, 8), (8, 10)))], 8, 10)
    assert steps[0].messages[0][3] == (10, 14) and most == 14
    assert steps[1].unpack == (((6, 8), (10, 12)), ((8, 10), (12, 14)))


def test_additions_keep_their_order():
    actions = [Instruction("reduce", -1, ((0, 2),), ((at, at + 2),)) for at in (6, 2, 4)]
    (step,), _ = compile_steps(actions, 8, 8)
    assert [source for _, source in step.pairs] == [(6, 8), (2, 4), (4, 6)]


class Group:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@from_table
def test_a_memory_that_does_not_fit_is_refused(collective, ranks, shape, words):
    name = "ring" if collective == "all-reduce" else "pairwise"
    with pytest.raises(UserError, match=words):
        SendTransport(Group()).run(build(collective, name, ranks), torch.zeros(shape))


# -- Reading each other's memory is safe whatever the ranks' speeds: plans played in random orders


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
    check_plan(build(*name, ranks), elements, resident, random.Random(seed))


@pytest.mark.parametrize("name", NAMES, ids=" ".join)
def test_every_algorithm(name) -> None:
    order = random.Random(str(name))
    for ranks in (2, 3, 4, 6, 8):
        for resident in (True, False):
            check_plan(build(*name, ranks), order.randrange(1, 50), resident, order)


def check_plan(schedule, elements: int, resident: bool, order: random.Random, change=lambda plan: plan) -> None:
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
        check_plan(schedule, 16, True, random.Random(trial))
        try:
            check_plan(schedule, 16, True, random.Random(trial), hasty)
        except AssertionError:
            wrong += 1
    assert wrong


def test_nobody_gives_its_memory_back_while_it_is_read() -> None:
    wrong = 0
    for trial in range(40):
        try:
            schedule = build("all-gather", "one-shot", 4)
            check_plan(schedule, 16, False, random.Random(trial), lambda plan: replace(plan, after=()))
        except AssertionError:
            wrong += 1
    assert wrong


def test_as_little_as_can_be_is_copied() -> None:
    """Two ranks that reduce in two shots show each other the half that the other one adds up, and get half back."""
    plan = rank_plan(build("all-reduce", "two-shot", 2), 10, 1)
    assert plan.copy_plan.enter == ((0, 5),) and plan.copy_plan.leave == ((5, 10),)
    plan = rank_plan(build("all-gather", "one-shot", 4), 16, 1)
    assert plan.copy_plan.enter == ((4, 8),) and plan.copy_plan.leave == ()
