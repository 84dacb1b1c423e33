"""Samples of `calibrate device`, and the physical limits that they must keep. Imports no torch.

Attention is made of matrix products, so it cannot compute faster than the best one, in its dtype or in fp32: a CPU
without bf16 instructions computes attention in fp32, faster than its bf16 products. What memory binds must at least
read its operands and write its results, and cannot do that faster than a copy moves bytes. A sample beyond is an error
of measuring: a call too short for its clock, data that never left a cache, or a disturbed product or copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MORE = 4
"""Times as much work for what is measured again."""
_TOLERANCE = 1.05
_CACHED = {"cuda": 1.1, "cpu": 4.0}
"""Times the rate of a copy that memory-bound operations may have. A CPU's last cache is shared, and may hold it all."""
_WIDTH = {"float32": 4, "bfloat16": 2}
_MOVED = {"": 3, "norm": 5, "activation": 8, "rotation": 4, "softmax": 5, "loss": 3}
"""Elements that are read or written at least for each element of an operation: forward and backward, each operand and
each result once; the addition has no backward."""
_BOTH = 3
"""Matrix products of attention forward and backward over those forward: backward computes two gradients of each."""


@dataclass(frozen=True)
class Probed:
    """One probe. what: product, attention, pass, collective, ... of: dtype and kind, in the words of the probe's maker;
    shape: its numbers. seconds: of one call, the mean over ranks; of "taken", the seconds that a rank waited for its
    core while others had it, for each second that it computed."""

    what: str
    of: tuple[str, ...]
    shape: tuple[int, ...]
    seconds: float


def above_limits(samples: Sequence[Probed], kind: str) -> dict[int, str]:
    """Index -> what is wrong, for every sample beyond its physical limit. kind: "cpu" or "cuda"."""
    copies = next(2.0 * sample.shape[0] / sample.seconds for sample in samples if sample.what == "copy")
    above = {}
    for at, sample in enumerate(samples):
        if sample.what == "attention":
            best = samples[_limit_of(samples, sample)]
            product = 2.0 * math.prod(best.shape) / best.seconds
            batch, length, heads, width = sample.shape
            forward = 4.0 * batch * heads * width * length * (length + 1) / 2
            share, limit = (forward * (_BOTH if sample.of[1] == "both" else 1)) / sample.seconds / product, _TOLERANCE
            rate = "the rate of matrix products"
        elif nbytes := _least_bytes(sample):
            share, limit = nbytes / sample.seconds / copies, _CACHED[kind]
            rate = "the bandwidth of a copy"
        else:
            continue
        if share > limit:
            words = " ".join((sample.what, *filter(None, sample.of)))
            above[at] = f"{words} {'x'.join(map(str, sample.shape))} at {share:.0%} of {rate}"
    return above


def within_limits(samples: Sequence[Probed], kind: str, again: Callable[[int, int], float]) -> list[Probed]:
    """The samples, with those beyond their limits measured again with `MORE` times the work, and what set the limits as
    well, and the quicker time counts: another program may have disturbed it. again: from a sample's index and
    `MORE` to the seconds that the sample's own work took. What is still beyond is for `above_limits`."""
    late = above_limits(samples, kind)
    limits = {_limit_of(samples, samples[at]) for at in late}
    return [
        replace(s, seconds=again(at, MORE))
        if at in late
        else replace(s, seconds=min(s.seconds, again(at, MORE)))
        if at in limits
        else s
        for at, s in enumerate(samples)
    ]


def _limit_of(samples: Sequence[Probed], sample: Probed) -> int:
    if sample.what != "attention":
        return next(at for at, each in enumerate(samples) if each.what == "copy")
    dtypes = {"float32", sample.of[0]}
    products = [at for at, each in enumerate(samples) if each.what == "product" and each.of[0] in dtypes]
    return max(products, key=lambda at: math.prod(samples[at].shape) / samples[at].seconds)


def _least_bytes(sample: Probed) -> float:
    if sample.what == "row":
        return math.prod(sample.shape) * _WIDTH[sample.of[0]]
    if sample.what == "pass" and sample.of[0] in _MOVED:
        return math.prod(sample.shape) * _MOVED[sample.of[0]] * _WIDTH[sample.of[1]]
    return 0
