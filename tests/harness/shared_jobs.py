"""What ranks do in the tests of shared memory."""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from harness.space import MODELS
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.axes import DATA
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.transport.mail import AREA, Mail
from shardwise.runtime.transport.shared import MESSAGES, TWO_SHOT_FROM, SharedTransport
from shardwise.runtime.transport.shared_collective import SLOTS
from shardwise.schedule import build

TIMEOUT = 20.0


def _world() -> SharedTransport:
    assert dist.group.WORLD is not None
    return SharedTransport(dist.group.WORLD, TIMEOUT)


def _collectives(transport: SharedTransport, generator: random.Random) -> None:
    """One of several collectives, small or large; the same one on every rank."""
    n = generator.choice((1, 1000, 300_000))
    kind = generator.randrange(5)
    x = torch.full((n * transport.ranks,), 1.0)
    if kind == 0:
        transport.all_reduce(x).wait()
        assert (x == transport.ranks).all()
    elif kind == 1:
        transport.all_gather(x, torch.full((n,), 1.0)).wait()
    elif kind == 2:
        piece = torch.empty(n)
        transport.reduce_scatter(x, lambda: Target(piece)).wait()
        assert (piece == transport.ranks).all()
    elif kind == 3:
        transport.quick.all_gather(x, torch.full((n,), 1.0))
        assert (x == 1).all()
    else:
        transport.run(build("all-reduce", generator.choice(("ring", "recursive-doubling", "tree")), transport.ranks), x)
        assert (x == transport.ranks).all()


def quick(rank: int, payload: tuple[int, int]) -> list[Tensor]:
    """So many small sums, maxima and gathers, some between the start and the end of others; returns what came out."""
    number, count = payload
    transport, generator = _world(), random.Random(number)
    draw = torch.Generator().manual_seed(1000 * number + rank)
    found: list[Tensor] = []
    for _ in range(count):
        dtype = generator.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64))
        n, kind, late = generator.choice((1, 3, 1000, 40_000)), generator.randrange(3), generator.random() < 0.3
        x = (torch.randn(n, generator=draw) * 1000).to(dtype)
        slow = transport.all_reduce(transport.empty(n, torch.float32).fill_(1.0)) if late else None
        if kind < 2 and x.nbytes <= AREA:
            transport.quick.all_reduce(x, maximum=kind == 1)
        else:
            out = torch.empty(transport.ranks, n, dtype=dtype)
            transport.quick.all_gather(out, x)
            x = out
        if slow is not None:
            slow.wait()
        found.append(x)
        if generator.random() < 0.1:
            time.sleep(generator.random() * 0.002 * rank)  # one runs ahead, as far as it can
    return found


def quick_alone(ranks: int, payload: tuple[int, int]) -> list[Tensor]:
    """What `quick` must give, with sums in the order of the ranks."""
    number, count = payload
    generator = random.Random(number)
    draws = [torch.Generator().manual_seed(1000 * number + rank) for rank in range(ranks)]
    found: list[Tensor] = []
    for _ in range(count):
        dtype = generator.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64))
        n, kind = generator.choice((1, 3, 1000, 40_000)), generator.randrange(3)
        generator.random()
        every = [(torch.randn(n, generator=draw) * 1000).to(dtype) for draw in draws]
        if kind < 2 and (ranks - 1) * n * dtype.itemsize < TWO_SHOT_FROM:
            found.append(reduce(torch.maximum if kind else torch.add, every))
        else:
            found.append(torch.stack(every))
        if generator.random() < 0.1:
            generator.random()
    return found


def pieces(rank: int, ranks: int, elements: int) -> Tensor:
    return torch.randn(ranks * elements, generator=torch.Generator().manual_seed(rank))


def summed(rank: int, elements: int) -> Tensor:
    transport = _world()
    kept = torch.ones(elements)
    full = pieces(rank, transport.ranks, elements)
    transport.reduce_scatter(full, lambda: Target(kept, adds=True)).wait()
    return kept


