"""Seconds for which the ranks of a CPU wait for a core."""

import numpy as np

from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.split import Num, StepShape


def core_wait(split: StepShape, pricing: Pricing) -> Num:
    """Seconds of waiting per second of a rank's computation, as `calibrate device` measured it; 0 on a GPU.

    Where a machine has more ranks than cores, all wait alike for each other ("shared"). Other programs hold up one rank
    now and then ("taken"), and with it all that meet it in the step.
    """
    values = pricing.constants.values
    return values.get("shared", 0.0) + values.get("taken", 0.0) * (
        split.tp * split.cp * np.where(np.asarray(split.zero) >= 2, split.shard, 1)
    )


def leaves_node(split: StepShape, pricing: Pricing) -> Num:
    """Whether ZeRO's shard groups span nodes: transfers over a network need no core."""
    return (np.asarray(split.shard) - 1) * split.tp >= pricing.collectives.per_node
