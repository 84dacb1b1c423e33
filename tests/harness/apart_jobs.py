"""What ranks run for the tests of packed outer gradients."""

from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from harness.apart import Apart
from harness.jobs import build, micro_batches
from harness.quantized_jobs import Account, numbers
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import REPLICA
from shardwise.layout.outer import outer_pieces, outer_residuals
from shardwise.model import ModelConfig
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.sync.outer_step import PackedExchange, Rounds


@dataclass(frozen=True)
class Exchanged:
    model: ModelConfig
    layout: Layout
    unit: str


def exchanged(rank: int, asked: Exchanged) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum over the replicas, this rank's errors of its own numbers, the mean error)."""
    plan = unit_plan(asked.model, asked.layout, Workload(8, asked.layout.dp), rank=rank)
    comms = make_comms(asked.layout, asked.model, rank, timeout=60.0)
    unit = plan.by_name[asked.unit]
    pieces = outer_pieces(plan, unit, comms.index(unit.sharded_over))
    assert pieces is not None
    exchange = PackedExchange(unit.name, pieces, outer_residuals(plan, unit), comms, torch.device("cpu"))
    summed = numbers(rank, unit.shard_numel)
    exchange.sum(summed)
    error = exchange.mean_error()
    dist.barrier()
    comms.close()
    return summed, exchange.first, error


def accounted(rank: int, asked: Apart) -> list[Account]:
    """As `quantized_jobs.accounted`, over all outer steps."""
    case, layout = asked.case, asked.layout
    program = build(case, layout, rank, transport=asked.transport)
    true: dict[PackedExchange, Tensor] = {}
    sent: dict[PackedExchange, Tensor] = {}
    plain = PackedExchange.sum

    def watched(self: PackedExchange, tensor: Tensor) -> None:
        true[self] = true.get(self, 0) + tensor.double()
        plain(self, tensor)
        sent[self] = sent.get(self, 0) + tensor.double()

    rounds = Rounds.of(layout, case.steps)
    with patch.object(PackedExchange, "sum", watched):
        for step in range(case.steps):
            program.step(micro_batches(case, layout, rank, step), case.optimizer.lr, rounds.ends(step))
    found = []
    assert program.outer is not None
    for name, unit in program.outer.units.items():
        if (packed := unit.packed) is None:
            continue
        total, left = true[packed], packed.mean_error().double() * program.outer.replicas
        program.comms.all_reduce(total, REPLICA, name)
        apart = total - sent[packed] - left
        found.append(Account(name, *(float(each.abs().max()) for each in (apart, left, total))))
    dist.barrier()
    program.comms.close()
    return found
