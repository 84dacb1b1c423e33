"""Time of the operations of a training step on the device at hand: `shardwise calibrate device`.

All ranks measure the same probe at the same time, since the ranks of a CPU share its memory and caches. A time is the
lower quartile of several blocks of calls, and the lesser of two passes: other programs only ever add to it. On one
thread of a CPU the clock is that thread's own, which stands still while another program has the core; how long that is,
is measured apart. On CUDA it is the device's, and calls wait in its queue, since in a step the host runs ahead. What is
called is in `probes.py`.

`python -m shardwise.runtime.measure.calibration JOB.json` is one rank. `predict.time.measuring` makes a device of
the samples.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice, zip_longest
from statistics import fmean, quantiles
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import leave, main
from shardwise.runtime.job.setup import cuda_device
from shardwise.runtime.measure.hardware import DeviceQueue, synchronize
from shardwise.runtime.measure.host import host_rates, of_all_ranks
from shardwise.runtime.measure.probes import (
    ROTATED,
    CalibrationJob,
    Call,
    Collective,
    Probe,
    attentions,
    blocks,
    collectives,
    matrix_product,
    passes,
    products,
)
from shardwise.runtime.measure.samples import Probed, within_limits
from shardwise.runtime.transport.process_group import gather_objects

ROUNDS = 8
"""Blocks of calls that a probe's time is spent on."""
HOST_SHARE = 0.05
"""Part of all the time, beside it, that copies and updates of the host take."""
PASSES = 2
"""Times that all is measured."""
QUEUED, QUEUED_S = 32, 5e-3
"""Calls at most, and their seconds, that wait in a device's queue before it starts with the first one."""
SUSTAINED, SUSTAINED_S = (8192, 8192, 8192), 1.5
"""Product that is repeated, and for how long before it is timed, and then again."""
LEAST = 8
"""Part of an equal share of all the time that a probe of the first pass has at least."""
BETWEEN = 16 << 20
"""Bytes that pass through the caches between two collectives: about what half a block does to a thousand tokens."""


