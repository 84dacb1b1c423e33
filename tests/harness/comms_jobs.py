"""What ranks run for the tests of `Comms`: all-to-alls and messages along axes of both views, each compared in place.

Every rank draws everybody's numbers from one seed, so that it can tell what must reach it.
"""

import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import Axes
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.transport.buffers import ByteCounter, Target
from shardwise.runtime.transport.comms import Comms

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Exchanges:
    """rounds: all-to-alls over each of the axes, with messages along them in between."""

    layout: str
    axes: tuple[Axes, ...]
    shared: bool
    seed: int
    rounds: int


def open_comms(rank: int, job: Exchanges) -> Comms:
    return Comms(Mesh(Layout.parse(job.layout)), rank, job.axes, timeout=60.0, shared=job.shared)


def exchange(rank: int, job: Exchanges) -> tuple[tuple[LedgerRow, ...], int]:
    """The ledger, and the elements that this rank gave away in all-to-alls. Raises where anything else arrived."""
    comms, generator, given = open_comms(rank, job), random.Random(job.seed), 0
    comms.start_recording()
    for number in range(job.rounds):
        comms.quick = number % 2 == 0
        for axes in job.axes:
            given += _all_to_all(comms, axes, generator, number)
            _ring(comms, axes, generator.randrange(1, 3000))
    comms.stop_recording()
    ledger = comms.ledger()
    dist.barrier()  # until then a peer may still read what was sent
    comms.close()
    return ledger, given


def _all_to_all(comms: Comms, axes: Axes, generator: random.Random, number: int) -> int:
    """Rows of several widths in unequal parts, some of them empty, or all."""
    group, mine = comms.mesh.group(axes, comms.rank), comms.index(axes)
    dtype, width = generator.choice(DTYPES), generator.choice([1, 3, 64])
    most = generator.choice([0, 2, 50, 3000])
    everyone = {
        r: [generator.randint(0, most) * generator.randint(0, 1) for _ in group] for r in range(comms.mesh.layout.ranks)
    }
    rows = [everyone[r] for r in group]
    if number == 0:
        rows = [[2] * len(group)] * len(group)
    whole = [_numbers(r, sum(sent), width, dtype) for r, sent in zip(group, rows, strict=True)]
    received = [sent[mine] for sent in rows]
    out = torch.full((sum(received), width), -1, dtype=dtype)
    splits = {} if number == 0 else {"sent": rows[mine], "received": received}
    pending = comms.all_to_all(out, whole[mine], axes, "exchange", later=number % 2 == 1, **splits)
    deadline = time.monotonic() + 30
    while not pending.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pending.is_completed()
    pending.wait()
    expected = torch.cat([x.split(sent)[mine] for x, sent in zip(whole, rows, strict=True)])
    assert torch.equal(out, expected), f"{dtype}, {rows}"
    return whole[mine].numel()


def _ring(comms: Comms, axes: Axes, elements: int) -> None:
    """To the next rank along the axes, from the one before, twice, with an all-to-all between posting and waiting."""
    ranks, mine = comms.size(axes), comms.index(axes)
    group = comms.mesh.group(axes, comms.rank)
    before, after = (mine - 1) % ranks, (mine + 1) % ranks
    outs = [torch.zeros(elements) for _ in range(2)]
    arriving = [comms.receive(out, axes, before, "ring") for out in outs]
    leaving = [
        comms.send(_numbers(group[mine] + i, elements, 1, torch.float32).view(-1), axes, after, "ring")
        for i in range(2)
    ]
    own, others = torch.full((ranks,), float(mine)), torch.empty(ranks)
    comms.all_to_all(others, own, axes, "between")
    assert others.tolist() == list(range(ranks))
    for pending in reversed(arriving):
        pending.wait()
    for i, out in enumerate(outs):
        assert torch.equal(out, _numbers(group[before] + i, elements, 1, torch.float32).view(-1))
    for sent in leaving:
        sent.wait()


def _numbers(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (rows, width), generator=generator).to(dtype)


def objections(rank: int, job: Exchanges) -> list[str]:
    """What is said of rows that do not fit, by every rank and before anything moves; one rank alone has its own."""
    comms, x, axes = open_comms(rank, job), torch.arange(8.0), job.axes[0]
    said = []
    for out, splits in (
        (torch.empty(8), {"sent": [8], "received": [8]}),
        (torch.empty(8), {"sent": [9, -1], "received": [9, -1]}),
        (torch.empty(7), {}),
        (torch.empty(8, dtype=torch.float64), {}),
    ):
        try:
            comms.all_to_all(out, x, axes, "wrong", **splits)
        except ValueError as error:
            said.append(str(error))
    alone = torch.empty(8)
    comms.all_to_all(alone, x, job.axes[1], "alone")
    assert torch.equal(alone, x)
    comms.close()
    return said


def unreserved(rank: int, job: Exchanges) -> list[float]:
    """Sums over reduce-scatters that fit what was reserved, and of another dtype or size."""
    comms, axes, sums = open_comms(rank, job), job.axes[0], []
    reserved = comms.reserve(8, torch.float32, torch.device("cpu"), axes, ByteCounter())
    assert bool(reserved) != job.shared
    for elements, dtype in ((8, torch.float32), (4, torch.float32), (16, torch.float32), (8, torch.float64)):
        full, piece = torch.full((elements,), rank + 1.0, dtype=dtype), torch.zeros(elements // 2, dtype=dtype)
        comms.reduce_scatter(full, axes, "sum", lambda piece=piece: Target(piece))
        assert (piece == piece[0]).all()
        sums.append(float(piece[0]))
    dist.barrier()
    comms.close()
    return sums
