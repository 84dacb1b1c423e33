"""Time of the operations of a training step on the device at hand: `shardwise calibrate device`.

All ranks measure the same probe at the same time, since the ranks of a CPU share its memory and caches. A time is the
lower quartile of several blocks of calls, and the lesser of two passes: other programs only ever add to it. On one
thread of a CPU the clock is that thread's own, which stands still while another program has the core; how long that is,
is measured apart. On CUDA it is the device's, and calls wait in its queue, since in a step the host runs ahead. What is
computed is what the decoder and the runtime compute: their own norms, rotation, loss, and the optimizer's calls.

`python -m shardwise.runtime.measure.calibration JOB.json` is one rank. `predict.time.measuring` makes a device of
the samples.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice, product, zip_longest
from statistics import fmean, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention, Rope
from shardwise.decoder.modules import RMSNorm
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import DATA, PP, SHARD, Axes
from shardwise.layout.units import GRADIENT_BITS
from shardwise.layout.wire import packed_bytes
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cpu.attention import short_attention
from shardwise.ops.limits import optimizer_chunk
from shardwise.ops.table import install, lower
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.devices import cuda_device
from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import RankJob, leave, main
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.measure.hardware import DeviceQueue, settle
from shardwise.runtime.measure.host import host_rates, of_all_ranks
from shardwise.runtime.measure.samples import Probed, within_limits
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.tensor.loss import loss_form, summed_cross_entropy
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.zero.quantized import add_up_packed, pack
from shardwise.runtime.zero.update import update

Call = Callable[[], object]

DTYPES = (torch.float32, torch.bfloat16)
TURNS = ("forward", "input", "weight")
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
MODEL = ModelConfig("probe", vocab=64, hidden=128, layers=1, heads=2, kv_heads=2, ffn=256, max_positions=64)
ROTATED = 48 << 20
"""Bytes over which passes go in turn, so that what they read has left the caches, as in a step."""
HOT = 4 << 20
"""Bytes of a collective up to which its tensor counts as just computed."""
BETWEEN = 16 << 20
"""Bytes that pass through the caches between two collectives: about what half a block does to a thousand tokens."""


@dataclass(frozen=True)
class CalibrationJob(RankJob):
    """Settings of one calibration. device: torch's name. seconds: how long it may take, about. axes: lengths of
    products; widths, lengths: of attention's heads and sequences; tokens: of passes over memory; sizes: bytes of
    collectives. transport: as the trainer's. updated: elements of the host's copies and updates."""

    device: str
    seconds: float
    axes: list[list[int]]
    widths: list[int]
    lengths: list[int]
    tokens: int
    sizes: list[int]
    transport: str
    updated: int


Probe = tuple[str, tuple[str, ...], tuple[int, ...], Callable[[], Call]]
"""(what, of, shape) as in `Probed`; and what makes the call, when its turn has come."""


def usual_job(device: str, seconds: float, transport: str, out: str) -> CalibrationJob:
    """The shapes that are measured on a kind of device."""
    small = device == "cpu"
    axis = [16, 128, 768, 4096] if small else [32, 128, 512, 2048, 8192]
    return CalibrationJob(
        device,
        seconds,
        axes=[axis] * 3,
        widths=[64, 128],
        lengths=[128, 256, 512, 1024, 2048] if small else [512, 2048, 8192],
        tokens=1024 if small else 32768,
        sizes=[1 << k for k in range(10, 25, 2)],
        transport=transport,
        updated=1 << (23 if small else 26),
        timeout=120.0,
        out=out,
    )


# -- the probes


def products(job: CalibrationJob, device: torch.device, most: float) -> Iterator[Probe]:
    """Matrix products [m, k] x [k, n] with operands as a linear layer has them forward and backward. most: FLOPs."""
    for dtype, (m, n, k), turn in product(DTYPES, product(*job.axes), TURNS):
        if 2.0 * m * n * k <= most:
            yield "product", (_name(dtype), turn), (m, n, k), _product(dtype, m, n, k, turn, device)


def _product(
    dtype: torch.dtype, m: int, n: int, k: int, turn: str, device: torch.device, more: int = 1
) -> Callable[[], Call]:
    """Weights and saved activations come from memory, as in a step; just computed tensors are in the cache.
    more: times the bytes that go round."""

    def make() -> Call:
        def hot(*shape: int) -> Tensor:
            # A GPU draws more power on numbers that differ; a CPU takes long to draw them.
            fill = torch.rand(shape, device=device) if device.type == "cuda" else torch.full(shape, 0.5)
            return fill.to(dtype)

        def cold(*shape: int) -> Iterator[Tensor]:
            return cycle(
                [hot(*shape) for _ in range(min(64, more * ROTATED // (math.prod(shape) * dtype.itemsize) + 1))]
            )

        if turn == "forward":
            x, w = hot(m, k), cold(n, k)
            return lambda: F.linear(x, next(w))
        if turn == "input":
            dy, w = hot(m, k), cold(k, n)
            return lambda: dy @ next(w)
        dy, saved, out = hot(k, m), cold(k, n), cold(m, n)
        return lambda: torch.mm(dy.t(), next(saved), out=next(out))

    return make


def attentions(job: CalibrationJob, device: torch.device, more: int = 1) -> Iterator[Probe]:
    """The runtime's fused attention, causal: forward, and forward with backward. more: times the sequences."""
    for dtype, width, length in product(DTYPES, job.widths, job.lengths):
        if device.type == "cuda":  # enough to fill the device, or the host's calls would be timed
            heads, batch = 32, max(1, job.lengths[-1] * 2 // length)
        else:  # the time per head is equal for two heads and for eight
            heads, batch = min(8, max(2, 4096 // length)), max(1, min(512, job.lengths[-1] // 4) // length)
        for way in ("forward", "both"):
            shape = batch * more, length, heads, width
            yield "attention", (_name(dtype), way), shape, _attention(dtype, shape, way == "both", device)


def _attention(dtype: torch.dtype, shape: tuple[int, ...], backward: bool, device: torch.device) -> Callable[[], Call]:
    def make() -> Call:
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_(backward) for _ in range(3))
        dy = torch.randn(shape, device=device).to(dtype)
        core, batch = CoreAttention(MODEL, "probe"), _batch(shape[0], shape[1], device)
        form = short_attention(core, OpContext("probe", Options("train")))
        assert form is not None, "the probe's attention is plain"
        install(core, form)

        def call() -> None:
            out = core.forward(q, k, v, batch)
            if backward:
                torch.autograd.grad(out, (q, k, v), dy)

        return call

    return make


def _batch(sequences: int, length: int, device: torch.device) -> Batch:
    positions = torch.arange(length, device=device).expand(sequences, length)
    return Batch(positions, positions, positions, None, positions, positions)


def passes(job: CalibrationJob, device: torch.device, more: int = 1) -> Iterator[Probe]:
    """Operations that memory binds, forward and backward, on `tokens` rows, each in the shape that it is counted by.
    more: times the rows, and the bytes that go round."""
    copied = max(1 << 16, job.tokens << 16)
    yield "copy", (), (copied,), partial(_copy, copied, device)
    makers: dict[str, tuple[int, Callable[..., Call]]] = {
        "": (1024, _add), "norm": (1024, _norm), "activation": (2816, _activation), "rotation": (1024, _rotation),
        "softmax": (1024, _softmax), "loss": (8192, _loss),
        "packing": (1024, _packing), "unpacking": (1024, _unpacking),
    }  # fmt: skip
    for dtype in DTYPES:
        for name, (width, make) in makers.items():
            shape = job.tokens * more, width
            yield "pass", (name, _name(dtype)), shape, partial(_turns, make, shape, dtype, device)
        elements = job.tokens << 13
        yield "pass", ("optimizer", _name(dtype)), (elements,), partial(_optimizer, elements, dtype, device)
        for deep in (1024, 4096):
            yield "row", (_name(dtype),), (deep, deep), _product(dtype, 1, deep, deep, "forward", device, more)


def _copy(nbytes: int, device: torch.device) -> Call:
    a, b = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    return lambda: b.copy_(a)


def _turns(make: Callable[..., Call], shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    """Calls on several sets of tensors by turns."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    calls = cycle([make(shape, dtype, device) for _ in range(max(1, min(16, ROTATED // (3 * nbytes))))])
    return lambda: next(calls)()


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _add(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    a, b, c = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def _norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    norm = RMSNorm(shape[1], 1e-5).to(device, dtype)
    nn.init.ones_(norm.weight)
    lower(norm, OpContext("", Options("train", device.type)))
    x, dy = _leaf((1, *shape), dtype, device), torch.randn(1, *shape, device=device).to(dtype)
    return lambda: torch.autograd.grad(x + norm(x), (x, norm.weight), dy)


def _activation(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    gate, up = _leaf(shape, dtype, device), _leaf(shape, dtype, device)
    dy = torch.randn(shape, device=device).to(dtype)
    return lambda: torch.autograd.grad(F.silu(gate) * up, (gate, up), dy)


def _rotation(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    heads = shape[1] // 128
    config = MODEL.replace(hidden=shape[1], heads=heads, kv_heads=heads, head_dim=128, max_positions=shape[0])
    rope = Rope(config)
    lower(rope, OpContext("", Options("train", device.type)))
    tables = rope.whole(torch.arange(shape[0], device=device)[None], dtype)
    x = _leaf((1, shape[0], heads, 128), dtype, device)
    dy = torch.randn_like(x)
    return lambda: torch.autograd.grad(rope(x, tables), x, dy)


def _softmax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    x, mask = _leaf(shape, dtype, device), torch.zeros(shape[1], dtype=dtype, device=device)
    dy = torch.randn(shape, device=device).to(dtype)
    return lambda: torch.autograd.grad(torch.softmax(x + mask, -1), x, dy)


def _loss(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    x, targets = _leaf((1, *shape), dtype, device), torch.zeros(1, shape[0], dtype=torch.int64, device=device)
    alone: Any = _Alone()
    form = loss_form(device, None)
    return lambda: torch.autograd.grad(summed_cross_entropy(x, targets, 0, shape[1], alone, form=form), x)


def _packing(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    """The work of `runtime.zero.packed_sum` before an exchange."""
    numbers = torch.full((math.prod(shape),), 0.5, dtype=dtype, device=device)
    packed = torch.zeros(packed_bytes(len(numbers), GRADIENT_BITS), dtype=torch.uint8, device=device)
    return lambda: pack(numbers, GRADIENT_BITS, packed)


def _unpacking(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
    """Its work after it."""
    total = torch.zeros(math.prod(shape), dtype=dtype, device=device)
    packed = torch.zeros(packed_bytes(len(total), GRADIENT_BITS), dtype=torch.uint8, device=device)
    return lambda: add_up_packed([packed], GRADIENT_BITS, Target(total, True))


class _Alone:
    """The loss's view of a rank that shares no vocabulary."""

    def all_reduce(self, tensor: Tensor, axes: Axes, unit: str, *, maximum: bool = False) -> None: ...
    def size(self, axes: Axes) -> int:
        return 1


def _optimizer(elements: int, dtype: torch.dtype, device: torch.device) -> Call:
    """The work of `runtime.zero.optimizer` on an interval: the norm, clipping, the update."""
    master, first, second = (torch.zeros(elements, device=device) for _ in range(3))
    grads = torch.full((elements,), 1e-3, dtype=dtype, device=device)
    weights = master if dtype == torch.float32 else torch.zeros(elements, dtype=dtype, device=device)
    steps, settings = torch.ones((), device=device), OptimizerConfig()
    apart = weights is not master
    step = optimizer_chunk(elements) if apart and not weights.is_cuda else elements

    def call() -> None:
        torch.linalg.vector_norm(grads, dtype=torch.float32).double()
        for start in range(0, elements, step):
            chunk = slice(start, start + step)
            local = grads[chunk].to(torch.float32)
            local.mul_(0.999)
            update(
                "adamw", (master[chunk], local, first[chunk], second[chunk]), steps, settings, settings.lr, decay=True
            )
            if apart:
                weights[chunk].copy_(master[chunk])

    return call


def blocks(job: CalibrationJob, device: torch.device, ranks: int) -> Iterator[Probe]:
    """A block so small that it takes what its operations take to be called."""
    layout, workload = Layout(dp=ranks, precision="fp32"), Workload(seq=8, batch=ranks)
    comms = _comms(layout, job)
    plan = unit_plan(MODEL, layout, workload, rank=dist.get_rank(), backend=comms.backend)
    yield "block", (), (), partial(_block, StageRunner(plan, comms, device), device)
    comms.close()


def _block(stages: StageRunner, device: torch.device) -> Call:
    for unit in stages.engine.units.values():
        unit.whole.fill_(0.01)
    block, batch = stages.parts["blocks.0"], _batch(1, 8, device)
    x = torch.randn(1, 8, MODEL.hidden, device=device, requires_grad=True)
    dy = torch.ones_like(x)
    stages.engine.compile_guard("blocks.0").__enter__()  # what gradients are added to stays as long as the probe
    return lambda: torch.autograd.grad(block(x, batch), x, dy)


def collectives(job: CalibrationJob, ranks: int) -> Iterator[Probe]:
    """The trainer's own collectives and messages, over all ranks."""
    if ranks == 1:
        return
    data = _comms(Layout(dp=ranks, zero=3), job)
    line = _comms(Layout(pp=ranks), job)
    for nbytes in job.sizes:
        elements = max(1, nbytes // 4 // ranks) * ranks
        for op in ("all_reduce", "all_gather", "reduce_scatter"):
            yield "collective", (op,), (nbytes, ranks), partial(_collective, data, op, elements)
        yield "collective", ("message",), (nbytes, ranks), partial(_message, line, elements)
    data.close()
    line.close()


def _comms(layout: Layout, job: CalibrationJob) -> Comms:
    model = MODEL.replace(layers=max(MODEL.layers, layout.pp))
    return make_comms(layout, model, dist.get_rank(), timeout=job.timeout, transport=job.transport)


@dataclass(frozen=True)
class Collective:
    """A collective, to be called. compute: what the work before it does to its tensor."""

    call: Call
    compute: Call

    def __call__(self) -> object:
        return self.call()


def _collective(comms: Comms, op: str, elements: int) -> Collective:
    # Activations, which are small, have just been computed; gradients and weights have left the cache.
    small = 4 * elements <= HOT
    copies = 1 if small else ROTATED // (4 * elements) + 1
    whole = [torch.full((elements,), 0.0) for _ in range(copies)]  # filled: pages of zeros are yet to come
    piece = torch.zeros(elements // comms.size(DATA))
    tensors = cycle(whole)
    calls: dict[str, Call] = {
        "all_reduce": lambda: comms.all_reduce(next(tensors), DATA, "probe"),
        "all_gather": lambda: comms.all_gather(next(tensors), piece, SHARD, "probe"),
        "reduce_scatter": lambda: comms.reduce_scatter(next(tensors), SHARD, "probe", lambda: Target(piece)),
    }
    just = piece if op == "all_gather" else whole[0]
    return Collective(calls[op], just.zero_ if small else lambda: None)


def _message(comms: Comms, elements: int) -> Call:
    """There and back between the first two ranks: twice a message."""
    tensor, rank = torch.zeros(elements), comms.index(PP)

    def call() -> None:
        for sender in (0, 1) if rank < 2 else ():
            if rank == sender:
                comms.send(tensor, PP, 1 - rank, "probe").wait()
            else:
                comms.receive(tensor, PP, 1 - rank, "probe").wait()

    return call


# -- measuring


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
        rate = 2.0 * 512**3 / self._seconds(_product(torch.float32, 512, 512, 512, "forward", self.device)(), budget)
        most = torch.tensor(rate * 2 * PASSES * budget)
        dist.all_reduce(most, dist.ReduceOp.MIN)  # all must have the same probes
        passes = [self._pass(float(most), number) for number in range(PASSES)]
        results = [
            min((sample for sample in samples if sample), key=lambda sample: sample.seconds)
            for samples in zip_longest(*passes)
        ]
        if self._queue is not None:
            results.append(self._sustained())
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
                _progress(f"{count} of {PASSES * of_all}: {words}", count)
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

    def _sustained(self) -> Probed:
        """A product of a large model, once the device has heated up to its power limit."""
        call = _product(torch.bfloat16, *SUSTAINED, "forward", self.device)()
        count = max(1, round(SUSTAINED_S / self._block(call, 1, self._clock)))
        self._block(call, count, self._clock)
        return Probed("sustained", ("bfloat16",), SUSTAINED, self._block(call, count, self._clock))

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
        for _ in range(self._often(both, budget, 8, 200)):
            work()
            took.append(self._block(call, 1, time.perf_counter))
        last = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MIN)
        return quantiles(last.tolist(), n=4, method="inclusive")[0]

    def _there_and_back(self, call: Call, budget: float) -> float:
        """Seconds of two messages, one each way."""
        call()
        dist.barrier()
        count = self._often(call, budget / ROUNDS, 1, 200)
        blocks = []
        for _ in range(ROUNDS):
            dist.barrier()
            blocks.append(self._block(call, count, time.perf_counter))
        return min(blocks)

    def _often(self, call: Call, budget: float, least: int, most: int) -> int:
        """Number of calls within the budget, the same number on all ranks."""
        one = torch.tensor(self._block(call, 1, time.perf_counter), dtype=torch.float64)
        dist.all_reduce(one, dist.ReduceOp.MAX)
        return max(least, min(most, math.ceil(budget / float(one))))

    def _block(self, call: Call, count: int, clock: Callable[[], float]) -> float:
        settle(self.device)
        started, began = clock(), time.perf_counter()
        for _ in range(count):
            call()
        settle(self.device)
        ended = clock()
        if clock is time.thread_time:
            self._passed, self._had = self._passed + time.perf_counter() - began, self._had + ended - started
        return (ended - started) / count


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _progress(line: str, number: int) -> None:
    """On a terminal a line that changes, elsewhere one in twenty."""
    if not rewrite_line(line) and number % 20 == 1:
        print(line, file=sys.stderr, flush=True)


def _about(device: torch.device) -> dict[str, Any]:
    """Description of the device."""
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