class DeviceBench:
    """One rank's clock."""

    def __init__(self, job: CalibrationJob) -> None:
        self.job, self.device = job, torch.device(job.device)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if self._alone else time.perf_counter
        self._queue = DeviceQueue(cuda_device(0)) if self.device.type == "cuda" else None
        self._passed = self._had = 0.0
        self._started = time.perf_counter()

    def run(self) -> list[Probed]:
        """All probes, in the time that there is, each in two passes, far apart: a machine that is slow for seconds
        slows one of them. What is quicker than it can be is measured again."""
        made = sum(1 for _ in self._probes(math.inf, False))
        budget = self.job.seconds / made / PASSES
        rate = (
            2.0 * 512**3 / self._seconds(matrix_product(torch.float32, 512, 512, 512, "forward", self.device)(), budget)
        )
        most = torch.tensor(rate * 2 * PASSES * budget)
        dist.all_reduce(most, dist.ReduceOp.MIN)  # all must have the same probes
        passes = [self._pass(float(most), number) for number in range(PASSES)]
        results = [
            min((sample for sample in samples if sample), key=lambda sample: sample.seconds)
            for samples in zip_longest(*passes)
        ]
        if self._queue is not None:
            # a product of a large model, once the device has heated up to its power limit
            call = matrix_product(torch.bfloat16, *SUSTAINED, "forward", self.device)()
            count = max(1, round(SUSTAINED_S / self._block(call, 1, self._clock)))
            self._block(call, count, self._clock)
            results.append(Probed("sustained", ("bfloat16",), SUSTAINED, self._block(call, count, self._clock)))
        if self._alone:
            results.append(Probed("taken", (), (), self._passed / self._had - 1))
        results = [
            replace(sample, seconds=seconds) for sample, seconds in zip(results, self._shared(results), strict=True)
        ]
        return within_limits(results, self.device.type, partial(self._again, results, float(most)))

    def _shared(self, samples: Sequence[Probed]) -> list[float]:
        """Seconds of each, the mean over all ranks; of messages the first rank's."""
        every = gather_objects([sample.seconds for sample in samples])
        return [
            theirs[0] if s.of == ("message",) else fmean(theirs)
            for s, theirs in zip(samples, zip(*every, strict=True), strict=True)
        ]

    def _again(self, samples: list[Probed], most: float, at: int, more: int) -> float:
        """Seconds of a sample's work, as a probe of the same place with `more` times the work has them."""
        what, of, shape, make = next(islice(self._probes(most, False, more), at, None))
        seconds = self._seconds(make(), self.job.seconds / len(samples))
        whole = math.prod(shape) / math.prod(samples[at].shape)
        return self._shared([Probed(what, of, shape, seconds / whole)])[0]

    def _pass(self, most: float, number: int) -> list[Probed]:
        """Every probe once; in a later pass, those for which there is time."""
        samples: list[Probed] = []
        of_all = sum(1 for _ in self._probes(most, False)) + (4 * len(self.job.sizes) if self.ranks > 1 else 0)
        for at, (what, of, shape, make) in enumerate(self._probes(most, True)):
            budget = self._allowance(number, of_all - at, of_all)
            if not budget:
                break
            if self.rank == 0:
                count = number * of_all + at + 1
                words = f"{what} {' '.join(of)} {'x'.join(map(str, shape))}"
                # on a terminal a line that changes, elsewhere one in twenty
                line = f"{count} of {PASSES * of_all}: {words}"
                if not rewrite_line(line) and count % 20 == 1:
                    print(line, file=sys.stderr, flush=True)
            call = make()
            if what != "collective":
                seconds = self._seconds(call, budget, host=what == "block")
            elif of == ("message",):
                seconds = self._there_and_back(call, budget) / 2
            else:
                assert isinstance(call, Collective)
                seconds = self._together(call, budget)
            samples.append(Probed(what, of, shape, seconds))
            del call, make
        return samples

    def _allowance(self, number: int, left: int, of_all: int) -> float:
        """Seconds for the next of `left` probes of a pass, the same on all ranks: an equal part of what the pass still
        has, on the wall's clock. The first pass is made whole, with a part for each; a later one ends, by 0, with the
        time."""
        rest = self.job.seconds * (number + 1) / PASSES - (time.perf_counter() - self._started)
        least = self.job.seconds / of_all / LEAST
        reported = torch.tensor(max(rest / left, least) if rest > 0 or number == 0 else 0.0)
        dist.broadcast(reported, 0)
        return float(reported)

    def _probes(self, most: float, together: bool, more: int = 1) -> Iterator[Probe]:
        yield from products(self.job, self.device, most)
        yield from attentions(self.job, self.device, more)
        yield from passes(self.job, self.device, more)
        yield from blocks(self.job, self.device, self.ranks)
        if together:
            yield from collectives(self.job, self.ranks)

    def _seconds(self, call: Call, budget: float, host: bool = False) -> float:
        """Seconds of one call, all ranks at once, after one that has everything compiled. host: of the host, where a
        device would else be timed alone."""
        call()
        dist.barrier()
        ends = time.perf_counter() + budget
        blocks = [self._block(call, 1, self._clock)]
        if self._queue is not None and not host:
            count = max(1, min(QUEUED, math.ceil(min(budget / ROUNDS, QUEUED_S) / blocks[0])))
            spans = [self._queue.seconds(call, count, min(count * blocks[0], QUEUED_S))]
            while time.perf_counter() < ends and len(spans) < 4 * ROUNDS:
                spans.append(self._queue.seconds(call, count, min(count * blocks[0], QUEUED_S)))
            return quantiles(spans, n=4, method="inclusive")[0] if len(spans) > 1 else spans[0]
        count = max(1, min(1000, math.ceil(budget / ROUNDS / blocks[0])))
        if count > 1:
            blocks.clear()
        while not blocks or (time.perf_counter() < ends and len(blocks) < 4 * ROUNDS):
            blocks.append(self._block(call, count, self._clock))
        return quantiles(blocks, n=4, method="inclusive")[0] if len(blocks) > 1 else blocks[0]

    def _together(self, call: Collective, budget: float) -> float:
        """Seconds of one collective after other work, from when the last rank comes to it: who comes earlier waits for
        others' computation."""
        others = cycle(torch.full((ROTATED // BETWEEN, BETWEEN // 4), 1.0))

        def work() -> None:
            next(others).neg_()
            call.compute()

        def both() -> None:
            work()
            call()

        both()
        took: list[float] = []
        for _ in range(self._often(both, budget, 8)):
            work()
            took.append(self._block(call, 1, time.perf_counter))
        last = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MIN)
        return quantiles(last.tolist(), n=4, method="inclusive")[0]

    def _there_and_back(self, call: Call, budget: float) -> float:
        call()
        dist.barrier()
        count = self._often(call, budget / ROUNDS, 1)
        blocks = []
        for _ in range(ROUNDS):
            dist.barrier()
            blocks.append(self._block(call, count, time.perf_counter))
        return min(blocks)

    def _often(self, call: Call, budget: float, least: int) -> int:
        one = torch.tensor(self._block(call, 1, time.perf_counter), dtype=torch.float64)
        dist.all_reduce(one, dist.ReduceOp.MAX)
        return max(least, min(200, math.ceil(budget / float(one))))

    def _block(self, call: Call, count: int, clock: Callable[[], float]) -> float:
        synchronize(self.device)
        started, began = clock(), time.perf_counter()
        for _ in range(count):
            call()
        synchronize(self.device)
        ended = clock()
        if clock is time.thread_time:
            self._passed, self._had = self._passed + time.perf_counter() - began, self._had + ended - started
        return (ended - started) / count


def _about(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        cores = len(os.sched_getaffinity(0))
        return {
            "threads": torch.get_num_threads(), "ranks": dist.get_world_size(), "cores": cores,
            "torch": torch.__version__,
        }  # fmt: skip
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "sms": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
        "torch": torch.__version__,
    }


def run(rank: int, job: CalibrationJob) -> None:
    """All that is measured; rank 0 writes it."""
    bench = DeviceBench(job)
    result = bench.run()
    dist.barrier()
    host = of_all_ranks(host_rates(bench.device, job.updated, job.seconds * HOST_SHARE))
    if rank == 0:
        rewrite_line("")
        with suppress(OSError):
            job.leave({"about": _about(bench.device), "samples": [asdict(sample) for sample in result], "host": host})
    dist.barrier()


if __name__ == "__main__":
    leave(main(sys.argv[1:], CalibrationJob.read, run), at_once=True)