def summed_later(rank: int, elements: int) -> Tensor:
    """The same of memory that peers read in place, waited for when so many other sums were begun that it was long ended
    to make room for them."""
    return _summed_around(rank, elements, _begun_together)


def summed_last(rank: int, elements: int) -> Tensor:
    """The same, where the others come and go one by one, as a forward pass's gathers do."""
    return _summed_around(rank, elements, _one_by_one)


def _begun_together(transport: SharedTransport) -> None:
    others = [transport.all_reduce(transport.empty(1, torch.float32).fill_(1.0)) for _ in range(SLOTS)]
    for other in others:
        other.wait()


def _one_by_one(transport: SharedTransport) -> None:
    for number in range(3 * SLOTS):
        x = torch.full((2 * transport.ranks,), float(number))
        transport.all_gather(x, x[:2].clone()).wait()


def _summed_around(rank: int, elements: int, others: Callable[[SharedTransport], None]) -> Tensor:
    transport = _world()
    kept = torch.ones(elements)
    full = transport.empty(transport.ranks * elements, torch.float32).copy_(pieces(rank, transport.ranks, elements))
    first = transport.reduce_scatter(full, lambda: Target(kept, adds=True))
    others(transport)
    assert not transport.started
    first.wait()
    transport.wait_readers(full)
    return kept


def mailed(rank: int, sizes: list[int]) -> int:
    """A header and a message of each size from the first rank to the last, one at a time; the bytes of all segments
    that this rank has made for messages."""
    transport = _world()
    mail = Mail(transport, MESSAGES)
    ring = sum(segment.nbytes for segment in mail._segments)
    for n in sizes:
        for x in (torch.tensor([n, 1]), torch.arange(n, dtype=torch.uint8)):
            if rank == 0:
                mail.send(x, 1)
            else:
                out = torch.empty_like(x)
                mail.receive(out, 0).wait()
                assert torch.equal(out, x)
        transport.all_reduce(torch.ones(1)).wait()  # it has been taken
    return sum(segment.nbytes for segment in mail._segments) - ring


def killed(rank: int, payload: tuple[int, float]) -> None:
    """Collectives without end; the last rank is killed after so many seconds."""
    number, after = payload
    transport = _world()
    dist.barrier()
    if rank == transport.ranks - 1:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    generator = random.Random(number)
    while True:
        _collectives(transport, generator)


def healthy(rank: int, count: int) -> int:
    transport = _world()
    generator = random.Random(count)
    for _ in range(count):
        _collectives(transport, generator)
    return len(transport.started)


def late(rank: int, _: None) -> str:
    """The last rank never comes to the second collective; what the first one says of it."""
    transport = _world()
    transport.spin.timeout = 0.5
    x = torch.ones(10)
    transport.all_reduce(x).wait()
    if rank == transport.ranks - 1:
        time.sleep(2)
        return ""
    try:
        transport.all_reduce(x).wait()
    except RuntimeError as error:
        return str(error)
    return "it came"


@dataclass(frozen=True)
class Said:
    backend: str
    problem: str
    sum: float


def limited(rank: int, payload: tuple[int, str]) -> Said:
    """Comms where a file, and so a segment, may have at most so many bytes."""
    most, transport = payload
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        comms = make_comms(Layout(dp=2), MODELS["llama"], rank, timeout=TIMEOUT, transport=transport)
        x = torch.ones(40 << 20)
        comms.all_reduce(x, DATA, "test")
        return Said(comms.backend, "", float(x.mean()))
    except UserError as error:
        return Said("", str(error), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_files(rank: int, count: int) -> tuple[int, int]:
    """Open files of this process before and after `count` transports have come and gone."""
    import gc

    _world()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(count):
        transport = _world()
        transport.all_reduce(torch.ones(5)).wait()
        dist.barrier()  # who is ahead must not let go of what others have not read
        del transport
        gc.collect()
        dist.barrier()
    return before, len(list(Path("/proc/self/fd").iterdir()))
