"""Gradients of several micro-batches: their widths, and the passes over memory that add them up.

Two places add. A product that makes a weight's gradient may add it to an accumulator itself, which it reads and writes.
Or kernels of their own add it: the whole gradient below ZeRO stage 2, the shard that a reduction left from there on.
What this project's runtime does follows from the layout ("plan": `Dtypes.stages_gradients`, `wire`); other
engines' profiles have numbers.
"""

import numpy as np

from shardwise.arrays import Num
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape


def reduced_width(split: StepShape, engine: EngineProfile) -> Num:
    """Bytes of a gradient as it is reduced over the data ranks."""
    return split.wire_width if engine.grad_bytes == "plan" else np.maximum(engine.grad_bytes, split.width)


def accumulator_width(split: StepShape, engine: EngineProfile) -> Num:
    """Bytes of an accumulated gradient."""
    return split.gradient_width if engine.grad_bytes == "plan" else np.maximum(engine.grad_bytes, split.width)


def product_bytes(split: StepShape, engine: EngineProfile) -> Num:
    """Bytes that a weight's gradient moves to and from memory in the product that makes it, per weight and micro-batch:
    written, or also read where the product adds to an accumulator. The runtime's first micro-batch overwrites it."""
    if not engine.wgrad_accumulates:
        return split.width
    if engine.grad_bytes != "plan":
        return 2.0 * accumulator_width(split, engine)
    staged = (np.asarray(split.zero) >= 2) | (split.gradient_width > split.width)
    return np.where(staged, split.width, split.gradient_width * (2 - 1 / np.asarray(split.micro_batches)))


def added_seconds(whole: Num, shard: Num, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Num:
    """Seconds in which kernels of their own add up the gradients of one micro-batch, the mean over a step's. whole,
    shard: trained parameters, and those of the rank's ZeRO shard. Offloaded shards are added on the host
    (`offload.py`)."""
    late = np.asarray(split.zero) >= 2
    here = ~late | (np.asarray(split.offload) == "none")
    (first, others), (first_late, others_late) = _bytes(split, engine, False), _bytes(split, engine, True)
    later = 1 - 1 / np.asarray(split.micro_batches)
    each = np.where(late, first_late * (1 - later) + others_late * later, first * (1 - later) + others * later)
    passes = np.where(here, np.where(late, shard, whole) * each, 0.0)
    if not np.any(passes):
        return 0.0
    return np.where(passes > 0, pricing.kernels.pass_over(passes, dtype="float32"), 0.0)


def _bytes(split: StepShape, engine: EngineProfile, late: bool) -> tuple[Num, Num]:
    """Bytes moved per added gradient, (of the first micro-batch, of each later one). late: of shards, from stage 2."""
    told = engine.shard_add_bytes if late else engine.accumulate_bytes
    if told != "plan":
        return told
    # runtime/zero/flat_unit.py, add_gradients: the first one is converted, later ones are added.
    narrow, wide = split.width, split.gradient_width
    copied = np.where(wide > narrow, narrow + wide, 0.0)
    return copied, np.where((wide > narrow) | late, narrow + 2 * wide, 0.0)
