"""How many elements the memory-hungry operations work on at a time.

Known to those who compute (decoder, runtime) and to those who count memory (predict), so it lives below both.
"""

LOSS_CHUNK = 1 << 20
"""Logits that the cross-entropy turns into wide probabilities at a time."""

DROPOUT_CHUNK = 1 << 15
"""Elements whose dropout mask is drawn at a time: the hash works on 64-bit counters, which dwarf the activations."""
