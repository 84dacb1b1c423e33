"""Measuring collectives: every algorithm beside the backend's own, in one set of ranks, by turns.

A time is that of calls that follow each other: a block of them, from the first rank's start to the last rank's end,
over their number. In every round each contender has one block, after a call that is not counted; every second round
goes the other way round, since what comes first may have it easier.

`python -m shardwise.runtime.transport.bench JOB.json` is one rank of `shardwise collective bench`.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import RankJob, leave, main
from shardwise.runtime.torch_versions import all_gather_single, reduce_scatter_single
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.transport.sends import SendTransport
from shardwise.runtime.transport.shared import SharedTransport
from shardwise.schedule import CommSchedule, build
from shardwise.schedule.algorithms import find

BLOCK = 0.01
"""Seconds that a block of calls should take."""
MOST_CALLS = 200
FEWEST = 2
"""Fewest rounds per cell, even past the time limit."""
_BYTES_PER_SECOND = 1e9
"""Rough seconds of a call in a round, to share out time."""
DTYPE = torch.float32

Call = Callable[[], object]


@dataclass(frozen=True)
class BenchJob(RankJob):
    """Settings of one benchmark of collectives. algorithms: (collective, algorithm). sizes: bytes of the full tensor.
    transports: "shared", "sends". limit: seconds after which no new block starts. settled: 0, or the share by which
    each contender's two quickest rounds may differ for a cell to end early; cells then share `limit`, with at least
    `FEWEST` rounds each. `out` is rewritten after each cell."""

    algorithms: list[tuple[str, str]]
    sizes: list[int]
    transports: list[str]
    rounds: int
    limit: float
    settled: float = 0.0


@dataclass(frozen=True)
class BenchSamples:
    """Samples of one contender in one cell. algorithm: None for the backend's own. seconds: of a call, one figure a
    round."""

    algorithm: str | None
    transport: str
    options: dict[str, int]
    seconds: list[float]


def whole_elements(nbytes: int, ranks: int) -> int:
    """Elements of about `nbytes` bytes that divide by the ranks, as backends' own collectives need them."""
    return max(1, nbytes // DTYPE.itemsize // ranks) * ranks


def interleave(
    calls: Sequence[Call], rounds: int, go_on: Callable[[list[list[float]]], bool] = lambda so_far: True
) -> list[Any]:
    """Seconds of one call of each, a list with one figure for every round; every rank of the world must call it.

    go_on: asked on rank 0 before each round, with its own seconds so far.
    """
    counts = _rank_0s([_calls_in_a_block(call) for call in calls])
    spans: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(rounds):
        own = [[(end - start) / n for start, end in mine] for mine, n in zip(spans, counts, strict=True)]
        if not _rank_0s([int(dist.get_rank() == 0 and go_on(own))])[0]:
            break
        for i in range(len(calls)) if number % 2 == 0 else reversed(range(len(calls))):
            spans[i].append(_block(calls[i], counts[i]))
    every, seconds = gather_objects(spans), []
    for i, count in enumerate(counts):
        blocks = zip(*(theirs[i] for theirs in every), strict=True)
        # perf_counter is the machine's monotonic clock, the same in all its processes.
        seconds.append([(max(end for _, end in block) - min(start for start, _ in block)) / count for block in blocks])
    return seconds


def settled(so_far: Sequence[Sequence[float]], within: float) -> bool:
    """Whether each contender's two quickest rounds differ by at most this share: noise only ever adds to a time, so
    nothing quicker is to be expected."""
    quickest = [sorted(seconds)[:2] for seconds in so_far]
    return all(len(two) == 2 and two[1] <= two[0] * (1 + within) for two in quickest)


def parts_of_time(cells: Sequence[tuple[int, int]]) -> list[float]:
    """The share of all time by which each cell should be done. cells: (contenders, bytes), in order."""
    weights = [contenders * (BLOCK + nbytes / _BYTES_PER_SECOND) for contenders, nbytes in cells]
    return [done / sum(weights) for done in accumulate(weights)]


def _calls_in_a_block(call: Call) -> int:
    """Found by one call, after one that has everything compiled."""
    call()
    dist.barrier()
    started = time.perf_counter()
    call()
    return max(1, min(MOST_CALLS, math.ceil(BLOCK / (time.perf_counter() - started))))


def _block(call: Call, count: int) -> tuple[float, float]:
    dist.barrier()
    call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return started, time.perf_counter()


def _rank_0s(numbers: list[int]) -> list[int]:
    values = torch.tensor(numbers)
    dist.broadcast(values, 0)
    return values.tolist()


def backends_own(collective: str, memory: Tensor, n: int) -> Call:
    """torch.distributed's collective over the world, on a full tensor of n elements, a multiple of the ranks.

    memory: 2 n elements or more, all of whose content is lost.
    """
    p, rank = dist.get_world_size(), dist.get_rank()
    full, other = memory[:n], memory[n : 2 * n]
    piece = other[: n // p]
    pieces = list(full.chunk(p)) if rank == 0 else None
    calls: dict[str, Call] = {
        "broadcast": partial(dist.broadcast, full, 0),
        "scatter": partial(dist.scatter, piece, pieces, 0),
        "gather": partial(dist.gather, piece, pieces, 0),
        "reduce": partial(dist.reduce, full, 0),
        "all-gather": partial(all_gather_single, full, piece),
        "reduce-scatter": partial(reduce_scatter_single, piece, full),
        "all-reduce": partial(dist.all_reduce, full),
        "all-to-all": partial(dist.all_to_all_single, other, full),
    }
    return calls[collective]


def _schedule(collective: str, name: str, ranks: int) -> CommSchedule:
    """An algorithm's schedule; one with levels has the ranks of a host inside where there are several hosts."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    several = local < ranks and "node" in find(collective, name).options
    return build(collective, name, ranks, **({"node": local} if several else {}))


class TransportBench:
    """One rank of a job: its transports, and a memory for each, as large as any cell needs."""

    def __init__(self, job: BenchJob) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.job, self.started = job, time.monotonic()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.schedules = [_schedule(collective, name, self.ranks) for collective, name in job.algorithms]
        regions = max(2, *(len(schedule.regions) for schedule in self.schedules))
        most = regions * max(whole_elements(size, self.ranks) for size in job.sizes)
        self.plain = torch.empty(most, dtype=DTYPE)
        self.transports: dict[str, tuple[Any, Tensor]] = {}
        if "shared" in job.transports:
            self.transports["shared"] = self._shared(world, most)
        if "sends" in job.transports:
            self.transports["sends"] = SendTransport(world), self.plain
        for memory in (self.plain, *(memory for _, memory in self.transports.values())):
            memory.fill_(0)  # pages that nobody wrote yet are quick to read

    def _shared(self, world: dist.ProcessGroup, elements: int) -> tuple[Any, Tensor]:
        try:
            transport = SharedTransport(world, self.job.timeout)
            return transport, transport.empty(elements, DTYPE)
        except OSError as error:
            raise UserError(f"--transport shared is not available: {error}; use --transport sends") from None

    def run(self) -> None:
        """Measure cell after cell until the time is over; rank 0 writes them."""
        collectives = list(dict.fromkeys(schedule.collective for schedule in self.schedules))
        planned = [(collective, size) for collective in collectives for size in self.job.sizes]
        cells: list[dict[str, Any]] = []
        parts = parts_of_time([(self._contenders(collective), size) for collective, size in planned])
        for number, (collective, size) in enumerate(planned):
            if not _rank_0s([int(number == 0 or self.job.settled > 0 or self._in_time())])[0]:
                break
            n = whole_elements(size, self.ranks)
            words = f"{collective}, {n * DTYPE.itemsize:,} bytes ({number + 1} of {len(planned)})"
            measured = self._cell(collective, n, words, parts[number])
            cells.append(
                {"collective": collective, "bytes": n * DTYPE.itemsize, "rows": [asdict(row) for row in measured]}
            )
            if self.rank == 0:
                self.job.leave({"wanted": len(planned), "cells": cells})
        if self.rank == 0:
            rewrite_line("")

    def close(self) -> None:
        for transport, _ in self.transports.values():
            transport.close()

    def _in_time(self, part: float = 1.0) -> bool:
        return time.monotonic() - self.started < self.job.limit * part

    def _contenders(self, collective: str) -> int:
        return 1 + len(self.transports) * sum(schedule.collective == collective for schedule in self.schedules)

    def _cell(self, collective: str, n: int, words: str, part: float) -> list[BenchSamples]:
        """part: of all time, by which the cell should be done."""
        contenders: list[tuple[CommSchedule | None, str, Call]] = []
        for name, (transport, memory) in self.transports.items():
            for schedule in self.schedules:
                if schedule.collective == collective:
                    mine = memory[: int(schedule.bounds(n)[-1])]
                    contenders.append((schedule, name, partial(transport.run, schedule, mine)))
        contenders.append((None, dist.get_backend(), backends_own(collective, self.plain, n)))

        def go_on(so_far: list[list[float]]) -> bool:
            number = len(so_far[0])
            # on a terminal a line that changes, elsewhere a line for each cell
            if not rewrite_line(f"{words}: round {number + 1} of {self.job.rounds}") and number == 0:
                print(words, file=sys.stderr, flush=True)
            if not self.job.settled:
                return self._in_time() or number == 0
            return number < FEWEST or (self._in_time(part) and not settled(so_far, self.job.settled))

        seconds = interleave([call for *_, call in contenders], self.job.rounds, go_on)
        return [
            BenchSamples(schedule.algorithm if schedule else None, name, _options(schedule), mine)
            for (schedule, name, _), mine in zip(contenders, seconds, strict=True)
        ]


def _options(schedule: CommSchedule | None) -> dict[str, int]:
    """Those that have a value of their own: a node of 0 ranks stands for what the number of ranks suggests."""
    return {name: value for name, value in schedule.options.items() if value} if schedule else {}


def run(rank: int, job: BenchJob) -> None:
    """All that is measured; rank 0 writes it."""
    bench = TransportBench(job)
    bench.run()
    dist.barrier()  # who leaves early must not be missed
    bench.close()


if __name__ == "__main__":
    leave(main(sys.argv[1:], BenchJob.read, run), at_once=True)
