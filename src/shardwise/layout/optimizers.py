"""Optimizers, and the state that each keeps per parameter. Free of torch.

The runtime, checkpoints, and the predictions of memory, traffic and time all count state from this table.
"""

from __future__ import annotations

OPTIMIZERS: dict[str, tuple[str, ...]] = {"adamw": ("first", "second"), "momentum": ("first",), "sgd": ()}
"""Optimizer -> its moments per parameter, each as wide as the master weight: running averages of the gradient and, for
AdamW, of its square."""
DEFAULT = "adamw"
MODEL = "model"
"""Name of the master weights among the arrays of state."""


def states_of(optimizer: str) -> tuple[str, ...]:
    """Arrays of state per parameter, in stored order: master weights, then moments."""
    return (MODEL, *OPTIMIZERS[optimizer])


def update_bytes(optimizer: str, width: int = 4) -> int:
    """Bytes that an update moves per parameter: it reads gradient and state, and writes state."""
    return width * (1 + 2 * len(states_of(optimizer)))
