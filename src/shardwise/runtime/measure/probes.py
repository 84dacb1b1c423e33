"""What `shardwise calibrate device` times: operations of a training step as the decoder and the runtime compute them.

A probe makes its call when its turn has come; `calibration.py` times it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
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
from shardwise.layout.unit import GRADIENT_BITS
from shardwise.layout.wire import packed_bytes
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cpu.attention import short_attention
from shardwise.ops.limits import optimizer_chunk
from shardwise.ops.table import install, lower
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.rank import RankJob
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.tensor.loss import loss_form, summed_cross_entropy
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.quantized import add_up_packed, pack
from shardwise.runtime.zero.update import update

Call = Callable[[], object]

DTYPES = (torch.float32, torch.bfloat16)
TURNS = ("forward", "input", "weight")
MODEL = ModelConfig("probe", vocab=64, hidden=128, layers=1, heads=2, kv_heads=2, ffn=256, max_positions=64)
ROTATED = 48 << 20
"""Bytes over which passes go in turn, so that what they read has left the caches, as in a step."""
HOT = 4 << 20
"""Bytes of a collective up to which its tensor counts as just computed."""


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


def products(job: CalibrationJob, device: torch.device, most: float) -> Iterator[Probe]:
    """Matrix products [m, k] x [k, n] with operands as a linear layer has them forward and backward. most: FLOPs."""
    for dtype, (m, n, k), turn in product(DTYPES, product(*job.axes), TURNS):
        if 2.0 * m * n * k <= most:
            yield "product", (_name(dtype), turn), (m, n, k), matrix_product(dtype, m, n, k, turn, device)


def matrix_product(
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
            yield "row", (_name(dtype),), (deep, deep), matrix_product(dtype, 1, deep, deep, "forward", device, more)


def _copy(nbytes: int, device: torch.device) -> Call:
    a, b = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    return lambda: b.copy_(a)


def _turns(make: Callable[..., Call], shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Call:
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
