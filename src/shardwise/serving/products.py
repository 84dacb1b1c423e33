"""Products with a matrix that stays: as it was read, laid out anew for the processor, or in 8 bits.

A token's arithmetic is reading weights. On CPUs oneDNN reads a matrix that it has laid out itself about twice as fast
as a row-major one, in bf16, fp32 and 8 bits, and for few rows as for many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.predict.generation.fit import BYTE_ROWS, SCALE_BYTES, WIDE_OUTPUTS

_ROWS = 8
"""Rows for which oneDNN lays a matrix out; what it chooses for these does well from 1 to 256."""
_FEW = 32
"""Rows up to which 8-bit matrices are multiplied with as they are; more pay for turning them back first."""

_VECTOR = 32
"""Numbers that are multiplied at a time."""

_LARGEST = 32600
"""What the largest activation of a row becomes: both bytes of every whole number up to it are then in their range."""
_CENTRE = torch.tensor([128.0 * 257 + 0.5])
"""Added to whole numbers of both signs: each byte is 128 larger, and cutting off rounds."""
_SIGNED = torch.zeros(1, dtype=torch.int32)
"""The zero point of weights."""

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


def int8(dtype: torch.dtype, device: torch.device) -> MakeProduct:
    """8 bits a number, and one scale for each row (output)."""
    return Bytes() if Bytes.serves(dtype, device) else Int8()


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
                y = _widened(rows, numbers).mul_(scales)
            else:
                y = torch._weight_int8pack_mm(rows, numbers, scales)
            if bias is not None:
                y += bias
            return y.view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return weight.numel() + len(weight) * weight.element_size()


def _widened(rows: Tensor, numbers: Tensor) -> Tensor:
    """rows [n, in] times `numbers` [out, in], some of which at a time are turned back to the rows' type: [n, out]."""
    if len(numbers) <= WIDE_OUTPUTS:
        return F.linear(rows, numbers.to(rows.dtype))
    y = rows.new_empty(len(rows), len(numbers))
    for into, some in zip(y.split(WIDE_OUTPUTS, 1), numbers.split(WIDE_OUTPUTS), strict=True):
        into.copy_(F.linear(rows, some.to(rows.dtype)))
    return y


class Bytes:
    """8-bit matrices by oneDNN's product of bytes, for which CPUs have instructions (VNNI): with one row as fast as
    torch's, with eight 1.5 to 2 times as fast.

    A row of activations becomes m / 32600 (256 high + low), m its largest magnitude, and high and low are two rows of
    one product, so that the matrix is read once. To a row's large numbers 16 bits are more than bf16's own 8.
    """

    copies = True

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
            return False
        return torch.cpu._is_vnni_supported()

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        numbers, scales = quantise(weight)
        packed, scales = torch.ops.onednn.qlinear_prepack(numbers, None), scales.float() / _LARGEST
        linear = torch.ops.onednn.qlinear_pointwise.default

        def some(rows: Tensor) -> Tensor:
            """rows: [n, in] -> [n, out]."""
            largest: Tensor | float
            count = len(rows)
            if alone := count == 1:  # takes fewer operators, and oneDNN takes longer for two rows than for four
                largest = float(rows.abs().max())
                whole = torch.add(_CENTRE, rows, alpha=_LARGEST / largest if largest else 0.0)
            else:
                largest = rows.abs().amax(1, keepdim=True).float()
                whole = torch.mul(rows, _LARGEST / largest).add_(_CENTRE)
            whole = whole.to(torch.int32)
            halves = torch.cat((whole, whole >> 8) * (2 if alone else 1)).to(torch.uint8)
            scale = largest if alone else 1.0
            y = linear(halves, scale, 128, packed, scales, _SIGNED, None, 1.0, 0, torch.float32, "none", [], "")
            y = y[:count].add_(y[count : 2 * count], alpha=256)
            return (y if alone else y.mul_(largest)).to(rows.dtype)

        def product(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            y = some(rows) if len(rows) <= BYTE_ROWS else torch.cat([some(part) for part in rows.split(BYTE_ROWS)])
            if bias is not None:
                y += bias
            return y.view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return weight.numel() + SCALE_BYTES[2] * len(weight)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], scales [out] in the weight's dtype): rows of W are numbers x scale, the nearest there are."""
    scales = (weight.abs().amax(1).float() / 127).clamp_(min=torch.finfo(torch.float32).tiny).to(weight.dtype)
    numbers = (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return numbers, scales
