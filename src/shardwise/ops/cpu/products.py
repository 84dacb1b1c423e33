"""A CPU's products with a matrix that stays, laid out anew for the processor.

A token's arithmetic is reading weights. oneDNN reads a matrix that it has laid out itself about twice as fast as a
row-major one, in bf16 and fp32, for few rows as for many; FBGEMM does one of 8 bits.
"""

import warnings

import torch
from torch import Tensor

from shardwise.ops.limits import BYTE_ROWS, tiled_int8_bytes
from shardwise.ops.products import Int8, MakeProduct, Product, quantise

_ROWS = 8
"""Rows for which oneDNN lays a matrix out; what it chooses for these does well from 1 to 256."""
_QUICK = 4
"""Rows as which one or two go in: oneDNN takes longer for those than for three to six."""

_BYTE, _ZERO = 127, 128
"""The largest number that a byte stands for, and the byte of 0."""
_LEAST = torch.tensor([torch.finfo(torch.float32).tiny])
"""Added to a row's step, so that rows of zeros are divided by something."""


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

        def product(x: Tensor) -> Tensor:
            count = x.numel() // x.shape[-1]
            if count not in (1, 2):
                return linear(x, packed, bias, "none", [], "")
            rows = x.reshape(count, -1)
            rows = rows.expand(_QUICK, -1) if count == 1 else rows.repeat(_QUICK // count, 1)
            return linear(rows, packed, bias, "none", [], "")[:count].view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return weight.nbytes


def int8(dtype: torch.dtype, device: torch.device) -> MakeProduct:
    """8 bits a number, and one scale for each row (output)."""
    return FbgemmInt8() if FbgemmInt8.serves(dtype, device) else Int8()


class FbgemmInt8:
    """8-bit matrices by FBGEMM's product of bytes, for which CPUs have instructions (VNNI).

    A row of activations becomes m / 127 (high + low / 254), m its largest magnitude, and high and low are two rows of
    one product, so that the matrix is read once. To a row's large numbers 16 bits are more than bf16's own 8.
    """

    copies = True

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        if device.type != "cpu" or dtype != torch.bfloat16:
            return False
        return "fbgemm" in torch.backends.quantized.supported_engines and torch.cpu._is_vnni_supported()

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        packed = _laid_out(*quantise(weight))
        linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

        def some(rows: Tensor) -> Tensor:
            """rows: [n, in] -> [n, out]."""
            x = rows.float()
            step = torch.add(_LEAST, x.abs().amax(1, keepdim=True), alpha=1 / _BYTE)
            both = x.new_empty(2, *x.shape)
            high, low = both.unbind()
            torch.div(x, step, out=low)
            torch.round(low, out=high)
            low.sub_(high).mul_(2 * _BYTE)
            y, finer = linear(both, 1.0, _ZERO, packed).unbind()
            return y.add_(finer, alpha=1 / (2 * _BYTE)).mul_(step).to(rows.dtype)

        def product(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            y = some(rows) if len(rows) <= BYTE_ROWS else torch.cat([some(part) for part in rows.split(BYTE_ROWS)])
            if bias is not None:
                y += bias
            return y.view(*x.shape[:-1], -1)

        return product

    def nbytes(self, weight: Tensor) -> int:
        return tiled_int8_bytes(*weight.shape)


def _laid_out(numbers: Tensor, scales: Tensor) -> torch.ScriptObject:
    """FBGEMM's own layout of a matrix [out, in] of bytes with a scale for each row."""
    quantized, before = torch.backends.quantized, torch.backends.quantized.engine
    quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # Tensors of quantized types are to go from torch, and nothing else is taken here (2.13).
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            matrix = torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(matrix, None)
    finally:
        quantized.engine = before
