"""Why not another choice: for each value that a key of the layout could have, the best candidate that has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import Block
from shardwise.records import dataclass

KEYS = ("tp", "pp", "cp", "ep", "zero", "micro", "recompute", "sp", "schedule")
"""The keys whose neighbouring values are looked at."""


@dataclass(frozen=True)
class Alternative:
    """The best candidate with another value of one key, against the winner."""

    key: str
    value: Any
    best: Priced | None
    """None where nothing with this value fits."""
    least: int
    """Where none fits, bytes that every candidate with this value needs at least."""
    slower: float = 0.0
    """Seconds that a step takes longer."""
    part: str = ""
    """The part of a step that grew most."""
    grew: float = 0.0
    """Its seconds."""
    crosses: bool = False
    """Whether the groups of this key leave a node, and the winner's do not."""


def neighbours(blocks: Sequence[Block], winner: Priced) -> Iterator[tuple[str, Any]]:
    """The choices next to the winner's that legal candidates have: numbers one step down and up, all other words and
    stages."""
    for key in KEYS:
        mine = getattr(winner.layout, key)
        values = sorted({value for block in blocks for value in _legal(block, key)}, key=str)
        if key in ("tp", "pp", "cp", "ep", "micro"):
            below = max((v for v in values if v < mine), default=None)
            above = min((v for v in values if v > mine), default=None)
            values = [v for v in (below, above) if v is not None]
        yield from ((key, value) for value in values if value != mine)


def having(blocks: Iterable[Block], key: str, value: Any) -> list[Block]:
    """The candidates with this value of a key."""
    found = []
    for block in blocks:
        axis, values = _values(block, key)
        keep = np.array([each == value for each in values])
        if keep.any():
            found.append(block.only(np.expand_dims(keep, tuple({0, 1, 2} - {axis}))))
    return found


def _values(block: Block, key: str) -> tuple[int, list[Any]]:
    """The axis of a block along which a key changes, and its values there."""
    frame = block.frame
    if key in ("tp", "pp", "ep"):
        return 0, [getattr(frame, key)] * len(frame.rows)
    if key in ("cp", "micro", "sp", "recompute"):
        return 0, [getattr(row, key) for row in frame.rows]
    if key == "zero":
        return 1, [sharding.zero for sharding in frame.shardings]
    return 2, [order.schedule for order in frame.orders]


def _legal(block: Block, key: str) -> set[Any]:
    """The values of a key that candidates of a block have."""
    axis, values = _values(block, key)
    there = np.isfinite(block.nbytes).any(axis=tuple({0, 1, 2} - {axis}))
    return {value for value, legal in zip(values, there.tolist(), strict=True) if legal}


def against(winner: Priced, key: str, value: Any, other: Priced | None, least: int, cluster: Cluster) -> Alternative:
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
