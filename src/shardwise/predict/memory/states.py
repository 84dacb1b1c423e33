"""State of mixed-precision training per parameter, and the questions that it answers alone.

Activations, buffers and fragmentation come on top: `estimate` counts them for a layout.
"""

import math
from dataclasses import dataclass

from shardwise.errors import UserError
from shardwise.predict.memory.step import OPTIMIZER_BYTES
from shardwise.report.step_report import DTYPE_BYTES


@dataclass(frozen=True)
class States:
    """Bytes of weights, gradients and optimizer state."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def training_states(
    params: float,
    stage: int = 0,
    ranks: int = 1,
    gradient_bytes: int = DTYPE_BYTES["bfloat16"],
    optimizer_bytes: int = OPTIMIZER_BYTES["bf16"],
) -> States:
    """Bytes on each of `ranks` data-parallel ranks at a ZeRO stage, with 2 bytes a weight.

    gradient_bytes: of a gradient, 2 or 4. optimizer_bytes: of AdamW's state, 12 with an fp32 master weight and two fp32
    moments. Source: Rajbhandari et al. 2020, section 3.1 and figure 1. Raises `UserError` for figures that are not
    positive, and stages that there are not.
    """
    if not 0 < params < math.inf or ranks < 1:
        raise UserError(f"parameters and ranks must be positive and finite, not {params!r} and {ranks!r}")
    if stage not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has the stages 0 to 3, not {stage!r}")
    return States(
        params * DTYPE_BYTES["bfloat16"] / (ranks if stage >= 3 else 1),
        params * gradient_bytes / (ranks if stage >= 2 else 1),
        params * optimizer_bytes / (ranks if stage >= 1 else 1),
    )


def zero_table(params: float, ranks: list[int], gradient_bytes: int = 2) -> dict[int, dict[int, float]]:
    """Bytes a GPU of mixed-precision AdamW training states at ZeRO stage 0 to 3, activations aside.

    stage -> number of GPUs -> the total of `training_states`: 16P; 4P + 12P/N; 2P + 14P/N; 16P/N. Raises `UserError` as
    that does.
    """
    return {stage: {n: training_states(params, stage, n, gradient_bytes).total for n in ranks} for stage in range(4)}


def zero_sent(stage: int) -> int:
    """Elements that a rank sends per parameter and step at a ZeRO stage, on rings of many ranks: gradients are reduced
    and scattered (1), and weights gathered once (1), at stage 3 for forward and for backward (2).

    Source: Rajbhandari et al. 2020, section 7. Raises `UserError` for a stage that there is not.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"ZeRO has the stages 0 to 3, not {stage!r}")
    return 3 if stage == 3 else 2


def largest_model(device_bytes: float, stage: int = 0, ranks: int = 1) -> float:
    """Parameters whose `training_states` fill `device_bytes` bytes of each device. Raises `UserError` as that does."""
    return device_bytes / training_states(1.0, stage, ranks).total


def least_devices(params: float, device_bytes: float) -> int:
    """Devices of `device_bytes` bytes that hold all `training_states` of a model once, split evenly (stage 3).

    Raises `UserError` for figures that are not positive.
    """
    if not device_bytes > 0:
        raise UserError(f"a device's bytes must be positive, not {device_bytes!r}")
    return math.ceil(training_states(params).total / device_bytes)
