"""What ranks run for the tests of quantized communication: weights that are rounded before a plain gather, and sums of
packed gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from harness.jobs import RankOutcome, Training, build, micro_batches, train
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.gradients import residuals
from shardwise.layout.transport_buffers import transport_buffers
from shardwise.layout.unit import WEIGHT_BITS, Gather, Unit
from shardwise.layout.units import UnitPlan
from shardwise.layout.wire import packed_bytes
from shardwise.model import ModelConfig
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.transport.buffers import ByteCounter, Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import Work
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.flat_unit import FlatUnit
from shardwise.runtime.zero.packed_sum import PackedSum, Residuals
from shardwise.runtime.zero.quantized import pack, unpack


def rounded(rank: int, asked: Training) -> RankOutcome:
    """Train with every gathered weight rounded as qwz rounds it, and gathered in compute precision."""

    def start(engine: Engine, gather: Gather) -> Work:
        flat = engine.units[gather.unit]
        piece = torch.zeros(flat.unit.shard_numel, dtype=flat.whole.dtype)
        if flat.unit.shard_ranks > 1:
            for part in _alike(flat):
                packed = torch.zeros(packed_bytes(part.stop - part.start, WEIGHT_BITS), dtype=torch.uint8)
                pack(flat.interval[part], WEIGHT_BITS, packed)
                unpack(packed, WEIGHT_BITS, piece[part])
        else:
            piece.copy_(flat.interval)
        return engine.comms.all_gather(flat.whole, piece, gather.axes, gather.unit, later=True)

    with patch.object(Engine, "_start", start):
        return train(rank, asked)


def _alike(flat: FlatUnit) -> Iterator[slice]:
    """Elements of a rank's interval in blocks of their own: neighbors that as many tensor-parallel ranks have."""
    parameters = zip(flat.unit.offsets, flat.unit.placed, strict=True)
    for _, run in groupby(parameters, key=lambda each: each[1].replicas):
        together = list(run)
        first, last = together[0][0], together[-1][0] + together[-1][1].numel
        if max(first, flat.start) < min(last, flat.stop):
            yield slice(max(first - flat.start, 0), min(last, flat.stop) - flat.start)


@dataclass(frozen=True)
class Summed:
    """A unit whose gradients are summed in 4 bits. seed: of the numbers, which differ by rank; adds: there is a sum of
    earlier micro-batches; steps: sums one after the other, under error feedback."""

    model: ModelConfig
    layout: Layout
    unit: str
    seed: int
    adds: bool
    steps: int = 1


def numbers(seed: int, elements: int) -> Tensor:
    """What one rank adds: of magnitudes from block to block."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.rand(elements // 300 + 1, generator=generator).repeat_interleave(300)[:elements]
    return torch.randn(elements, generator=generator) * 10 ** (6 * magnitudes - 3)


def _unit(rank: int, asked: Summed) -> tuple[Comms, UnitPlan, Unit, Tensor]:
    plan = unit_plan(asked.model, asked.layout, Workload(8, asked.layout.dp), rank=rank)
    unit = plan.by_name[asked.unit]
    room = torch.empty(transport_buffers(plan).room(plan, unit), dtype=torch.uint8)
    return make_comms(asked.layout, asked.model, rank, timeout=60.0), plan, unit, room


def packed_sum(rank: int, asked: Summed) -> tuple[Tensor, tuple[LedgerRow, ...]]:
    comms, _, unit, room = _unit(rank, asked)
    into = torch.full((unit.shard_numel,), 7.0)
    comms.start_recording()
    target = Target(into, asked.adds)
    PackedSum(comms, unit, numbers(asked.seed * 100 + rank, unit.padded), room, lambda: target, lambda: None).wait()
    comms.stop_recording()
    dist.barrier()
    comms.close()
    return into, comms.ledger()


@dataclass
class FedBack:
    """One rank's part of sums with error feedback: its interval of each step's sum, its residuals after the last one,
    and their sum over the ranks on its interval."""

    sums: list[Tensor]
    first: Tensor
    second: Tensor
    folded: Tensor


def fed_back(rank: int, asked: Summed) -> FedBack:
    """Several sums of one unit, each with the errors of the one before."""
    comms, plan, unit, room = _unit(rank, asked)
    errors = Residuals(unit, residuals(plan, unit), torch.device("cpu"), ByteCounter())
    sums = []
    for step in range(asked.steps):
        target = Target(torch.zeros(unit.shard_numel))
        full = numbers((asked.seed + step) * 100 + rank, unit.padded)
        PackedSum(comms, unit, full, room, lambda target=target: target, lambda: None, errors).wait()
        sums.append(target.tensor)
    folded = errors.folded(comms)
    dist.barrier()
    comms.close()
    return FedBack(sums, errors.first, errors.second, folded)


@dataclass
class Account:
    """Of each unit, this rank's interval: |true sum - sent sum - residuals| over all steps, the largest element; and
    the largest residual, and the largest element of the true sum."""

    unit: str
    apart: float
    residual: float
    true: float


def accounted(rank: int, asked: Training) -> list[Account]:
    """Train, and account for every packed gradient of every micro-batch: what went in, what came out, what is left."""
    case, layout = asked.case, asked.layout
    program = build(case, layout, rank, transport=asked.transport)
    true: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    begin, finish = PackedSum.__init__, PackedSum.wait

    def init(self: PackedSum, comms: Comms, unit: Unit, full: Tensor, *rest: Any) -> None:
        true[unit.name] = true.get(unit.name, 0) + full.double()
        begin(self, comms, unit, full, *rest)

    def wait(self: PackedSum) -> None:
        if self._work is None:
            return
        into, own = self._into, torch.zeros(self._unit.shard_numel)
        self._into = lambda: Target(own)
        finish(self)
        sent[self._unit.name] = sent.get(self._unit.name, 0) + own.double()
        target = into()
        target.tensor.copy_(target.tensor + own if target.adds else own)

    with patch.object(PackedSum, "__init__", init), patch.object(PackedSum, "wait", wait):
        for step in range(case.steps):
            program.step(micro_batches(case, layout, rank, step), case.optimizer.lr)
    found = []
    for name, flat in program.engine.units.items():
        if flat.residuals is None:
            continue
        folded = flat.residuals.folded(program.comms).double()
        program.comms.all_reduce(true[name], flat.unit.sharded_over, name)
        total = torch.stack([true[name][flat.start : flat.stop], sent[name]])
        program.comms.all_reduce(total.view(-1), flat.unit.replicate, name)
        apart = total[0] - total[1] - folded
        found.append(Account(name, *(float(each.abs().max()) for each in (apart, folded, total[0]))))
    dist.barrier()
    program.comms.close()
    return found


def evaluated(rank: int, asked: Training) -> list[float]:
    case, losses = asked.case, []
    program = build(case, asked.layout, rank)
    for step in range(case.steps):
        batches = micro_batches(case, asked.layout, rank, step)
        program.step(batches, case.optimizer.lr)
        losses.append(program.evaluate(*batches[0])[0])
    dist.barrier()
    program.comms.close()
    return losses
