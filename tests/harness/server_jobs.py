"""What a rank runs for the tests of parameter servers: train as a worker, or serve."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness.jobs import _errors, _recorded, micro_batches
from harness.reference import Case, Outcome, values
from shardwise.layout import Layout, unit_plan
from shardwise.layout.axes import REPLICA
from shardwise.layout.key_ranges import server_rank
from shardwise.layout.unit import Backend
from shardwise.report import Role
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.sync.messages import PUSH, Header, ServerMail
from shardwise.runtime.sync.run import make_server
from shardwise.runtime.sync.worker import RemoteOptimizer
from shardwise.schedule.update_record import UpdateRecord


@dataclass(frozen=True)
class Served:
    """What the ranks do. delays: seconds that a worker sleeps before each gradient. lags: (worker, server) -> seconds
    before that server is sent each gradient."""

    case: Case
    layout: Layout
    against: Outcome
    delays: tuple[float, ...] = ()
    lags: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass
class ServedOutcome:
    """Of a worker, and of the server in its process. errors: parameter -> squared distance to the reference at the end.
    reads: (step, updates in the weights that its gradient was computed with)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    weights: list[torch.Tensor] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    pushes: list[int] = field(default_factory=list)
    """Gradients that were sent to each server."""
    record: UpdateRecord | None = None
    role: Role | None = None
    backend: Backend = "shared"


class CountingMail(ServerMail):
    """Counts the gradients that leave this rank, by the rank of their server, and delays them. lags: rank of a server
    -> seconds."""

    def __init__(self, timeout: float, lags: Mapping[int, float]) -> None:
        super().__init__(timeout)
        self.pushes: Counter[int] = Counter()
        self.lags = lags

    def ask(self, server: int, head: Header, tensor: torch.Tensor | None = None) -> list[Any]:
        if head.kind == PUSH:
            self.pushes[server] += 1
            time.sleep(self.lags.get(server, 0.0))
        return super().ask(server, head, tensor)


def serve(rank: int, asked: Served) -> ServedOutcome:
    case, layout, outcome = asked.case, asked.layout, ServedOutcome()
    comms = make_comms(layout, case.model, rank, timeout=60.0)
    plan = unit_plan(case.model, layout, case.workload, rank=rank, backend=comms.backend)
    worker = rank // layout.tp
    lags = {server_rank(plan, server): lag for (one, server), lag in asked.lags.items() if one == worker}
    mail = CountingMail(60.0, lags)
    server = make_server(plan, mail, values, case.optimizer, case.steps)
    if rank < layout.training_ranks:
        make = partial(RemoteOptimizer, config=case.optimizer, mail=mail, server=server)
        program = TrainProgram(plan, comms, make, values, torch.device("cpu"))
        _work(program, asked, outcome, comms.index(REPLICA))
        outcome.pushes = [mail.pushes[server_rank(plan, n)] for n in range(layout.parameter_servers.count)]
    else:
        dist.barrier()
    if server is not None:
        server.join()
        outcome.record = server.record
        if server.failure is not None:
            raise server.failure
    outcome.backend = comms.backend
    dist.barrier()
    comms.close()
    return outcome


def _work(program: TrainProgram, asked: Served, outcome: ServedOutcome, worker: int) -> None:
    case, layout, optimizer = asked.case, asked.layout, program.optimizer
    shares = layout.dp if layout.sync == "async" else 1
    optimizer.begin(0, 0)
    at, first = worker if shares > 1 else 0, True
    while at // shares < case.steps:
        optimizer.begin_gradient(at)
        if asked.delays:
            time.sleep(asked.delays[worker])
        outcome.reads.append((at, optimizer.steps))
        batches = micro_batches(case, layout, program.comms.rank, at // shares, at % shares if shares > 1 else None)
        step = partial(program.step, batches, 0.0)
        (_, norm, _), role = _recorded(program, program.comms.rank, step, memory=not first)
        outcome.role = role if not first or outcome.role is None else outcome.role
        first = False
        outcome.losses.append(optimizer.loss)
        outcome.norms.append(norm)
        at = optimizer.next
    optimizer.fence(case.steps * shares, end=True)
    for flat in program.engine.units.values():
        outcome.errors |= _errors(flat, flat.interval, asked.against.final)
        outcome.weights.append(flat.interval.clone())
    optimizer.done()
