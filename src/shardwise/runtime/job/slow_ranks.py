"""Options of slow ranks and of emulated arithmetic, of a run and of its prediction."""

from typing import Any

from shardwise.options import option
from shardwise.records import dataclass


def slow_option() -> Any:
    return option(
        (),
        "slow ranks, such as rank=1,factor=3, rank=all,factor=3,probability=0.25 or rank=all,spread=0.3 (log-normal); "
        "repeatable",
        metavar="TEXT", shown="",
    )  # fmt: skip


def emulate_option() -> Any:
    return option(
        None,
        "make a step's arithmetic last TIME, by sleeping after it, as if each rank had cores of its own; the "
        "arithmetic itself must be shorter",
        metavar="TIME",
    )


@dataclass(frozen=True)
class SlowRanks:
    """Slow ranks of a predicted step, as `TrainConfig` has them."""

    slow: tuple[str, ...] = slow_option()
    emulate: str | None = emulate_option()
