"""Counter-based random numbers: a value is a function of its key alone, never of what was drawn before."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers, elementwise.

    x: an array of at least one dimension (numpy warns when scalars wrap around, and arrays wrap silently).
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(*key: int | str) -> float:
    """A number in [0, 1) that depends on the key only, equal on every machine."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
