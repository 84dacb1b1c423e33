"""How long each rank of a run stood still for other ranks, in numbers and in a few lines."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.codec import Json
from shardwise.report.units import format_share

WIDTH, SHOWN = 80, 8
"""Columns of a line, and ranks up to which each is shown."""


@dataclass(frozen=True)
class RankWaiting(Json):
    """Training time of one rank, without validation and saves."""

    json_keys = "rank seconds waiting_s=waiting waiting_share=share injected_s=injected"

    rank: int
    seconds: float
    """From the first step to the last."""
    waiting: float
    """Of these, seconds in collectives, pushes and pulls, and outer steps that it had to wait for: until the other
    ranks were there, and the transfer itself."""
    injected: float = 0.0
    """Of these, seconds that `--slow` and `--emulate` let it wait."""

    @property
    def share(self) -> float:
        return self.waiting / self.seconds if self.seconds else 0.0


def waiting_lines(ranks: Sequence[RankWaiting]) -> list[str]:
    """Shares of the time, at most `WIDTH` columns wide; of many ranks the extremes and the middle. Nothing for a rank
    that is alone."""
    lines = []
    if len(ranks) > 1:
        lines += _line("waiting for other ranks", ranks, lambda one: one.share)
    if any(one.injected for one in ranks):
        lines += _line("injected waiting", ranks, lambda one: one.injected / one.seconds if one.seconds else 0.0)
    return lines


def _line(title: str, ranks: Sequence[RankWaiting], share: Callable[[RankWaiting], float]) -> list[str]:
    if len(ranks) <= SHOWN:
        words = [f"rank {one.rank} {format_share(share(one))}" for one in ranks]
    else:
        by_share = sorted(ranks, key=share)
        chosen = {"least": by_share[0], "middle": by_share[len(ranks) // 2], "most": by_share[-1]}
        words = [f"{name} {format_share(share(one))} (rank {one.rank})" for name, one in chosen.items()]
    return textwrap.wrap(f"{title}, of the time: {', '.join(words)}", WIDTH, subsequent_indent="  ")
