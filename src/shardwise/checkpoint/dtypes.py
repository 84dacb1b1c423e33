"""The element types that a checkpoint stores, without torch: bfloat16, which numpy lacks, is the upper half of a
float32, held as `uint16`."""

import numpy as np

from shardwise.errors import UserError

CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""torch's name -> safetensors' name."""

_NUMPY = {"float64": "<f8", "float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
_BITS = {8: "<u8", 4: "<u4", 2: "<u2"}


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype for the elements of `name`; `uint16` for bfloat16. Raises `UserError` for another type."""
    if name not in _NUMPY:
        raise UserError(f"checkpoints do not store {name}; they store {', '.join(_NUMPY)}")
    return np.dtype(_NUMPY[name])


def bits(array: np.ndarray) -> np.ndarray:
    """Elements as unsigned integers: copying these keeps every NaN as it is."""
    return array.view(_BITS[array.dtype.itemsize])


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, to read or to fill."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def finite(array: np.ndarray, dtype: str) -> bool:
    """Whether all elements are finite; those of bfloat16 as `uint16`."""
    if dtype == "bfloat16":
        return not bool(((array & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(array).all())


def convert(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """Elements of dtype `source` rounded (to nearest, ties to even) to dtype `target`; the same array when equal."""
    if source == target:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        wide = (array.astype("<u4") << 16).view("<f4") if source == "bfloat16" else array
        if target != "bfloat16":
            return wide.astype(_NUMPY[target], copy=False)
        wide = _float32_to_odd(wide) if source == "float64" else wide.astype("<f4", copy=False)
    word = wide.view("<u4")
    # Ties go to even: half of the last place that is kept, less one where that place is even already.
    rounded = ((word + (0x7FFF + ((word >> 16) & 1))) >> 16).astype("<u2")
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).astype("<u2", copy=False)


def _float32_to_odd(array: np.ndarray) -> np.ndarray:
    """Round float64 to float32 by truncation, with the last bit set where anything was cut off ("round to odd", Boldo
    and Melquiond 2008). Rounding the result to fewer bits gives the same as rounding once; to nearest, values
    close to the midpoint of two would become the midpoint first.
    """
    near = array.astype("<f4")
    word = near.view("<u4").copy()
    word[np.abs(near) > np.abs(array)] -= 1
    word[near != array] |= 1
    return np.where(np.isnan(array), near, word.view("<f4"))
