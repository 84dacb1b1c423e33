"""Recompute: run a piece of the decoder without saving, and again when its backward comes (Chen et al. 2016).

`none` saves everything, `selective` recomputes the attention core, `full` each block, `input` all blocks from the
first one's input: memory of one block at a quadratic cost. Dropout draws the same masks again by its counters.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder.attention import CoreAttention
from shardwise.ops.context import OpContext

_running = threading.local()


def computes_again() -> bool:
    """Whether this thread computes a piece for its saved tensors alone: its output has been there before, and the last
    operation of a piece may leave it out."""
    return bool(getattr(_running, "again", False))


def watch(watcher: Callable[[bool], object] | None) -> None:
    """Call `watcher` where a piece begins to be computed again (True), and where that ends; None: no watcher."""
    global _watcher
    _watcher = watcher


_watcher: Callable[[bool], object] | None = None


@contextmanager
def _again() -> Iterator[None]:
    _running.again = True
    if _watcher is not None:
        _watcher(True)
    try:
        yield
    finally:
        _running.again = False
        if _watcher is not None:
            _watcher(False)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), _again():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grads)
        return (None, *(x.grad for x in inputs))


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`run(*inputs)`, saving only the inputs; parameters that `run` uses get their gradients as usual."""
    out: Tensor = _Recompute.apply(run, *inputs)  # type: ignore[no-untyped-call]
    return out


def recomputed_core(core: CoreAttention, at: OpContext) -> Callable[..., Tensor]:
    """recompute=selective: attention's core saves q, k and v alone."""
    plain = core.forward
    return lambda q, k, v, batch: recompute(lambda q, k, v: plain(q, k, v, batch), q, k, v)
