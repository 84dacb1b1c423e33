"""A rank that computes every engine step twice: decode steps in their static form, and all steps eagerly with a cache
of their own."""

import multiprocessing
import os
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.generation import Script, Seen, _hearing, run
from shardwise.ops.context import OpContext
from shardwise.ops.cuda.products import Chooser, CudaProducts
from shardwise.ops.paged import Rows
from shardwise.ops.products import MakeProduct
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.tensor.lowering import context_of
from shardwise.serving import engine as maps
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.graphs import Result
from shardwise.serving.job import weights_in
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.sampling import likeliest
from shardwise.serving.scheduler import EngineStep


@dataclass
class Twice:
    """errors: largest difference of a logit in each static step. rows: of each of these steps. wrong: tokens that
    differ. buckets: (rows, pages per sequence)."""

    seen: Seen = field(default_factory=Seen)
    errors: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    wrong: int = 0
    buckets: list[tuple[int, int]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    shapes: int = 0
    """Kinds of matrices that kernels multiply with."""


class _Twice(TokenGenerator):
    eager: TokenGenerator
    twice: Twice

    def forward(self, turn: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        self.eager.forward(turn, self.eager.rows(turn), x)
        return super().forward(turn, rows, x)

    def decode(self, turn: EngineStep) -> Result | None:
        decoded = super().decode(turn)
        if decoded is not None:
            logits, tokens = decoded
            expected = self.eager.forward(turn, self.eager.rows(turn))
            self.twice.errors.append(float((logits - expected).abs().max()))
            self.twice.rows.append(len(logits))
            self.twice.wrong += int((tokens != likeliest(expected)).sum())
        return decoded


class _WithKernels(_Twice):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chooser = Chooser(kernels=True)

    def _keep(self, part: str) -> MakeProduct:
        if self.plan.blueprint.kind(part) == "embedding":
            return super()._keep(part)
        return CudaProducts(self.chooser, self.dtype, int8=self.job.quantize == "int8")

    def load(self, *args: Any, **options: Any) -> None:
        def as_on_cuda(*given: Any) -> OpContext:
            context = context_of(*given)
            return replace(context, options=replace(context.options, device="cuda"))

        maps.context_of = as_on_cuda
        super().load(*args, **options)
        maps.context_of = context_of
        assert self.steps is not None and not self.steps.shape.gathers
        clock = count(1000, -1)  # every candidate is faster than the one before
        self.steps.prepare = lambda rows: self.chooser.choose(rows, lambda run: float(next(clock)))


def with_kernels(script: Script) -> Twice:
    """`compare`, with kernels, in a new process: Triton asks for its interpreter when it is imported."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        process = context.Process(target=_interpreted, args=(there, script))
        process.start()
    finally:
        del os.environ["TRITON_INTERPRET"]
    there.close()
    result: Twice = here.recv()
    process.join()
    return result


def _interpreted(pipe: Any, script: Script) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pipe.send(compare(0, script, _WithKernels))
    dist.destroy_process_group()


def compare(rank: int, script: Script, kind: type[_Twice] = _Twice) -> Twice:
    """Run a script on one rank, whose caches hold no numbers before they are written."""
    job = script.job
    comms = make_comms(job.layout, job.model, rank, timeout=60.0, transport=job.transport)
    device = torch.device("cpu")
    static = kind(job, comms, rank, device, static=True)
    static.eager = TokenGenerator(job, comms, rank, device)
    static.twice = Twice()
    assert not static.eager.static, "on a CPU the eager form is the default"
    for generator in (static, static.eager):
        for cache in generator.caches.values():
            cache.tensor[:, :, : job.pages * job.page] = torch.nan  # what was never written must not be read
        generator.load(weights_in(job.weights)[1])
    run(Lockstep(static, _hearing(script.asked[0])), static.twice.seen)
    assert static.steps is not None, static.notices
    static.twice.buckets, static.twice.notices = static.steps.buckets, static.notices
    static.twice.shapes = len(static.chooser.matrices)
    comms.close()
    return static.twice
