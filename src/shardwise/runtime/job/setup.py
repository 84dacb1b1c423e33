"""From a layout to this rank's place in it: process groups, and its share of the sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.decoder import Batch
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DATA, KV, PP, REPLICATE, SHARD, TP
from shardwise.model import ModelConfig
from shardwise.runtime.job.pulse import Pulse
from shardwise.runtime.transport.comms import Comms

AXES = (DATA, SHARD, REPLICATE, TP, KV, PP, DATA + PP, SHARD + TP + PP)
"""Every group over which the runtime communicates."""


def make_comms(
    layout: Layout,
    model: ModelConfig,
    rank: int,
    *,
    timeout: float,
    overlap: bool = True,
    transport: str = "auto",
    pulse: Pulse | None = None,
) -> Comms:
    """The process groups of `rank`; every rank of the job must call this. timeout: seconds.

    transport: one of `config.TRANSPORTS`. Raises `UserError` when it is "shared" and memory cannot be shared here.
    """
    mesh = Mesh.of(layout, model)
    if transport != "gloo" and dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        try:
            return Comms(mesh, rank, AXES, timeout=timeout, overlap=overlap, shared=True, pulse=pulse)
        except OSError as error:
            if transport == "shared":
                raise UserError(f"no shared memory: {error}; choose --transport gloo") from None
            if rank == 0:
                print(f"no shared memory: {error}; continuing over gloo", flush=True)
    comms = Comms(mesh, rank, AXES, timeout=timeout, overlap=overlap, pulse=pulse)
    if dist.get_backend() == "gloo" and dist.get_world_size() == 1:
        comms.backend = "shared"  # one rank communicates with nobody, so it needs no buffers for gloo
    return comms


def stream_view(batch: Batch, layout: Layout, tp_rank: int) -> Batch:
    """Under sequence parallelism the residual stream holds only this rank's slice of each sequence."""
    if not layout.sp:
        return batch

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(layout.tp, 1)[tp_rank].clone()

    return replace(batch, stream_positions=mine(batch.positions), stream_index=mine(batch.index))
