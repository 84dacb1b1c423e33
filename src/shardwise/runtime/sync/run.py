"""A rank's part in a run with parameter servers: of a worker, and of a server on a rank of its own.

Workers go their own ways between two boundaries, the steps after which there is something to validate, save or report.
There all of them wait until the updates of every step before it are made, and take the weights: what is validated and
saved does not depend on which of them was slow.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import Checkpoint
from shardwise.decoder import Batch
from shardwise.layout import unit_plan
from shardwise.layout.axes import REPLICA
from shardwise.layout.key_ranges import server_of, server_rank
from shardwise.layout.sync import policy_of
from shardwise.layout.units import UnitPlan
from shardwise.report.rank_timelines import Recorded
from shardwise.report.step_report import Bytes, Role
from shardwise.runtime.checkpointing import Position
from shardwise.runtime.job import pulse
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.trainer import TrainingRun
from shardwise.runtime.offload.file import Kept
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.sync.messages import ServerMail
from shardwise.runtime.sync.server import Server
from shardwise.runtime.sync.worker import RemoteOptimizer
from shardwise.runtime.zero.flat_unit import Values

REPORTED = 3
"""Steps from the one that is measured to where its report is gathered: a worker measures its first, times another."""


def make_server(
    plan: UnitPlan, mail: ServerMail, values: Values, config: OptimizerConfig, steps: int, stops: bool = True
) -> Server | None:
    """The server in this process, if there is one; all ranks call this together. steps, stops: as of `Server`."""
    layout = plan.layout
    servers = [server_rank(plan, server) for server in range(layout.parameter_servers.count)]
    peers = dist.new_group(servers, backend="gloo") if len(servers) > 1 and not layout.asynchronous else None
    place = server_of(plan, mail.rank)
    if place is None:
        return None
    plans = [unit_plan(plan.model, layout, plan.workload, rank=rank, backend=plan.backend) for rank in range(layout.tp)]
    server = Server(plans, place, policy_of(layout), mail, values, config, steps, peers, stops)
    server.start()
    return server


class ServedRun(TrainingRun):
    """What workers and servers of their own have in common."""

    mail: ServerMail
    server: Server | None

    def _make_server(self, plan: UnitPlan) -> None:
        config = self.config
        self.mail = ServerMail(config.hang + pulse.MARGIN)
        stops = config.on_nonfinite == "stop"
        steps = config.schedule_steps or config.steps
        self.server = make_server(plan, self.mail, self._initial_values, config.optimizer, steps, stops)

    def _stops_at(self, step: int, loss: float, norm: float) -> bool:
        self.skips = self.program.optimizer.skips
        return False

    @property
    def _shares(self) -> int:
        return self.config.layout.dp if self.config.layout.asynchronous else 1

    def _boundaries(self, start: int, measured: int) -> Iterator[int]:
        # Every worker measures the first step that it makes after a boundary: there it has one.
        reported = (measured, min(measured + REPORTED, self.config.steps)) if measured >= 0 else ()
        return iter(sorted({*super()._boundaries(start, measured), *(at for at in reported if at > start)}))

    def _measured(self, role: Role, recorded: Recorded | None) -> None:
        self._ready = (role, recorded)

    def _judge(self, skips: int) -> None:
        if skips and self.config.on_nonfinite == "stop":
            what = "an update that was not finite" if skips == 1 else f"{skips} updates that were not finite"
            self.diverged = f"up to step {self.at.step}: the servers left out {what}"

    def _meet(self, boundary: int, measured: int, stopped: bool) -> None:
        self._gather_records()
        if measured >= 0 and not stopped and boundary == min(measured + REPORTED, self.config.steps):
            if self.role is not None:
                self._ready, self.role = (self.role, None), None
            self.roles = self._gather(*self._ready)

    def _gather_records(self) -> None:
        """Append what the servers have recorded since the last time to the run directory."""
        self.pulse.collective("the gather of the servers' records")
        self.pulse.wait()
        dist.barrier()  # every worker has its answers: no gradient is on its way
        parts = self._on_rank_0(self.server.record.fresh() if self.server is not None else None)
        self.pulse.work()
        if not self.record:
            return
        plan, directory = self.program.plan, self.record.directory
        for rank, part in (parts or {}).items():
            if part is not None:
                line = {"server": server_of(plan, rank), "step": self.at.step, **part}
                self._tried(partial(directory.append_updates, line))


class WorkerRun(ServedRun):
    """A worker's rank, and the server in its process if there is one."""

    _spent = 0.0
    """Of all its steps."""

    def _program(self, plan: UnitPlan, folder: Path, kept: Kept | None) -> TrainProgram:
        self._make_server(plan)
        make = partial(RemoteOptimizer, config=self.config.optimizer, mail=self.mail, server=self.server)
        return TrainProgram(plan, self.comms, make, self._initial_values, self.device, folder, kept)

    @property
    def optimizer(self) -> RemoteOptimizer:
        optimizer = self.program.optimizer
        assert isinstance(optimizer, RemoteOptimizer)
        return optimizer

    def _begin(self) -> None:
        version = self.at.step * self._shares
        self.optimizer.begin(version, self.at.optimizer_steps)
        self.began = self.at
        self._next = version + (self.comms.index(REPLICA) if self._shares > 1 else 0)

    def _train_to(self, boundary: int, measured: int, loss: float) -> tuple[float, bool]:
        optimizer, fresh = self.optimizer, self.at.step == measured
        stopped = False
        while not stopped and self._next // self._shares < boundary:
            optimizer.stops = self.stop.noted
            loss = self._observed(self._next // self._shares, measure=fresh)
            self._next, fresh = optimizer.next, False
            stopped = bool(optimizer.stop_before) and self._next // self._shares >= optimizer.stop_before
        end = optimizer.stop_before if stopped else boundary
        optimizer.fence(end * self._shares, end=stopped or end == self.config.steps)
        self.at = self._position(end)
        self._meet(boundary, measured, stopped)
        self._judge(optimizer.skips)
        return loss, stopped

    def _position(self, step: int) -> Position:
        seen = (step - self.began.step) * self.config.workload.batch
        return Position(step, self.began.samples + seen, self.optimizer.steps)

    def _number(self, step: int) -> int:
        return self._next

    def _micro_batches(self, step: int, key: int) -> list[tuple[Batch, Tensor]]:
        self.optimizer.begin_gradient(self._next)
        first = self._position(step).samples
        place = self._next % self._shares if self._shares > 1 else None
        return self.batches["train"].step(first, self.config.workload.batch, key, place)

    def _step(self, step: int, around: Any) -> tuple[float, float]:
        started = time.perf_counter()
        _, norm = super()._step(step, around)
        self._spent += time.perf_counter() - started
        return self.optimizer.loss, norm

    def _rate(self, seconds: float) -> float:
        # From one of its shares of the text to the next the others have had those between.
        return super()._rate(seconds) * (self.optimizer.next - self.optimizer.step_number) / self._shares

    def _typical_rate(self, seconds: float) -> float:
        """Over the whole run: from one of its steps to the next a worker sees more or fewer updates of others."""
        return super()._rate(self._spent) * (self.at.step - self.began.step)

    def _end(self) -> None:
        self.optimizer.done()
        if self.server is not None:
            self.server.join()


class _NoProgram:
    """What a run needs of the program of a rank that computes nothing."""

    compile_seconds = 0.0
    outer = None

    def __init__(self, plan: UnitPlan, comms: Any) -> None:
        self.plan, self.comms, self.optimizer = plan, comms, self
        self.states: list[Any] = []
        self.steps = 0

    def close(self, remove: bool = False) -> None:
        """No-op."""


class ServerRun(ServedRun):
    """A server on a rank of its own: it is wherever the workers meet, and serves meanwhile."""

    def _program(self, plan: UnitPlan, folder: Path, kept: Kept | None) -> TrainProgram:
        self._make_server(plan)
        return _NoProgram(plan, self.comms)  # type: ignore[return-value]

    def _open_corpus(self, plan: UnitPlan) -> None:
        self.entropy = math.nan

    def _restored(self, checkpoint: Path) -> Position:
        manifest = Checkpoint.open(checkpoint).manifest
        return Position(manifest.step, manifest.samples, manifest.optimizer_steps)

    def start_from_weights(self) -> None:
        """No-op: workers hand them over."""

    def _begin(self) -> None:
        self.began = self.at
        self.pulse.wait("the barrier before the run begins")
        dist.barrier()
        self.pulse.work()

    trains = False

    def _validate(self, step: int) -> float:
        return math.nan

    def _train_to(self, boundary: int, measured: int, loss: float) -> tuple[float, bool]:
        assert self.server is not None
        version = boundary * self._shares
        while not self.server.wait(version):
            self.pulse.wait("what workers push")
        end = version if self.server.end is None else min(version, self.server.end)
        self.at = Position(end // self._shares, 0, self.server.updates)
        stopped = end < version
        self._measured(self._role(), None)
        self._meet(boundary, measured, stopped)
        self._judge(self.server.skips)
        return loss, stopped

    def _role(self) -> Role:
        assert self.server is not None
        kept = sum(each.nbytes for own in self.server.ranges for each in own.state)
        buffers = sum(each.nbytes for each in self.server.buffers)
        return Role(f"rank {self.rank}", (self.rank,), Bytes.of(kept + buffers, optimizer=kept, comm=buffers), ())

    def _end(self) -> None:
        assert self.server is not None
        self.server.join()
