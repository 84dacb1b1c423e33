"""Products with a matrix that stays: as it was read, laid out anew for the processor, or in 8 bits.

A token's arithmetic is reading weights. On CPUs oneDNN reads a matrix that it has laid out itself about twice as fast
as a row-major one, in bf16 as in fp32 and for few rows as for many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 8
"""Rows for which oneDNN lays a matrix out; what it chooses for these does well from 1 to 256."""
_FEW = 32
"""Rows up to which 8-bit matrices are multiplied with as they are; more pay for turning them back first."""

_VECTOR = 32
"""Numbers that are multiplied at a time."""

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> x W^T + b [..., out]."""


class MakeProduct(Protocol):
    """How matrices are kept. copies: whether what it returns needs the given tensors no more."""

    copies: bool

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """weight: [out, in]; bias: [out] or None."""

    def nbytes(self, weight: Tensor) -> int:
        """Bytes that the matrix then takes."""


class Plain:
    """The matrix as it lies in its flat buffer."""

    copies = False

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: F.linear(x, weight, bias)

    def nbytes(self, weight: Tensor) -> int:
        return weight.nbytes


class Packed:
    """oneDNN's own layout of it (`torch.ops.mkldnn`, as torch's compiler uses it)."""

    copies = True

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _ROWS)
        linear = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: linear(x, packed, bias, "none", [], "")

    def nbytes(self, weight: Tensor) -> int:
        return weight.nbytes


class Int8:
    """8 bits a number, and one scale for each row (output): weights alone are rounded, activations are not."""

    copies = True

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        numbers, scales = quantise(weight)
        # torch's product reads beyond the end of rows of other lengths (2.13, bf16, 72 columns).
        padding = -weight.shape[1] % _VECTOR
        numbers = F.pad(numbers, (0, padding))

        def product(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            rows = F.pad(rows, (0, padding)) if padding else rows
            if len(rows) > _FEW:
                y = F.linear(rows, numbers.to(x.dtype)).mul_(scales)
            else:
                y = torch._weight_int8pack_mm(rows, numbers, scales)
            if bias is not None:
                y += bias
            return y.view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return weight.numel() + len(weight) * weight.element_size()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], scales [out] in the weight's dtype): rows of W are numbers x scale, the nearest there are."""
    scales = (weight.abs().amax(1).float() / 127).clamp_(min=torch.finfo(torch.float32).tiny).to(weight.dtype)
    numbers = (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return numbers, scales
