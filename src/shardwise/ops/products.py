"""Products with a matrix that stays: as it was read, or in 8 bits; CPUs have more (`cpu/products.py`)."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.bases import quantise
from shardwise.ops.limits import WIDE_OUTPUTS, row_int8_bytes

_FEW = 32
"""Rows up to which 8-bit matrices are multiplied with as they are; more pay for turning them back first."""
_VECTOR = 32
"""Elements per block of a product."""

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> x W^T + b [..., out]."""


class MakeProduct(Protocol):
    """Form in which matrices are stored. copies: whether what it returns needs the given tensors no more."""

    copies: bool

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """weight: [out, in]; bias: [out] or None."""

    def nbytes(self, weight: Tensor) -> int:
        """Bytes that the matrix then takes."""


class Plain:
    """The matrix as it is in its flat buffer."""

    copies = False

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: F.linear(x, weight, bias)

    def nbytes(self, weight: Tensor) -> int:
        return weight.nbytes


class Int8:
    """8-bit matrices by torch's product for them: weights alone are rounded, activations are not."""

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
                y = widened(rows, numbers).mul_(scales)
            else:
                y = torch._weight_int8pack_mm(rows, numbers, scales)
            if bias is not None:
                y += bias
            return y.view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return row_int8_bytes(*weight.shape, width=weight.element_size())


def widened(rows: Tensor, numbers: Tensor) -> Tensor:
    """rows [n, in] times `numbers` [out, in], which are converted to the rows' type block by block: [n, out]."""
    if len(numbers) <= WIDE_OUTPUTS:
        return F.linear(rows, numbers.to(rows.dtype))
    y = rows.new_empty(len(rows), len(numbers))
    for into, some in zip(y.split(WIDE_OUTPUTS, 1), numbers.split(WIDE_OUTPUTS), strict=True):
        into.copy_(F.linear(rows, some.to(rows.dtype)))
    return y
