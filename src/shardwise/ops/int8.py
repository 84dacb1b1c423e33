"""Products with a frozen matrix in 8 bits: its rows are converted to the precision of the inputs block by block.

Forward and backward multiply with the same converted numbers, so that gradients are those of W = numbers x scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.decoder.modules import dequantised
from shardwise.ops.limits import dense_rows


def int8_linear(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. x: [..., in]; numbers: int8 [out, in]; scales: [out], in the precision of x."""
    rows = x.reshape(-1, x.shape[-1])
    y = rows.new_empty(len(rows), len(numbers))
    step = dense_rows(*numbers.shape)
    for start in range(0, len(numbers), step):
        part = slice(start, start + step)
        dense = dequantised(numbers[part], scales[part])
        torch.mm(rows, dense.t(), out=y[:, part])
        del dense  # before the next one is made
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], -1)


def int8_input_gradient(dy: Tensor, numbers: Tensor, scales: Tensor, dx: Tensor | None = None) -> Tensor:
    """dy W [T, in], added to `dx` where that is given. dy: [T, out]."""
    step = dense_rows(*numbers.shape)
    for start in range(0, len(numbers), step):
        part = slice(start, start + step)
        dense = dequantised(numbers[part], scales[part])
        dx = dy[:, part] @ dense if dx is None else dx.addmm_(dy[:, part], dense)
        del dense
    assert dx is not None
    return dx
