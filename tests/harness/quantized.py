"""Layouts that pack what they send, and block quantization in NumPy."""

import numpy as np

from harness.space import SPACES, cases
from shardwise.layout.wire import BLOCK

GRADIENT_POINTS = [
    point
    for name in SPACES
    for point in [p for p in cases(name) if p.layout.stage and p.layout.precision != "fp64"][::9]
]
"""Points whose gradients can be packed."""


def rounded(values: np.ndarray) -> np.ndarray:
    """Each block of 256 in integers from -7 to 7 times a scale, with fp32 arithmetic."""
    found = np.empty_like(values)
    for a in range(0, len(values), BLOCK):
        block = values[a : a + BLOCK]
        scale = np.float32(np.abs(block).max()) / np.float32(7)
        found[a : a + BLOCK] = np.rint(block / scale if scale else block) * scale
    return found
