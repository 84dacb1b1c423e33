# mypy: ignore-errors
"""Triton kernels of the cross-entropy: each reads the logits once. torch brings Triton with it for CUDA; nothing else
may import this module first.

Sums are in fp32. Annotations are objects here, not strings: Triton looks for `tl.constexpr` among them.
"""

import triton
import triton.language as tl


@triton.jit
def log_sums(rows, out, columns, BLOCK: tl.constexpr):
    """out [n]: log-sum-exp of each row of rows [n, columns], one program each (online softmax, Milakov and Gimelshein
    2018). A row's first column is a finite number, or its sum is none."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    begin = rows + row.to(tl.int64) * columns
    top = tl.load(begin).to(tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(begin + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x))
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    tl.store(out + row, top + tl.log(tl.sum(sums)))


@triton.jit
def differentiate(rows, sums, factors, targets, there, columns, BLOCK: tl.constexpr):
    """Overwrite rows [n, columns] with exp(rows - sums) factors, and `there` added at the target columns; all others
    are [n]."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = rows + row.to(tl.int64) * columns + at
    kept = at < columns
    x = tl.load(places, mask=kept, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(sums + row)) * tl.load(factors + row)
    y += tl.where(at == tl.load(targets + row), tl.load(there + row), 0.0)
    tl.store(places, y.to(rows.dtype.element_ty), mask=kept)
