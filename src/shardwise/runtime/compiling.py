"""compile=block: every decoder block goes through torch.compile, once for all blocks.

One compiled function serves all blocks: their weights are its inputs, so blocks of equal shape differ in data alone.
What it cannot hold stays eager and splits it in pieces: the linear maps of tensor parallelism, which communicate, and
dropout, whose masks are hashes of counters that change every step. A block without either is one graph, which under
recompute=full contains the recomputation: the compiler leaves out what backward does not read, such as the last map.

Blocks are compiled when the program is built, on zeros: what is missing for it is said before any step, and no step's
time has compilation in it. Importing this module brings in the compiler, which takes seconds.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from shardwise.decoder import Batch, Decoder
from shardwise.errors import UserError
from shardwise.layout.units import UnitPlan
from shardwise.ops.gradients import grad_slot
from shardwise.ops.table import install, lower
from shardwise.runtime.job.setup import blank_batch
from shardwise.runtime.tensor.lowering import context_of
from shardwise.runtime.torch_versions import compile_apart, default_backend

Block = Any
"""A block of either decoder."""


class CompiledBlocks(NamedTuple):
    """Result of `compile_blocks`."""

    seconds: float
    whole: bool
    """Whether a block is one graph."""


def compile_blocks(decoder: Decoder, plan: UnitPlan, device: torch.device) -> CompiledBlocks:
    """Compile the rank's blocks, at least one, whose parameters are bound to memory.

    Under tensor parallelism all ranks must call this together: a block is run once, collectives included. Raises
    `UserError` where torch.compile lacks a compiler, or fails.
    """
    started = time.perf_counter()
    check_compiler(device)
    parts = dict(decoder.parts())
    blocks = {name: parts[name] for name in plan.of_kind("block")}
    lowered = [lower(block, context_of(name, "compiled", plan, None, device)) for name, block in blocks.items()]
    whole = not any(block.breaks for block in lowered)
    # apart: a process may hold several programs, and their compilations would count as one another's
    first: Block = blocks[plan.local.first_blocks[0]]
    inside = whole and plan.layout.recompute == "full"
    compiled = compile_apart(_recomputed if inside else type(first).forward, fullgraph=whole)
    for block in blocks.values():
        install(block, _calling(compiled, block))
        vars(block)["recomputes"] = inside
    try:
        _run_once(first, plan, device)
    except TorchDynamoException as error:
        raise _failed(error) from error
    return CompiledBlocks(time.perf_counter() - started, whole)


def _failed(error: Exception) -> UserError:
    return UserError(
        f"compile=block: torch.compile failed: {_first_line(error)}; leave compile=block out to train without it"
    )


class ModuleBlocks:
    """The blocks of a user's module, compiled in the first step: one function per class. What communicates, and
    what the compiler does not know, stays eager."""

    def __init__(self, device: torch.device) -> None:
        check_compiler(device)
        self._by_class: dict[type[nn.Module], Callable[..., Any]] = {}

    def compiled(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a block; a block that is a map of its own has none to compile. Raises `UserError` where
        torch.compile fails."""
        if "forward" in vars(block):
            return forward
        kind = type(block)
        if kind not in self._by_class:
            self._by_class[kind] = compile_apart(kind.forward, fullgraph=False)
        function = self._by_class[kind]

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(block, *args, **kwargs)
            except TorchDynamoException as error:
                raise _failed(error) from error

        return run


def write_gradients(block: Block) -> None:
    """Let the gradients that a whole compiled block's backward returns be copied to their slots, or added to what is
    there. Autograd would add them to slots of zeros, in twice as many passes over memory."""
    weights = [weight for weight in block.parameters() if weight.requires_grad]
    compiled = block.forward

    def forget(grads: object) -> None:
        for weight in weights:
            weight.grad = None  # so that autograd hands the gradient over as it is

    def keep(weight: Tensor) -> None:
        assert weight.grad is not None
        slot = grad_slot(weight)
        slot.add(weight.grad)
        weight.grad = slot.view

    def forward(x: Tensor, batch: Batch) -> Tensor:
        y: Tensor = compiled(x, batch)
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(forget)
        return y

    for weight in weights:
        weight.register_post_accumulate_grad_hook(keep)
    install(block, forward)


def _recomputed(block: Block, x: Tensor, batch: Batch) -> Tensor:
    forward = type(block).forward
    out: Tensor = checkpoint(forward, block, x, batch, use_reentrant=False, preserve_rng_state=False)
    return out


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` where torch.compile's own backend has nothing to compile with on `device`."""
    if default_backend() != "inductor":
        return
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(
                "compile=block needs Triton and a GPU that it supports (compute capability 7.0 or newer): "
                "pip install triton, or leave compile=block out"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "compile=block needs a C++ compiler: install g++ (Debian, Ubuntu: apt-get install g++), or name another "
            "one in the environment variable CXX, or leave compile=block out"
        ) from None


def _first_line(error: BaseException) -> str:
    """A compiler's message, or the error's own first line."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line.lower()), lines[0] if lines else type(inner).__name__)


def _calling(compiled: Callable[[Block, Tensor, Batch], Tensor], block: Block) -> Callable[[Tensor, Batch], Tensor]:
    """`compiled` with all that it distinguishes made equal: what blocks share is there, and no gradient is none."""

    def forward(x: Tensor, batch: Batch) -> Tensor:
        block.attention.share(batch, x.dtype)
        return compiled(block, x if torch.is_grad_enabled() else x.detach(), batch)

    return forward


def _run_once(block: Block, plan: UnitPlan, device: torch.device) -> None:
    """Forward without and with gradients, and backward, on zeros; accumulated gradients stay as they are where autograd
    adds them up, and elsewhere every step forgets them before it begins."""
    batch, _ = blank_batch(plan, device)
    weights = list(block.parameters())
    x = torch.zeros(*batch.stream_index.shape, plan.model.hidden, dtype=weights[0].dtype, device=device)
    with torch.no_grad():
        block(x, batch)
    x.requires_grad_()
    y = block(x, batch)
    torch.autograd.grad(y, [x, *weights], torch.zeros_like(y), allow_unused=True)
