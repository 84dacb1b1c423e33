"""A worker's side of parameter servers: an optimizer whose state and update are elsewhere.

`step` pushes the gradient of each server's key range and has the range's new weights back, when the servers' policy
allows it. State is read and written through messages, so that checkpoints see what they see of any other optimizer.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.axes import REPLICA
from shardwise.layout.key_ranges import Segment, elements, key_ranges, server_rank
from shardwise.layout.unit import Span
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.sync.messages import BEGIN, DONE, FENCE, GET, PUSH, PUT, Header, ServerMail
from shardwise.runtime.sync.server import Server
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.flat_unit import FlatUnit, Values, torch_dtype
from shardwise.runtime.zero.optimizer import gradient_norm


class RemoteState:
    """State of one unit, on the servers."""

    def __init__(self, flat: FlatUnit, optimizer: RemoteOptimizer) -> None:
        self.flat, self._optimizer = flat, optimizer
        self.spans: list[Span] = list(flat.unit.spans)

    def get(self, kind: int, start: int, stop: int) -> Tensor:
        """Elements of one kind of state (`Workload.states`), as a copy."""
        return self._optimizer.read(self.flat.unit.name, kind, start, stop)

    def put(self, kind: int, start: int, values: Tensor) -> None:
        """Change elements, from `start` on. The first replica's ranks speak for all."""
        if not self._optimizer.comms.index(REPLICA):
            self._optimizer.write(self.flat.unit.name, kind, start, values)


