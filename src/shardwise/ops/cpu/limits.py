"""Sizes at which the CPU's forms change or work piece by piece. Without torch: the prediction of memory asks, too."""

from __future__ import annotations

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
