"""Inputs of a form besides its module: the options of a run, and the communication around the operation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.decoder.attention import CoreAttention
from shardwise.ops.exchange import COMPLETE, Pending, TokenExchange
from shardwise.ops.fusion import FusedForm
from shardwise.ops.gradients import WeightGradients

Core = Callable[..., Tensor]
"""(q, k, v, batch) -> the output of attention."""

Mode = Literal["train", "compiled", "generate"]
"""train: forward and backward, eagerly; compiled: for the compiler, over the forms of train; generate: forward alone,
with a cache."""


class Redistribute:
    """Communication at the input or output of an operation: none in this class, for an operation that is whole here."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        """The adjoint: the gradient of `forward`'s input, which may still be in progress at an operation's input."""
        return grad, COMPLETE


LOCAL = Redistribute()


class Exchange(torch.autograd.Function):
    """The communication of a `Redistribute`. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, by: Redistribute, x: Tensor) -> Tensor:
        ctx.by = by
        return by.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        grad, pending = ctx.by.backward(grads[0].contiguous())
        pending.wait()
        return None, grad


class Around(NamedTuple):
    """The communication around a linear map."""

    enter: Redistribute = LOCAL
    leave: Redistribute = LOCAL
    late_bias: bool = False
    """Whether the bias is added after `leave`, once, to what every rank then has."""


@dataclass(frozen=True)
class Options:
    """Everything that the choice of a form depends on besides the kind of module."""

    mode: Mode
    device: str = "cpu"
    """Type of the device."""
    split: bool = False
    """Whether maps are split over ranks, so that they communicate."""
    attention: Literal["sdpa", "math"] = "sdpa"
    recompute: str = "none"
    compiled: bool = False
    """Whether a compiler takes this part."""
    fused: FusedForm | None = None
    cut_sequence: bool = False
    """Whether attention goes over sequences that are cut over ranks."""


@dataclass(frozen=True)
class OpContext:
    """One module's surroundings."""

    unit: str
    """Name of its part."""
    options: Options
    name: str = ""
    """Global name of the module."""
    arounds: Mapping[str, Around] = field(default_factory=dict)
    """Global name of a weight -> communication around its map; "vocab" and "lookup" of the table's two uses."""
    weights: WeightGradients = field(default_factory=WeightGradients)
    """When gradients of weights are computed."""
    vocabulary: tuple[int, int] | None = None
    """Token ids whose rows of the table are here; None for all."""
    first_head: int = 0
    """Global index of the first attention head here."""
    across_ranks: Callable[[CoreAttention], Core] | None = None
    """Composes the core of attention over a cut sequence from the form that it has."""

    exchange: TokenExchange | None = None
    """Communication between the tokens here and their experts; None where all experts are here."""

    def around(self, child: str = "") -> Around:
        return self.arounds.get(".".join(filter(None, (self.name, child, "weight"))), Around())
