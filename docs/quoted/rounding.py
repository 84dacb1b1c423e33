"""Where an update is lost: numbers of few bits next to each other, in pure Python.

A number of `FRACTION[dtype]` bits after its leading one is one of 2^bits equally spaced ones between two powers of two.
"""

from __future__ import annotations

import math

from shardwise.errors import UserError

FRACTION = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}
"""Bits of the significand after the leading one (IEEE 754; bfloat16 is the upper half of a float32)."""


def spacing(dtype: str) -> tuple[float, float]:
    """The least and the largest distance to the next number of a type, relative to the number.

    Raises `UserError` for an unknown type.
    """
    bits = _bits(dtype)
    return 2.0 ** -(bits + 1), 2.0**-bits


def surely_lost_below(dtype: str) -> float:
    """Updates below this share of a weight leave it as it is, whatever the weight: half of the least spacing.

    Up to twice as much can be lost, too, just above a power of two. Raises `UserError` for an unknown type.
    """
    return spacing(dtype)[0] / 2


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a type, ties to the even one; without limits on the exponent.

    Raises `UserError` for an unknown type.
    """
    bits = _bits(dtype)
    fraction, exponent = math.frexp(value)
    # Python rounds ties to even, as IEEE 754 does.
    return math.ldexp(round(math.ldexp(fraction, bits + 1)), exponent - bits - 1)


def _bits(dtype: str) -> int:
    if dtype not in FRACTION:
        raise UserError(f"no floating-point type {dtype!r}; known are {', '.join(FRACTION)}")
    return FRACTION[dtype]
