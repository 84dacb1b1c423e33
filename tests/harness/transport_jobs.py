"""What ranks run for the tests of transports: many schedules one after the other, each held against torch's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.memories import held, lay_out, result
from shardwise.runtime.transport.sends import SendTransport
from shardwise.schedule import CommSchedule, build

REDUCING = ("reduce", "reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class Case:
    """One run of one schedule. options: those of the algorithm, root included."""

    collective: str
    algorithm: str
    elements: int
    dtype: str
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.collective} {self.algorithm}{options}, {self.elements} x {self.dtype}"


@dataclass(frozen=True)
class Outcome:
    """problem: how this rank's result differs from torch's; empty when it does not. digest: of the result's bytes."""

    problem: str
    digest: str


@dataclass(frozen=True)
class Payload:
    """transport: "sends", "together" (sends as devices need them) or "shared". repeat: runs of each case in a row."""

    transport: str
    cases: tuple[Case, ...]
    repeat: int = 1


class Together(SendTransport):
    """Posts the messages of a round as one operation, as is done on CUDA."""

    def _plan(self, schedule: CommSchedule, memory: Tensor, room: Tensor | None = None) -> Any:
        plan = super()._plan(schedule, memory, room)
        plan.batched = True
        return plan


def make(transport: str) -> Any:
    if transport == "shared":
        from shardwise.runtime.transport.shared import SharedTransport

        return SharedTransport(dist.group.WORLD, 60.0)
    return (Together if transport == "together" else SendTransport)(dist.group.WORLD)


def compare(rank: int, payload: Payload) -> list[Outcome]:
    transport, torchs = make(payload.transport), _Torchs(rank)
    try:
        return [_outcome(rank, case, transport, torchs, payload.repeat) for case in payload.cases]
    finally:
        transport.close()


def _outcome(rank: int, case: Case, transport: Any, torchs: _Torchs, repeat: int) -> Outcome:
    schedule = build(case.collective, case.algorithm, dist.get_world_size(), **dict(case.options))
    full = [_numbers(case, each) for each in range(schedule.ranks)]
    start, stop = held(schedule, rank, case.elements)
    memories = []
    for _ in range(repeat):
        with _poison():
            memories.append(lay_out(schedule, rank, full[rank][start:stop], case.elements))
    # Nothing stands between the runs: what a fast rank does next must not disturb a slow one.
    for memory in memories:
        transport.run(schedule, memory)
    expected = torchs(schedule, case, full)  # by every rank, whether it gets a result or not
    mine, *others = (result(schedule, rank, memory) for memory in memories)
    if mine is None:
        return Outcome("", "")
    same = all(other is not None and _bytes(other) == _bytes(mine) for other in others)
    problem = _difference(schedule, case, mine, expected, full) if same else "runs in a row differ"
    return Outcome(problem, _digest(mine))


def _numbers(case: Case, rank: int) -> Tensor:
    """A rank's full tensor: any 64-bit integer, or normal numbers."""
    generator = torch.Generator().manual_seed(1000 * rank + case.elements)
    if case.dtype == "int64":
        return torch.randint(-(2**63), 2**63 - 1, (case.elements,), generator=generator)
    return torch.randn(case.elements, generator=generator).to(getattr(torch, case.dtype))


@contextmanager
def _poison() -> Iterator[None]:
    """Fresh memory is full of NaN (of the largest integer): who reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _difference(schedule: CommSchedule, case: Case, mine: Tensor, torchs: Tensor, full: list[Tensor]) -> str:
    if mine.shape != torchs.shape:
        return f"shape {tuple(mine.shape)}, torch's is {tuple(torchs.shape)}"
    if case.dtype == "int64" or case.collective not in REDUCING:
        wrong = (mine != torchs).sum().item()
        return f"{wrong} of {mine.numel()} elements are not torch's" if wrong else ""
    # p - 1 additions of any order are off by (p - 1) eps / 2 of the sum of magnitudes at most, torch's as well.
    magnitudes = torch.stack(full).double().abs().sum(0).max().item() if mine.numel() else 0.0
    bound = schedule.ranks * torch.finfo(mine.dtype).eps * magnitudes
    off = (mine.double() - torchs.double()).abs().max().item() if mine.numel() else 0.0
    return "" if off <= bound else f"off by {off:.3g}, rounding explains {bound:.3g}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


@dataclass
class _Torchs:
    """torch.distributed's own results, each computed once. Its collectives want equal pieces: they are padded."""

    rank: int
    known: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def __call__(self, schedule: CommSchedule, case: Case, full: list[Tensor]) -> Tensor:
        key = case.collective, schedule.root, case.elements, case.dtype
        if key not in self.known:
            self.known[key] = self.run(schedule, full)
        return self.known[key]

    def run(self, schedule: CommSchedule, full: list[Tensor]) -> Tensor:
        p, n, root, mine = schedule.ranks, full[0].numel(), schedule.root, full[self.rank]
        cut = [i * n // p for i in range(p + 1)]
        sizes = [b - a for a, b in pairwise(cut)]
        most = max(sizes)
        whole, piece = mine.clone(), mine.new_zeros(most)
        pieces = mine.new_zeros(p, most)
        match schedule.collective:
            case "broadcast":
                dist.broadcast(whole, root)
                return whole
            case "reduce" | "all-reduce":
                dist.reduce(whole, root) if schedule.collective == "reduce" else dist.all_reduce(whole)
                return whole
            case "scatter":
                given = list(_padded(mine, cut, most)) if self.rank == root else None
                dist.scatter(piece, given, root)
                return piece[: sizes[self.rank]]
            case "reduce-scatter":
                dist.reduce_scatter_single(piece, _padded(mine, cut, most).view(-1))
                return piece[: sizes[self.rank]]
            case "all-gather" | "gather":
                piece[: sizes[self.rank]] = mine[cut[self.rank] : cut[self.rank + 1]]
                if schedule.collective == "all-gather":
                    dist.all_gather_single(pieces.view(-1), piece)
                else:
                    dist.gather(piece, list(pieces) if self.rank == root else None, root)
                return torch.cat([row[:size] for row, size in zip(pieces, sizes, strict=True)])
            case _:
                blocks = torch.cat([mine, mine.new_zeros(-n % p)])
                received = torch.empty_like(blocks)
                dist.all_to_all_single(received, blocks)
                return received


def _padded(full: Tensor, cut: list[int], most: int) -> Tensor:
    pieces = full.new_zeros(len(cut) - 1, most)
    for row, (start, stop) in zip(pieces, pairwise(cut), strict=True):
        row[: stop - start] = full[start:stop]
    return pieces


def lose_a_peer(rank: int, transport: str) -> str:
    """Rank 1 leaves before the schedule: what the others are told."""
    made = make(transport)
    try:
        if rank == 1:
            return ""
        made.run(build("all-reduce", "ring", dist.get_world_size()), torch.ones(64))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "no error"


def keep_plans(rank: int, limits: tuple[int, int]) -> tuple[bool, int, int]:
    """(whether a second run finds the first one's plan, plans and bytes that are kept after many sizes)."""
    from shardwise.runtime.transport import sends

    sends.MOST_PLANS, sends.MOST_BYTES = limits
    transport = SendTransport(dist.group.WORLD)
    first = build("all-reduce", "recursive-doubling", 2)
    transport.run(first, torch.ones(8))
    before = list(transport._plans.values())
    transport.run(build("all-reduce", "recursive-doubling", 2), torch.ones(8))
    same = list(transport._plans.values()) == before
    for elements in range(1, 30):
        transport.run(first, torch.ones(elements))
    return same, len(transport._plans), transport._bytes()
