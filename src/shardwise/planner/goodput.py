"""Cost of failures in a long run: the interval between checkpoints, and the share of time that is progress."""

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from shardwise.errors import UserError


@dataclass(frozen=True)
class Goodput:
    """interval: seconds of work between the ends of two saves. share: progress over time that passes."""

    interval: float
    share: float


def goodput(mean_between: float, save: float, restart: float) -> Goodput:
    """The best interval between checkpoints, and what remains.

    mean_between: seconds between failures of the whole cluster, a device's over the number of devices. save: seconds
    for which a checkpoint stops the run. restart: seconds from a failure until the run resumes.
    The interval is sqrt(2 save mean) (Young 1974) with Daly's corrections of higher order (Daly 2006, equation 37); the
    expected time of a run is his complete model for failures that come at random (equation 20). Raises `UserError` for
    times that are not positive.
    """
    for name, value in (("time between failures", mean_between), ("time to save", save)):
        if not 0 < value < inf:
            raise UserError(f"the {name} must be positive, not {value}")
    if not 0 <= restart < inf:
        raise UserError(f"the time to restart must not be negative, not {restart}")
    ratio = save / (2 * mean_between)
    interval = mean_between
    if ratio < 1:
        interval = sqrt(2 * save * mean_between) * (1 + sqrt(ratio) / 3 + ratio / 9) - save
    # Beyond this there is no progress, and no number for it.
    if (restart + interval + save) / mean_between > 700:
        return Goodput(interval, 0.0)
    passes = mean_between * exp(restart / mean_between) * expm1((interval + save) / mean_between)
    return Goodput(interval, interval / passes)
