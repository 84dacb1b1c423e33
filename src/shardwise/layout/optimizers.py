"""Optimizers, and the state that each keeps per parameter. Free of torch.

The runtime, checkpoints, and the predictions of memory, traffic and time all count state from this table.
"""

from typing import Any

from shardwise.errors import UserError

OPTIMIZERS: dict[str, tuple[str, ...]] = {"adamw": ("first", "second"), "momentum": ("first",), "sgd": ()}
"""Optimizer -> its moments per parameter, each as wide as the master weight: running averages of the gradient and, for
AdamW, of its square."""
ELSEWHERE: dict[str, tuple[str, ...]] = {"muon": ("first",), "adamw8bit": ("first", "second")}
"""The same of optimizers that other engines have and this runtime has not. Muon's is that of matrices (Jordan et al.
2024); embedding and head keep AdamW's."""
DEFAULT = "adamw"
MODEL = "model"
"""Name of the master weights among the arrays of state."""


def states_of(optimizer: str) -> tuple[str, ...]:
    """Arrays of state per parameter, in stored order: master weights, then moments."""
    return (MODEL, *(OPTIMIZERS | ELSEWHERE)[optimizer])


def check_own(optimizer: str) -> None:
    """Raise `UserError` for an optimizer that this runtime has not."""
    if optimizer in ELSEWHERE:
        raise UserError(
            f"optimizer={optimizer}: this runtime updates with {', '.join(OPTIMIZERS)}; choose one of them, or give "
            "estimate and plan an --engine that has it"
        )


def update_bytes(optimizer: str, width: int = 4) -> int:
    """Bytes that an update moves per parameter: it reads gradient and state, and writes state."""
    return width * (1 + 2 * len(states_of(optimizer)))


def widens_gradients(wide: bool, micro_batches: Any) -> Any:
    """Whether gradients of 16 bits are accumulated in fp32: wherever more than one micro-batch is summed, or with
    `grads=fp32` (wide). micro_batches: a number, or an array of numbers."""
    return (micro_batches > 1) | wide
