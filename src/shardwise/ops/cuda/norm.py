"""RMSNorm by torch's own kernels: one forward, and one or two backward, where elementwise operators take sixteen.

Saves its input and 1/rms of each row, as the decoder's own does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.modules import RMSNorm
from shardwise.ops.context import OpContext


def norm_forward(x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight, 1 / rms(x) [..., 1]), the latter in fp32 for bf16."""
    normed, rstd = torch.ops.aten._fused_rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return normed, rstd


def norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    backward = torch.ops.aten._fused_rms_norm_backward
    dx, dw = backward(dy, x, norm.weight.shape, rstd, norm.weight, [True, True])
    return dx, dw


def fused_norm(norm: RMSNorm, at: OpContext) -> Callable[[Tensor], Tensor] | None:
    """torch's RMSNorm; None for a zero-centered weight, which it does not know."""
    if norm.zero_centered:
        return None
    return lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
