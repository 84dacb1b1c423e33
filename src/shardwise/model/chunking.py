"""How many elements the memory-hungry operations work on at a time.

Known to those who compute (decoder, runtime) and to those who count memory (predict), so it lives below both. Small
tensors are taken whole; large ones in at most 64 pieces, whose transients then stay far below the tensor itself.
"""

PIECES = 64


def loss_chunk(logits: int) -> int:
    """Of so many logits, those that the cross-entropy turns into wide probabilities at a time."""
    return max(1 << 18, logits // PIECES)


def dropout_chunk(elements: int) -> int:
    """Of so many elements, those whose mask is drawn at a time: the hash works on 64-bit counters, which dwarf them."""
    return max(1 << 15, elements // PIECES)


def optimizer_chunk(elements: int) -> int:
    """Of so many elements of an interval, those that the optimizer converts and updates at a time, where gradients or
    weights are not in the precision of the masters."""
    return max(1 << 17, elements // PIECES)
