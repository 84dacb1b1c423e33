"""A whole training run from its operations: how many devices finish it in a given time."""

from __future__ import annotations

from shardwise.errors import UserError

DAY = 86400.0
"""Seconds."""


def devices_needed(flops: float, peak_flops: float, utilisation: float, days: float) -> float:
    """Devices that do `flops` operations in `days` days at a share `utilisation` of `peak_flops` operations a second.

    Not rounded up. Raises `UserError` for figures that are not positive, and more than the whole peak.
    """
    if min(flops, peak_flops, utilisation, days) <= 0 or utilisation > 1:
        raise UserError("operations, peak and days must be positive, and utilisation between 0 and 1")
    return flops / (peak_flops * utilisation * days * DAY)
