"""What ranks run for the tests of quantized communication: weights that are rounded before a plain gather, and sums of
packed gradients."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from harness.jobs import RankOutcome, Training, build, micro_batches, train
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.units import WEIGHT_BITS, Gather
from shardwise.layout.wire import packed_bytes
from shardwise.model import ModelConfig
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.transport.protocol import Work
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.packed_sum import PackedSum
from shardwise.runtime.zero.quantized import pack, unpack


def rounded(rank: int, asked: Training) -> RankOutcome:
    """Train with every gathered weight rounded as qwz rounds it, and gathered in compute precision."""

    def start(engine: Engine, gather: Gather) -> Work:
        flat = engine.units[gather.unit]
        piece = torch.empty(flat.unit.shard_numel, dtype=flat.whole.dtype)
        if flat.unit.shard_ranks > 1:
            packed = torch.zeros(packed_bytes(len(piece), WEIGHT_BITS), dtype=torch.uint8)
            pack(flat.interval, WEIGHT_BITS, packed)
            unpack(packed, WEIGHT_BITS, piece)
        else:
            piece.copy_(flat.interval)
        return engine.comms.all_gather(flat.whole, piece, gather.axes, gather.unit, later=True)

    with patch.object(Engine, "_start", start):
        return train(rank, asked)


@dataclass(frozen=True)
class Summed:
    """A unit whose gradients are summed in 4 bits. seed: of the numbers, which differ by rank; adds: there is a sum of
    earlier micro-batches."""

    model: ModelConfig
    layout: Layout
    unit: str
    seed: int
    adds: bool


def numbers(asked: Summed, rank: int, elements: int) -> Tensor:
    """What one rank adds: of magnitudes from block to block."""
    generator = torch.Generator().manual_seed(asked.seed * 100 + rank)
    magnitudes = torch.rand(elements // 300 + 1, generator=generator).repeat_interleave(300)[:elements]
    return torch.randn(elements, generator=generator) * 10 ** (6 * magnitudes - 3)


def packed_sum(rank: int, asked: Summed) -> tuple[Tensor, tuple[LedgerRow, ...]]:
    """This rank's interval of the sum, and the ledger."""
    plan = unit_plan(asked.model, asked.layout, Workload(8, asked.layout.dp), rank=rank)
    comms = make_comms(asked.layout, asked.model, rank, timeout=60.0)
    unit = plan.by_name[asked.unit]
    room = torch.empty(plan.transport_buffers.room(plan, unit), dtype=torch.uint8)
    into = torch.full((unit.shard_numel,), 7.0)
    comms.start_recording()
    target = Target(into, asked.adds)
    PackedSum(comms, unit, numbers(asked, rank, unit.padded), room, lambda: target, lambda: None).wait()
    comms.stop_recording()
    dist.barrier()
    comms.close()
    return into, comms.ledger()


def evaluated(rank: int, asked: Training) -> list[float]:
    """Losses of a micro-batch after each step."""
    case, losses = asked.case, []
    program = build(case, asked.layout, rank)
    for step in range(case.steps):
        batches = micro_batches(case, asked.layout, rank, step)
        program.step(batches, case.optimizer.lr)
        losses.append(program.evaluate(*batches[0])[0])
    dist.barrier()
    program.comms.close()
    return losses
