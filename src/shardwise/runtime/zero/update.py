"""One update of flat tensors by AdamW, or by SGD with or without momentum. It is independent of the layout.

Weight decay means the same for all three: weights shrink by lr x weight_decay, apart from the gradient (decoupled, as
AdamW's). torch.optim.SGD adds it to the gradient instead, where momentum would average it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.runtime.job.config import OptimizerConfig

LANES = 16
"""Elements of the longest vector of a CPU (fp32, AVX-512)."""
BLOCK = {"cpu": 1 << 17, "cuda": 1 << 21}
"""Elements that momentum decays and then updates, while a cache of the device holds them."""


def divides(kind: str, gradient: Tensor) -> bool:
    """Whether the update divides gradients as it reads them: AdamW's kernel on CUDA, by a number in fp32. That saves a
    pass over memory; a CPU's cache holds the chunk of gradients anyway."""
    return kind == "adamw" and gradient.is_cuda and gradient.dtype == torch.float32


def update(
    kind: str,
    tensors: Sequence[Tensor],
    step: Tensor,
    config: OptimizerConfig,
    lr: float,
    decay: bool,
    divisor: Tensor | None = None,
) -> None:
    """One update in place. kind: one of `OPTIMIZERS`. tensors: flat weights, gradient, and the optimizer's moments.
    step: number of updates, this one included. decay: whether `config.weight_decay` applies. divisor: of the gradient,
    fp32, where the update `divides`.

    On CPU torch computes the last elements of a call, fewer than a vector has, in other instructions, which round
    differently. They are filled up, so that the bits of an update do not depend on how an interval is cut.
    """
    fused, weight_decay = _FUSED[kind], config.weight_decay if decay else 0.0
    if divisor is not None:
        _adamw(tensors, step, config, lr, weight_decay, divisor)
        return
    rest = 0 if tensors[0].is_cuda else len(tensors[0]) % LANES
    if rest:
        filled = [torch.zeros(LANES, dtype=tensor.dtype) for tensor in tensors]
        for into, tensor in zip(filled, tensors, strict=True):
            into[:rest].copy_(tensor[-rest:])
        fused(filled, step, config, lr, weight_decay)
        for into, tensor in zip(filled, tensors, strict=True):
            tensor[-rest:].copy_(into[:rest])
    if rest < len(tensors[0]):
        fused([tensor[: len(tensor) - rest] for tensor in tensors], step, config, lr, weight_decay)


def _adamw(
    tensors: Sequence[Tensor],
    step: Tensor,
    config: OptimizerConfig,
    lr: float,
    weight_decay: float,
    divisor: Tensor | None = None,
) -> None:
    weights, gradient, first, second = ([tensor] for tensor in tensors)
    torch._fused_adamw_(
        weights, gradient, first, second, [], [step], lr=lr, beta1=config.betas[0], beta2=config.betas[1],
        weight_decay=weight_decay, eps=config.eps, amsgrad=False, maximize=False, grad_scale=divisor,
    )  # fmt: skip


def _momentum(tensors: Sequence[Tensor], step: Tensor, config: OptimizerConfig, lr: float, weight_decay: float) -> None:
    size = BLOCK[tensors[0].device.type]
    for weights, gradient, first in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        if weight_decay:
            weights.mul_(1 - lr * weight_decay)
        _fused_sgd([weights], [gradient], [first], lr, config.momentum)


def _sgd(tensors: Sequence[Tensor], step: Tensor, config: OptimizerConfig, lr: float, weight_decay: float) -> None:
    weights, gradient = ([tensor] for tensor in tensors)
    # Without an average, decay that is added to the gradient is decoupled decay.
    _fused_sgd(weights, gradient, [], lr, momentum=0.0, weight_decay=weight_decay)


def _fused_sgd(
    weights: list[Tensor],
    gradient: list[Tensor],
    first: list[Tensor],
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
) -> None:
    torch._fused_sgd_(
        weights,
        gradient,
        first,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


_FUSED: dict[str, Callable[[Sequence[Tensor], Tensor, OptimizerConfig, float, float], None]] = {
    "adamw": _adamw,
    "momentum": _momentum,
    "sgd": _sgd,
}
