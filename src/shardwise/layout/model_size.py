"""Size of a model in a headline: parameters, and those that one token uses where there are experts."""

from __future__ import annotations

from shardwise.model.parameters import Model, count_parts
from shardwise.report.units import format_count


def size_words(model: Model) -> str:
    """`8.03B parameters`, or `117B parameters (5.13B active)` of a model with experts."""
    total, _, active = count_parts(model)
    used = f" ({format_count(active)} active)" if active != total else ""
    return f"{format_count(total)} parameters{used}"


def size_json(model: Model) -> dict[str, int]:
    """Numbers of all parameters, and of those that one token uses."""
    total, _, active = count_parts(model)
    return {"parameters": total, "active_parameters": active}
