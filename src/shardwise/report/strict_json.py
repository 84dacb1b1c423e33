"""JSON as the standard has it: without NaN and infinities."""

import math
from collections.abc import Mapping
from typing import Any


def strict(value: Any) -> Any:
    """A copy in which NaN and infinities are the texts "NaN", "Infinity" and "-Infinity", which `float` reads back."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
