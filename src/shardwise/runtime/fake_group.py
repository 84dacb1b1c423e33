"""A process group of any size without peers, and its collectives, which send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.errors import UserError
from shardwise.layout import Mesh
from shardwise.layout.unit import Backend
from shardwise.layout.units import UnitPlan
from shardwise.runtime.job.setup import axes_of
from shardwise.runtime.torch_versions import know_fake_collectives
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.process_group import ProcessGroupTransport
from shardwise.runtime.transport.protocol import DONE


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """A process group of so many ranks without peers. Raises `UserError` inside a job."""
    if dist.is_initialized():
        raise UserError(
            "a process of a job cannot trace: do it before torch.distributed.init_process_group, or in another process"
        )
    know_fake_collectives()
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_comms(plan: UnitPlan, rank: int = 0) -> Comms:
    """The process groups of `rank` inside `fake_ranks`, which send nothing."""
    mesh, connect = Mesh.of(plan.layout, plan.subject), fake_transport(plan.backend)
    comms = Comms(mesh, rank, axes_of(plan.subject), timeout=60.0, backend=plan.backend, connect=connect)
    comms.read = lambda scalar: 1.0  # type: ignore[method-assign]  # fake tensors hold no numbers
    comms.reachable = lambda tensor: tensor  # type: ignore[method-assign]  # they are the host's under any backend
    return comms


def fake_transport(backend: Backend) -> Any:
    """Factory of a group's transport, with the memory that a backend needs but without peers."""

    class Shared(ProcessGroupTransport):
        """Ranks that read each other's memory. A message is handed over as soon as it is sent, which fake collectives
        do not tell."""

        def send(self, tensor: Any, peer: int) -> Any:
            return DONE

        def receive(self, out: Any, peer: int) -> Any:
            return DONE

        def _unsummed(self, own: Any) -> Any:
            return [own] * len(self.ranks)

    kind = Shared if backend == "shared" else ProcessGroupTransport
    return lambda group, ranks: kind(group, ranks, backend)
