"""Why not another choice: for each value that a key of the layout could have, the best candidate that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import Block, CandidateIndex

KEYS = ("tp", "pp", "cp", "ep", "zero", "micro", "recompute", "sp", "schedule")
"""The keys whose neighbouring values are looked at."""


@dataclass(frozen=True)
class Alternative:
    """The best candidate with another value of one key, against the winner.

    key, value: such as tp and 16. best: None where nothing with it fits, and then `least` are the fewest bytes that any
    needs. slower: seconds that a step takes longer. part, grew: the part of a step that grew most, and its seconds.
    crosses: whether that key's groups leave a node, and the winner's do not.
    """

    key: str
    value: Any
    best: Priced | None
    least: float
    slower: float = 0.0
    part: str = ""
    grew: float = 0.0
    crosses: bool = False


class ByChoice:
    """Sees all blocks of a search; keeps the fastest that fits, and the fewest bytes, for each value of each key; and
    the fastest of all, fit or not."""

    def __init__(self) -> None:
        self.fastest: dict[tuple[str, Any], tuple[float, CandidateIndex]] = {}
        self.least: dict[tuple[str, Any], tuple[float, CandidateIndex]] = {}
        self.unlimited: tuple[float, CandidateIndex] | None = None

    def offer(self, block: Block) -> None:
        frame, shape = block.frame, block.frame.shape
        seconds, nbytes = np.broadcast_to(block.seconds, shape), block.nbytes
        whole = {key: [getattr(frame, key)] * shape[0] for key in ("tp", "pp", "ep")}
        rows = {key: [getattr(row, key) for row in frame.rows] for key in ("cp", "micro", "sp", "recompute")}
        for axis, values in (
            (0, whole | rows),
            (1, {"zero": [sharding.stage for sharding in frame.shardings]}),
            (2, {"schedule": [order.schedule for order in frame.orders]}),
        ):
            self._along(block, axis, values, seconds, nbytes)
        if block.unlimited is not None:
            at = int(np.argmin(block.unlimited))
            soonest = float(block.unlimited.flat[at])
            if self.unlimited is None or soonest < self.unlimited[0]:
                self.unlimited = soonest, block.place(at)

    def _along(self, block: Block, axis: int, values: dict[str, list[Any]], seconds: Any, nbytes: Any) -> None:
        """Keys whose value changes along one axis of the block: the values there, one for each index."""
        fewest = nbytes.min(axis=tuple({0, 1, 2} - {axis}))
        if block.some:
            turned = np.moveaxis(seconds, axis, 0)
            flat = turned.reshape(len(turned), -1)
            within = flat.argmin(axis=1)
            soonest = flat[np.arange(len(flat)), within]
        for key, mine in values.items():
            for value in dict.fromkeys(mine):
                here = [i for i, other in enumerate(mine) if other == value]
                leanest = here[int(fewest[here].argmin())]
                if fewest[leanest] < self.least.get((key, value), (np.inf,))[0]:
                    self.least[key, value] = float(fewest[leanest]), block.place(_leanest(nbytes, axis, leanest))
                if not block.some:
                    continue
                first = here[int(soonest[here].argmin())]
                if soonest[first] < self.fastest.get((key, value), (np.inf,))[0]:
                    at = np.unravel_index(within[first], turned.shape[1:])
                    index = np.ravel_multi_index([*at[:axis], first, *at[axis:]], block.frame.shape)
                    self.fastest[key, value] = float(soonest[first]), block.place(int(index))

    def neighbours(self, winner: Priced) -> Iterator[tuple[str, Any]]:
        """The choices next to the winner's: numbers one step down and up, all other words and stages."""
        for key in KEYS:
            mine = getattr(winner.layout, key)
            # What no legal candidate has is not an alternative.
            values = sorted({value for known, value in self.least if known == key}, key=str)
            if key in ("tp", "pp", "cp", "ep", "micro"):
                below = max((v for v in values if v < mine), default=None)
                above = min((v for v in values if v > mine), default=None)
                values = [v for v in (below, above) if v is not None]
            yield from ((key, value) for value in values if value != mine)


def _leanest(nbytes: Any, axis: int, index: int) -> int:
    """The flat index of the fewest bytes among those at `index` along an axis."""
    there = np.take(nbytes, [index], axis)
    at = [int(place) for place in np.unravel_index(int(there.argmin()), there.shape)]
    at[axis] = index
    return int(np.ravel_multi_index(at, nbytes.shape))


def against(winner: Priced, key: str, value: Any, other: Priced | None, least: float, cluster: Cluster) -> Alternative:
    """One alternative, with the part of a step that grew most."""
    if other is None:
        return Alternative(key, value, None, least)
    grown = {name: other.parts[name] - winner.parts[name] for name in winner.parts}
    part = max(grown, key=lambda name: grown[name])
    crosses = _extent(other, key) > cluster.devices_per_node >= _extent(winner, key)
    return Alternative(key, value, other, least, other.seconds - winner.seconds, part, grown[part], crosses)


def _extent(one: Priced, key: str) -> int:
    """Devices from the first to the last of a group of the ranks that `key` splits a block over; 0 for other keys."""
    return {"tp": one.layout.tp, "cp": one.layout.tp * one.layout.cp, "ep": one.layout.ep}.get(key, 0)
