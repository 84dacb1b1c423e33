"""How many elements the memory-hungry operations work on at a time.

Known to those who compute (decoder, runtime) and to those who count memory (predict), so it lives below both. Small
tensors are taken whole; large ones in at most 64 pieces, whose transients then stay far below the tensor itself.
"""

PIECES = 64


def loss_chunk(logits: int) -> int:
    """Of so many logits, those that the cross-entropy turns into wide probabilities at a time."""
    return max(1 << 18, logits // PIECES)


SHORTEST, LONGEST_SHORT = 64, {"float32": 128, "bfloat16": 512}
"""Tokens of a sequence for which a CPU computes the backward of attention as large products; at most, by dtype."""
ATTENTION_ROWS = 128
"""Queries of a sequence whose scores it holds at a time."""


CACHED = 1 << 17
"""Elements of a gradient that a core's own cache holds beside what it multiplies."""


def product_chunk(rows: int, columns: int) -> int:
    """Of a weight [rows, columns], those rows whose gradient is computed before it is added to what is there."""
    return max(1, min(rows, (1 << 19) // columns))


def product_piece(rows: int, columns: int) -> int:
    """Elements of that gradient, on a CPU: smaller ones are added as they are computed."""
    return 0 if rows * columns < CACHED else product_chunk(rows, columns) * columns


def dropout_chunk(elements: int) -> int:
    """Of so many elements, those whose mask is drawn at a time: the hash works on 64-bit counters, which dwarf them."""
    return max(1 << 15, elements // PIECES)


def optimizer_chunk(elements: int) -> int:
    """Of so many elements of an interval, those that the optimizer converts and updates at a time, where gradients or
    weights are not in the precision of the masters."""
    return max(1 << 17, elements // PIECES)


def sum_chunk(elements: int) -> int:
    """Of so many elements, those that are added up at a time in another precision than they are in."""
    return min(elements, max(1 << 17, elements // PIECES))
