"""What a rank does for a test of generation: requests come at given turns, and every logit of every token is kept."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.pool import run_ranks
from harness.staged import StagesAll
from harness.today import EVERYTHING, seed, some_of
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP, DP, PP, TP
from shardwise.ops.paged import Rows
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.job.setup import make_comms
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.messages import Answer, Command, Drain
from shardwise.serving.scheduler import EngineStep

Generated = tuple[str, str, int]
"""Name of a model, layout, and number of the case."""


def some_cases(models: Iterable[str], layouts: Sequence[str], count: int) -> list[Generated]:
    cases = [(model, layout, index) for index, (layout, model) in enumerate(product(layouts, models))]
    if EVERYTHING:
        return cases
    generator, today = random.Random(seed()), some_of(layouts, count, "layouts that generate")
    return [generator.choice([case for case in cases if case[1] == layout]) for layout in today]


@dataclass
class Script:
    """What a service would ask. asked: replica -> turn (counted from 0) -> messages."""

    job: ServingJob
    asked: dict[int, dict[int, list[Command]]]
    score: bool = True
    staged: bool = False
    """As ranks that share a GPU."""


@dataclass
class Seen:
    """What one rank saw. logits: request -> place in its sequence -> [vocab], on the last stage. turns: (tokens, rows,
    prefill, ledger) of those with tokens. used: pages at the end. leaving: sends that were kept at a time, at most."""

    answers: list[Answer] = field(default_factory=list)
    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    turns: list[tuple[int, int, bool, tuple[LedgerRow, ...]]] = field(default_factory=list)
    used: int = 0
    reserved: int = 0
    read: int = 0
    share: int = 0
    preempted: int = 0
    leaving: int = 0


class _Scoring(TokenGenerator):
    """Wants the logits of all tokens, keeps them, and hands on those of the rows that were wanted."""

    seen: Seen

    def rows(self, turn: EngineStep) -> Rows:
        rows = super().rows(turn)
        rows.wanted = None
        return rows

    def forward(self, turn: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        y = super().forward(turn, rows, x)
        if "head" not in self.plan.parts:
            return y
        at, wanted = 0, []
        for chunk in turn.chunks:
            kept = self.seen.logits.setdefault(chunk.sequence.request.id, {})
            for place in range(chunk.start, chunk.stop):
                kept[place] = y[at].clone()
                at += 1
            if chunk.wanted:
                wanted.append(at - 1)
        return y[wanted]


def generate(rank: int, script: Script) -> Seen:
    job, seen = script.job, Seen()
    staged = StagesAll if script.staged else None
    comms = make_comms(job.layout, job.model, rank, timeout=60.0, transport=job.transport, staged=staged)
    generator = (_Scoring if script.score else TokenGenerator)(job, comms, rank, torch.device("cpu"))
    if isinstance(generator, _Scoring):
        generator.seen = seen
        for cache in generator.caches.values():
            cache.tensor.fill_(torch.nan)  # what was never written must not be read
    _, weights = weights_in(job.weights)
    read = weights.read

    def counted(*args: Any, **options: Any) -> Any:
        values = read(*args, **options)
        seen.read += values.nbytes
        return values

    weights.read = counted  # type: ignore[method-assign]
    generator.load(weights)
    seen.share = generator.parameter_bytes
    mesh = Mesh.of(job.layout, job.model)
    replica = mesh.index(DP, rank)
    first = mesh.index(CP + TP + PP, rank) == 0 and replica < job.replicas
    lockstep = Lockstep(generator, _hearing(script.asked.get(replica, {})) if first else None)
    run(lockstep, seen)
    seen.reserved = generator.cache_bytes
    dist.barrier()
    comms.close()
    return seen


def _hearing(asked: dict[int, list[Command]]) -> Any:
    turns = iter(range(1 << 30))

    def hear(idle: bool) -> list[Command]:
        turn = next(turns)
        found = list(asked.get(turn, []))
        if turn == max(asked, default=0) + 1:
            found.append(Drain())
        return found

    return hear


def run(lockstep: Lockstep, seen: Seen) -> None:
    comms, scheduler, more = lockstep.comms, lockstep.scheduler, True
    while more:
        comms.start_recording()
        waiting = {id(sequence) for sequence in scheduler.running}
        done = lockstep.step()
        seen.preempted += sum(id(sequence) in waiting for sequence in scheduler.waiting)
        comms.stop_recording()
        if done.step.chunks:
            turn = done.step
            seen.turns.append((turn.tokens, len(turn.wanted), turn.prefill, comms.ledger()))
        seen.answers += done.answers
        seen.leaving = max(seen.leaving, len(lockstep._leaving))
        more = done.more
    lockstep.finish()
    seen.used = lockstep.scheduler.pages.used


def job_of(folder: Path, layout: str, precision: str = "fp32", **options: Any) -> ServingJob:
    at = Layout.parse(f"{layout},precision={precision}")
    return ServingJob(weights_in(folder)[0], at, str(folder), **{"page": 4} | options)


def generated(job: ServingJob, asked: dict[int, dict[int, list[Command]]], **options: Any) -> list[Seen]:
    """What each rank saw."""
    ranks: list[Seen] = run_ranks("harness.generation:generate", job.layout.ranks, Script(job, asked, **options))
    return ranks
