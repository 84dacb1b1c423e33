"""A number, or numbers of many layouts that are computed at once."""

from typing import Any, TypeAlias

from numpy.typing import NDArray

Num: TypeAlias = float | NDArray[Any]
"""A number, or an array with an element for each of many layouts."""
Array: TypeAlias = NDArray[Any]
