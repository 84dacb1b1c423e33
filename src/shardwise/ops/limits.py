"""Block sizes of operations with large transients. Free of torch: the prediction of memory uses them, too.

Small tensors are processed whole, large ones in at most 64 blocks, whose transients stay far below the tensor's size.
"""

from shardwise.model.chunking import PIECES


def loss_chunk(logits: int) -> int:
    """Logits per block that the cross-entropy converts to fp32 probabilities, of `logits` in all."""
    return max(1 << 18, logits // PIECES)


def optimizer_chunk(elements: int) -> int:
    """Elements per block that the optimizer converts and updates, of `elements` in all, where gradients or weights are
    not in the precision of the masters."""
    return max(1 << 17, elements // PIECES)


def sum_chunk(elements: int) -> int:
    """Elements per block of a sum in another precision than their own, of `elements` in all."""
    return min(elements, max(1 << 17, elements // PIECES))


QUERY_ROWS = 128
"""Queries per block of scores in attention without a fused kernel."""

SCORES = 1 << 22
"""Scores that attention over a cache holds at a time, where no fused kernel computes them."""

WIDE_OUTPUTS = 8192
"""Rows of an 8-bit matrix per block that is converted to 16 or 32 bits."""

DENSE = 1 << 24
"""Elements of a frozen matrix in fewer bits that a training step converts at a time."""


def dense_rows(outputs: int, inputs: int) -> int:
    """Rows of a frozen matrix [outputs, inputs] in fewer bits per block that is converted."""
    return max(1, min(outputs, DENSE // inputs))


def converted_bytes(base: str, element: int) -> int:
    """Bytes per element of such a block while it is converted to `element` bytes: of all but int8 by way of fp32, of
    NF4 from numbers of 4 bytes for two elements."""
    through = 4 + (element if element != 4 else 0)
    return {"int8": element, "nf4": max(6, through)}.get(base, through)


def row_int8_bytes(outputs: int, inputs: int, *, width: int) -> int:
    """Bytes of an 8-bit matrix: a byte per number and for each row a scale of `width` bytes."""
    return outputs * (inputs + width)


SHORTEST, LONGEST_SHORT = 64, {"float32": 128, "bfloat16": 512}
"""Tokens of a sequence for which a CPU computes the backward of attention as large products; at most, by dtype."""
ATTENTION_ROWS = 128
"""Queries per block of scores."""

CACHED = 1 << 17
"""Elements of a gradient that a core's own cache holds beside what it multiplies."""


def product_chunk(rows: int, columns: int) -> int:
    """Rows of a weight [rows, columns] per block of its gradient, which is computed and then accumulated."""
    return max(1, min(rows, (1 << 19) // columns))


def product_piece(rows: int, columns: int) -> int:
    """Elements of that gradient, on a CPU: smaller ones are added as they are computed."""
    return 0 if rows * columns < CACHED else product_chunk(rows, columns) * columns


_TILE = 48, 512
"""Rows (outputs) and columns (inputs) of the tiles that FBGEMM makes of an 8-bit matrix for AVX-512 VNNI; the last ones
are filled up."""
_BESIDE_ROW = 12
"""Bytes that FBGEMM keeps beside each row: its scale, its zero point and its sum."""
BYTE_ROWS = 64
"""Rows of activations per product with an 8-bit matrix."""


def tiled_int8_bytes(outputs: int, inputs: int) -> int:
    """Bytes of an 8-bit matrix as FBGEMM keeps it. Adjacent matrices share a last tile, so that those of one input take
    up to 47 rows less each."""
    rows, columns = (-(-size // tile) * tile for size, tile in zip((outputs, inputs), _TILE, strict=True))
    return rows * columns + _BESIDE_ROW * outputs


LOSS_BYTES = 1 << 28
"""Bytes of fp32 or fp64 logits that the loss holds at a time. Each row is a thread block: 523 rows of 128,256 columns
fill an H100 four times."""


def loss_rows(rows: int, columns: int, width: int) -> int:
    """Rows of logits per block of the loss, of `rows` in all. width: bytes of a logit in the precision of the sums."""
    return max(1, min(rows, LOSS_BYTES // (columns * width)))
