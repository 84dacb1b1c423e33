"""Elements of a dropout mask that are drawn at a time: the decoder draws them, the prediction of memory counts them."""

PIECES = 64
"""Pieces of a large tensor that an operation takes one after the other."""


def dropout_chunk(elements: int) -> int:
    """Of so many elements, those whose mask is drawn at a time: the hash works on 64-bit counters, which dwarf them."""
    return max(1 << 15, elements // PIECES)
