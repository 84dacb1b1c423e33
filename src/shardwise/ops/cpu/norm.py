"""RMSNorm of generation on a CPU."""

import torch
from torch import Tensor

from shardwise.decoder.modules import RMSNorm
from shardwise.ops.generate import GenerationContext, norm_factors
from shardwise.ops.products import Product


def mirrored_norm(norm: RMSNorm, at: GenerationContext) -> Product:
    """The layer norm of x beside -x, whose mean is 0 and whose variance is x's mean square: torch has one kernel for
    that, and makes its own `rms_norm` of seven."""
    eps, width, scale = norm.eps, len(norm.weight), norm_factors(norm, at)

    def doubled() -> Tensor:
        weight = scale()
        return torch.cat((weight, weight))

    once = doubled() if at.keep.copies else None  # where matrices are copied the weight will not change

    def forward(x: Tensor) -> Tensor:
        weight = doubled() if once is None else once
        return torch.layer_norm(torch.cat((x, x.neg()), -1), (2 * width,), weight, None, eps)[..., :width]

    return forward
