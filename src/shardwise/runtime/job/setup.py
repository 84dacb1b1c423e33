"""From a layout to this rank's place in it: process groups, and its share of the sequence."""

import os
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import (
    CP,
    DATA,
    EDP,
    EP,
    EP_ACROSS,
    ETP,
    HPZ,
    HPZ_ACROSS,
    KV,
    PP,
    REPLICA,
    REPLICATE,
    SHARD,
    STAGE,
    TP,
    Axes,
)
from shardwise.layout.context import cuts_sequences
from shardwise.layout.units import UnitPlan
from shardwise.model.parameters import Model, blueprint
from shardwise.runtime.context.view import cut_sequences
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.staged import StagedTransport

AXES = (
    CP, DATA, SHARD, HPZ, HPZ_ACROSS, REPLICATE, TP, KV, PP, DATA + PP, CP + TP, SHARD + TP, SHARD + TP + PP, REPLICA
)  # fmt: skip
"""Every group over which the runtime communicates."""
OF_EXPERTS = (EP, EDP, STAGE, STAGE + PP, EP_ACROSS, EP + ETP)
"""The groups of models with experts besides."""


def axes_of(model: Model | None) -> tuple[Axes, ...]:
    return AXES + (OF_EXPERTS if model and blueprint(model).routes else ())


def make_comms(
    layout: Layout, model: Model | None, rank: int, *, transport: str = "auto",
    axes: tuple[Axes, ...] | None = None, quiet: bool = False, device: torch.device | None = None, **options: Any,
) -> Comms:  # fmt: skip
    """The process groups of `rank`; every rank of the job must call this. model: None where no heads are split.

    transport: one of `config.TRANSPORTS`. quiet: do not say that no memory can be shared. device: where tensors are; a
    CUDA device under gloo is one that ranks share. options: of `Comms`, `timeout` at least. Raises `UserError` when the
    transport is "shared" and memory cannot be shared here.
    """
    mesh = Mesh.of(layout, model) if model else Mesh(layout)
    axes = axes_of(model) if axes is None else axes
    if rank >= layout.training_ranks:
        axes = ()  # a server of its own computes nothing
    if device is not None and device.type == "cuda" and dist.get_backend() == "gloo":
        options.setdefault("staged", StagedTransport)
    if transport != "gloo" and dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        try:
            return Comms(mesh, rank, axes, shared=True, **options)
        except OSError as error:
            if transport == "shared":
                raise UserError(f"no shared memory: {error}; choose --transport gloo") from None
            if rank == 0 and not quiet:
                print(f"no shared memory: {error}; continuing over gloo", flush=True)
    comms = Comms(mesh, rank, axes, **options)
    if comms.backend == "gloo" and dist.get_world_size() == 1:
        comms.backend = "shared"  # one rank communicates with nobody, so it needs no buffers for gloo
    return comms


def blank_batch(plan: UnitPlan, device: torch.device | None = None) -> tuple[Batch, Tensor]:
    """A micro-batch of zeros and its targets, as one of this rank's."""

    def vector() -> Tensor:
        return torch.zeros(plan.layout.micro, plan.workload.seq, dtype=torch.int64, device=device)

    positions, index = vector(), vector()
    documents = vector() if plan.workload.isolate_documents else None
    return local_view(Batch(vector(), positions, index, documents, positions, index, 0), vector(), plan)


def local_view(batch: Batch, targets: Tensor, plan: UnitPlan) -> tuple[Batch, Tensor]:
    """A rank's tokens of whole sequences, and their targets [B, S], which were shifted before.

    Context parallelism cuts sequences; under sequence parallelism the residual stream has a slice of what is left.
    """
    if cuts_sequences(plan.layout):
        batch, targets = cut_sequences(batch, targets, plan.sequence, plan.cp_rank)
    if not plan.layout.sp:
        return batch, targets

    def mine(x: Tensor) -> Tensor:
        return x.chunk(plan.layout.tp, 1)[plan.tp_rank].clone()

    return replace(batch, stream_positions=mine(batch.positions), stream_index=mine(batch.index)), targets


WARNINGS = (".*there was no current CUDA context", "TensorFloat32 tensor cores")
"""What torch warns of, and users cannot change: autograd's thread makes its context with its first product, and fp32 is
computed in fp32 because `--matmul` says so."""


def cuda_device(local: int) -> torch.device:
    """Device of the `local`-th rank of this host: ranks take the host's devices in turn. It is made the current one.

    Raises `UserError` where there is none.
    """
    count = torch.cuda.device_count()
    if not count:
        raise UserError("--device cuda needs a GPU, and there is none")
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return device


def sharing(device: torch.device) -> str:
    """What to say where this host has more ranks than CUDA devices (LOCAL_WORLD_SIZE); empty where no rank shares one.

    Without LOCAL_WORLD_SIZE all ranks are of this host.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    if device.type != "cuda" or ranks <= torch.cuda.device_count():
        return ""
    count = torch.cuda.device_count()
    devices = f"{count} GPU{'s' if count > 1 else ''}"
    return f"{ranks} ranks share {devices}: collectives go through host memory, which is slow and meant for tests"
