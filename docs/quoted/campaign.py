"""A whole training run: its operations, and how many devices finish it in a given time."""

from __future__ import annotations

import math

from shardwise.errors import UserError

DAY = 86400.0
"""Seconds."""


def rule_of_thumb(parameters: float, tokens: float) -> float:
    """6ND: FLOPs of training N parameters on D tokens, without attention (Kaplan et al. 2020, section 2.1).

    Raises `UserError` for negative or infinite figures.
    """
    for what, value in (("parameters", parameters), ("tokens", tokens)):
        if not math.isfinite(value) or value < 0:
            raise UserError(f"the number of {what} must be finite and not negative, not {value}")
    return 6 * parameters * tokens


def devices_needed(flops: float, peak_flops: float, utilisation: float, days: float) -> float:
    """Devices that do `flops` operations in `days` days at a share `utilisation` of `peak_flops` operations a second.

    Not rounded up. Raises `UserError` for figures that are not positive, and more than the whole peak.
    """
    if min(flops, peak_flops, utilisation, days) <= 0 or utilisation > 1:
        raise UserError("operations, peak and days must be positive, and utilisation between 0 and 1")
    return flops / (peak_flops * utilisation * days * DAY)
