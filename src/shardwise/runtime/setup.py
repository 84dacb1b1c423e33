"""From a layout to this rank's place in it: process groups, and its share of the sequence."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.decoder import Batch
from shardwise.layout import Grid, Layout
from shardwise.model import ModelConfig
from shardwise.runtime.comms import Comms
from shardwise.runtime.job.pulse import Pulse

AXES = ("data", "shard", "replicate", "tp", "kv", "shard_tp")
"""Every group over which the runtime communicates."""


def make_comms(
    layout: Layout, model: ModelConfig, rank: int, *, timeout: float, overlap: bool = True, pulse: Pulse | None = None
) -> Comms:
    """The process groups of `rank`; every rank of the job must call this. timeout: seconds."""
    return Comms(Grid.of(layout, model), rank, AXES, timeout=timeout, overlap=overlap, pulse=pulse)


def stream_view(batch: Batch, layout: Layout, tp_rank: int) -> Batch:
    """Under sequence parallelism the residual stream holds only this rank's slice of each sequence."""
    if not layout.sp:
        return batch

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(layout.tp, 1)[tp_rank].clone()

    return replace(batch, stream_positions=mine(batch.positions), stream_index=mine(batch.index))
