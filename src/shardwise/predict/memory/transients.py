"""Transients that parts of a decoder share: collectives along the sequence, norms, dropout, gradients of weights.

Each function gives bytes that exist for a moment beside what a computation is given and returns. `LiveBytes` counts
those of a longer sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.layout.axes import TP
from shardwise.layout.units import UnitPlan
from shardwise.model.chunking import dropout_chunk
from shardwise.ops.limits import product_piece
from shardwise.predict.memory.buffers import wide_chunk

if TYPE_CHECKING:
    from shardwise.predict.memory.sizes import Sizes


class LiveBytes:
    """Bytes allocated, beyond those at the start, and the most at one time."""

    __slots__ = ("most", "now")

    def __init__(self) -> None:
        self.now = self.most = 0

    def allocate(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.most:
            self.most = self.now

    def free(self, nbytes: int) -> None:
        self.now -= nbytes

    def transient(self, nbytes: int) -> None:
        """Bytes that are allocated and freed at once."""
        if self.now + nbytes > self.most:
            self.most = self.now + nbytes


def scatter(plan: UnitPlan, s: Sizes, width: int = 0) -> int:
    """A reduce-scatter of activations of a width, 0 for the stream's: partial sums, the same in pieces, on gloo the
    peers' pieces; the result, and for bf16 a chunk of its sum in fp32."""
    width = width or s.hidden
    full, result = s.tokens * width * s.element, s.stream * width
    if plan.schedules.of("reduce_scatter", TP):
        return (1 if plan.layout.micro == 1 else 2) * full + result * s.element
    copies = (1 if plan.layout.micro == 1 else 2) + (plan.backend == "gloo")
    return copies * full + result * s.element + wide_chunk(result, plan.layout.dtype, plan.layout.tp)


def gather(plan: UnitPlan, s: Sizes, width: int = 0) -> int:
    """An all-gather of activations of a width, 0 for the stream's: the result, and the ranks' pieces where these do not
    lie as the result does."""
    return (1 if plan.layout.micro == 1 else 2) * s.tokens * (width or s.hidden) * s.element


def fuses_norms(plan: UnitPlan) -> bool:
    """Whether a norm is torch's own kernel, with no tensors beside its result (`ops/cuda/norm.py`)."""
    return plan.model.norm != "rmsnorm" or (plan.cuda and not plan.model.norm_zero_centered)


def norm_forward(plan: UnitPlan, s: Sizes, elements: int, compiled: bool = False) -> int:
    """RMSNorm of bf16: the input, and its product with 1/rms, in fp32. compiled: whether it is in compiled code."""
    return 0 if compiled or fuses_norms(plan) or s.element != 2 else 2 * 4 * elements


def norm_backward(plan: UnitPlan, s: Sizes, elements: int, compiled: bool = False) -> int:
    """RMSNorm: normed input, its product with the gradient; for bf16 in fp32, with a copy of that. The result is one of
    these."""
    if compiled or fuses_norms(plan):
        return elements * s.element
    return elements * (3 * 4 + 2 if s.element == 2 else 2 * s.element)


def rolled(plan: UnitPlan, nbytes: int) -> int:
    """Rotary embedding of queries or keys of so many bytes: the rotated part, rolled. On CUDA none
    (`ops/cuda/rotary.py`)."""
    return 0 if plan.cuda else nbytes * plan.model.rotated // plan.model.head_dim


def dropout(elements: int, rows: int) -> int:
    """The hash of a chunk of a mask: counters and two copies of 8 bytes each; and each row's first counter, twice."""
    return 3 * 8 * min(elements, dropout_chunk(elements)) + 2 * 8 * rows


def weight_gradient(plan: UnitPlan, s: Sizes, rows: int, columns: int) -> int:
    """A piece of the gradient of a weight [rows, columns] before it is added to what is there."""
    return 0 if plan.cuda else product_piece(rows, columns) * s.element