class RemoteOptimizer:
    """The optimizer of a worker's rank, whose state is on parameter servers. server: that in this process, if any."""

    def __init__(
        self,
        engine: Engine,
        comms: Comms,
        values: Values,
        config: OptimizerConfig,
        mail: ServerMail,
        server: Server | None,
    ) -> None:
        self.engine, self.comms, self.config, self.mail = engine, comms, config, mail
        plan = engine.plan
        self.states = [RemoteState(flat, self) for flat in engine.units.values()]
        for flat in engine.units.values():
            flat.fill(values)
        self.servers: list[tuple[int, tuple[Segment, ...]]] = [
            (server_rank(plan, server), segments) for server, segments in enumerate(key_ranges(plan))
        ]
        sizes = [elements(segments) for _, segments in self.servers]
        self._leaving = torch.zeros(sum(sizes), dtype=torch_dtype(plan.dtypes.gradients)).split(sizes)
        self._arriving = torch.zeros(sum(sizes), dtype=torch_dtype(plan.layout.dtype)).split(sizes)
        self._buffers = [self._leaving[0], self._arriving[0], *(server.buffers if server else ())]
        self._kept = [each for own in server.ranges for each in own.state] if server else []
        for buffer in {each.untyped_storage().data_ptr(): each for each in self._buffers}.values():
            engine.tally.add("comm", buffer.untyped_storage().nbytes())
        self._wide = torch_dtype(plan.dtypes.master)
        self._clips = plan.layout.asynchronous
        self.looks_at_norm = True
        self.skipped = False
        """Whether the servers left out an update since this rank last heard of them."""
        self.skips = 0
        """Updates that they have left out in this run, because a loss or a gradient was not finite."""
        self.about: dict[str, Any] = {}
        self.steps = 0
        """Updates that are in the weights here, those of earlier runs included."""
        self.step_number = 0
        """Step whose gradient is pushed next; under async the number of its share."""
        self._reads, self._before = [0] * len(self.servers), 0
        """Updates in the weights here, by server; updates of earlier runs."""
        self._began = time.perf_counter()
        self.next, self.stop_before = 0, 0
        self.loss = math.nan
        self._seen = (0.0, 0)
        self.stops = False
        """Whether this rank was told to end the run."""

    def begin_gradient(self, number: int) -> None:
        """The next gradient is begun. number: of its step, under async of its share."""
        self.step_number, self._began = number, time.perf_counter()

    def tell(self, total: float, tokens: int) -> None:
        """Summed loss and valid tokens of the step's batch."""
        self._seen = total, tokens
        self.loss = total / max(1, tokens)

    def step(self, lr: float) -> float:
        """Push the gradient and take new weights; returns the gradient's norm: over all workers where they wait for
        each other, else this one's. lr: has no effect, the servers know the step. Servers leave out an update whose
        loss or norm is not finite."""
        self.comms.pulse.work("the optimizer")
        norm, coefficient, before = math.nan, 1.0, self.skips
        with self.comms.in_phase("optimizer"):
            if self._clips:
                norm = gradient_norm(self.engine, self.comms, self.states)
                if not math.isfinite(norm):
                    self._seen = math.nan, self._seen[1]
                elif self.config.clip:
                    coefficient = min(1.0, self.config.clip / (norm + 1e-6))
            head = self._pull(self._push(coefficient))
        self.stop_before = head.c
        self.skipped = self.skips > before
        if not self._clips:
            norm = head.y
            self.loss = self.loss if math.isnan(head.x) and not self.skipped else head.x
        return norm

    def _push(self, coefficient: float) -> list[list[Any]]:
        """Send the gradient; for each server what is over when it has its part."""
        total, tokens = self._seen
        spent = time.perf_counter() - self._began
        head = Header(PUSH, self.step_number, 0, tokens, x=total, y=float(self.stops), z=spent)
        for (_, segments), leaving in zip(self.servers, self._leaving, strict=True):
            for segment in segments:
                part = leaving[segment.at : segment.at + segment.stop - segment.start]
                part.copy_(self.engine.units[segment.unit].grads_interval[segment.start : segment.stop])
            if coefficient < 1.0:
                leaving.mul_(coefficient)
        for flat in self.engine.units.values():
            flat.grads.free()
        works = []
        for number, ((server, _), leaving) in enumerate(zip(self.servers, self._leaving, strict=True)):
            with self.comms.message("push", f"server {number}", leaving):
                self.mail.expect(server, self._arriving[number])
                works.append(
                    self.mail.ask(server, head._replace(b=self._reads[number], elements=len(leaving)), leaving)
                )
        return works

    def _pull(self, asked: list[list[Any]]) -> Header:
        """New weights from all servers; what the first one says. asked: for each server what is over when it has the
        request."""
        heads = []
        for number, ((server, segments), arriving) in enumerate(zip(self.servers, self._arriving, strict=True)):
            with self.comms.message("pull", f"server {number}", arriving):
                for work in asked[number]:
                    work.wait()
                heads.append(self.mail.answer_of(server, arriving))
            for segment in segments:
                part = arriving[segment.at : segment.at + segment.stop - segment.start]
                self.engine.units[segment.unit].put(segment.start, part)
        self._reads = [head.a for head in heads]
        self.skips = int(heads[0].z)
        self.steps = self._before + self._reads[0] - self.skips
        # Where servers drop different gradients, the first step that one of them still waits for: a later one would be
        # computed with weights of its range that are too old. Under async the first server hands out the text.
        self.next = heads[0].b if self._clips else min(head.b for head in heads)
        return heads[0]

    # -- meeting the others

    def begin(self, version: int, updates: int) -> None:
        """All workers together: the run begins with the state that the servers have. version: the policy's count of
        updates so far; updates: the optimizer's."""
        if not self.comms.rank:
            for server, _ in self.servers:
                for work in self.mail.ask(server, Header(BEGIN, version, updates)):
                    work.wait()
                self.mail.answer_of(server, self._arriving[0])
        dist.barrier()
        self._before = updates - version
        self.fence(version)

    def fence(self, version: int, end: bool = False) -> None:
        """Wait until so many updates are made, and take the weights. end: the run ends with them."""
        asked = []
        for number, (server, _) in enumerate(self.servers):
            self.mail.expect(server, self._arriving[number])
            asked.append(self.mail.ask(server, Header(FENCE, version, end)))
        head = self._pull(asked)
        self.stop_before = head.c

    def done(self) -> None:
        works = []
        for server, _ in self.servers:
            works += self.mail.ask(server, Header(DONE))
        for work in works:
            work.wait()

    # -- state

    def _pieces(self, unit: str, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """(rank of a server, start and stop in its range, first element) of elements of a unit."""
        found = []
        for server, segments in self.servers:
            for segment in segments:
                a, b = max(start, segment.start), min(stop, segment.stop)
                if segment.unit == unit and a < b:
                    shift = segment.at - segment.start
                    found.append((server, a + shift, b + shift, a))
        return found

    def read(self, unit: str, kind: int, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self._wide)
        for server, first, last, at in self._pieces(unit, start, stop):
            into = out[at - start : at - start + last - first]
            self.mail.expect(server, into)
            for work in self.mail.ask(server, Header(GET, kind, first, last)):
                work.wait()
            self.mail.answer_of(server, into)
        return out

    def write(self, unit: str, kind: int, start: int, values: Tensor) -> None:
        for server, first, last, at in self._pieces(unit, start, start + len(values)):
            part = values[at - start : at - start + last - first].to(self._wide).contiguous()
            for work in self.mail.ask(server, Header(PUT, kind, first, elements=len(part)), part):
                work.wait()

    def commit(self) -> None:
        """No-op: nothing is on disk."""

    def owned(self) -> list[Tensor]:
        return self._kept

    def on_host(self) -> list[Tensor]:
        return []

    def buffers_on_host(self) -> list[Tensor]:
        """What gradients leave from and weights arrive in, here and at the server in this process."""
        return self._buffers
