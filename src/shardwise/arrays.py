"""The type of a number, or of the numbers of many layouts, which are computed at once."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Num: TypeAlias = float | Array
    """A number, or an array with one number for every layout."""
else:
    Array = Num = Any
