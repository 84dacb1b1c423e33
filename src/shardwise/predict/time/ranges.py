"""Uncertainty of a predicted time: the 80% range, from the parts of the time.

Every kind of part has a relative uncertainty (`devices.json`, `ranges`, fitted so that 80% of published rows fall
inside); parts are taken as independent, and all share the error of what one set of constants cannot know. A device
whose kernels were not measured, and facts that had to be assumed, widen the range.
"""

from collections.abc import Mapping

import numpy as np

from shardwise.arrays import Num
from shardwise.predict.time.constants import Constants, uncertainty
from shardwise.records import dataclass

Z80 = 1.2816
"""Standard deviations on each side that hold 80% of a normal distribution."""

KIND = {
    "matmul": "compute", "attention": "compute", "memory": "compute", "gradients": "compute", "optimizer": "compute",
    "weights": "compute",
    "host": "host", "bubble": "bubble",
    "tensor": "network", "pipeline": "network", "data": "network", "experts": "experts", "offload": "network",
    "outer": "network", "servers": "network", "emulated": "compute", "stragglers": "compute",
}  # fmt: skip


LARGE = 1024
"""Devices from which on `large_run` says something."""


def large_run(devices: int) -> tuple[str, ...]:
    """What published steps on as many devices were beside their predictions, in a sentence; nothing below `LARGE`."""
    if devices < LARGE:
        return ()
    return (
        "20 published steps on 1,024 devices and more took 11% longer than predicted on average, at most 20% "
        "(docs/published_runs.md): expect the upper end of the range, or more",
    )


@dataclass(frozen=True)
class Range:
    """The 80% range of a time in seconds."""

    low: Num
    high: Num

    @property
    def width(self) -> Num:
        """High over low, less one."""
        return self.high / self.low - 1


def time_range(
    parts: Mapping[str, Num], known: Constants, assumed: int = 0, routed: bool = False, unknown: bool = False,
    sigma: Mapping[str, float] | None = None, served: bool = False,
) -> Range:  # fmt: skip
    """The range around the sum of `parts` (seconds by part, numbers or arrays), a factor up and down.

    assumed: how many facts about the run were not known and had to be assumed. routed: the model has experts, whose
    loads and host are known less well. unknown: nothing is known of the software. sigma: uncertainties in place of the
    stored ones (`uncertainty`). served: a time of serving, whose software and routed layers have errors of their own.
    """
    seconds = sum(parts.values())
    sigma = sigma or uncertainty()
    of_kind: dict[str, Num] = {}
    for name, part in parts.items():
        kind = KIND[name.split(" ")[-1]]
        of_kind[kind] = of_kind.get(kind, 0.0) + part
    common, experts = ("served", "served_routed") if served else ("common", "routed")
    squared: Num = sigma[common] ** 2 + assumed * sigma["assumed"] ** 2
    squared = squared + (sigma["borrowed"] ** 2 if known.notes else 0.0) + known.uncertain**2
    squared = squared + (sigma[experts] ** 2 if routed else 0.0)
    squared = squared + (sigma["software"] ** 2 if unknown else 0.0)
    for kind, part in of_kind.items():
        squared = squared + (sigma[kind] * part / seconds) ** 2
    factor = np.exp(Z80 * np.sqrt(squared))
    return Range(seconds / factor, seconds * factor)
