"""Width of accumulated gradients: one rule for the runtime's plan and for the price of a step. Free of torch."""

from __future__ import annotations

from typing import Any


def widens_gradients(wide: bool, micro_batches: Any) -> Any:
    """Whether gradients of 16 bits are accumulated in fp32: wherever more than one micro-batch is summed, or with
    `grads=fp32` (wide). micro_batches: a number, or an array of numbers."""
    return (micro_batches > 1) | wide
