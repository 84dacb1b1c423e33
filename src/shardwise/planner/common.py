"""How unusual layouts are: what decides between candidates whose predicted times differ by less than their error.

Published runs keep tensor parallelism inside a node, cut sequences only where these are long, have few virtual stages,
shard the optimizer under pipelines (stage 1), and hardly ever use the rest (docs/published_choices.md).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import Block, Candidate
from shardwise.planner.space import EVEN, BatchChoice, LayoutColumns, ScheduleChoice, ZeroChoice
from shardwise.records import dataclass

PUBLISHED_CHOICES = Path(__file__).with_name("published_choices.json")
"""Layouts of published runs, with their sources: docs/published_choices.md."""
ALIKE = 1.5
"""Ratio of parameters up to which a published run is of a model of the same size."""

SAME = 0.05
"""Share of the fastest time within which candidates count as equally fast. Of two layouts of one model on one cluster,
the ratio of the predicted times is 7% off in the median: 2,356 pairs of vTrain's measurements, 79 of BLOOM's."""
WHOLE = 8192
"""Tokens of a sequence up to which published runs do not cut it, but for a half."""

DEEP = 16
"""Pipeline ranks of the deepest published runs."""


def unusual(frame: LayoutColumns, cluster: Cluster, seq: int) -> Any:
    """How unusual each candidate of a frame is, an array of its shape: about one for each choice that few runs make."""
    rows = np.array([_cut(row, frame.tp, seq) for row in frame.rows])
    shardings = np.array([_sharded(sharding, frame) for sharding in frame.shardings])
    orders = np.array([_scheduled(order, frame) for order in frame.orders])
    of_all = 8.0 * (frame.tp > cluster.devices_per_node) + 4.0 * (frame.homes.layout.offload_home != "none")
    of_all += max(0.0, float(np.log2(frame.pp / DEEP)))
    return of_all + rows[:, None, None] + shardings[None, :, None] + orders[None, None, :]


def _cut(row: BatchChoice, tp: int, seq: int) -> float:
    further = max(0.0, float(np.log2(row.cp)) - max(0.0, float(np.log2(seq / WHOLE))))
    again = {"none": 0.0, "selective": 0.6}.get(row.recompute, 0.8)
    return further + max(0.0, further - 1) + 1.0 * (tp > 1 and not row.sp) + again


def _sharded(sharding: ZeroChoice, frame: LayoutColumns) -> float:
    partly = 1.0 * (sharding.zero > 0 and sharding.shard < frame.data)
    piped = {2: 1.5, 3: 2.0}.get(sharding.zero, 0.0) if frame.pp > 1 else 0.5 * (sharding.zero == 2)
    return partly + piped + 2.0 * (sharding.copied > 0) + 0.5 * (sharding.zero == 0 and frame.data > 1)


def _scheduled(order: ScheduleChoice, frame: LayoutColumns) -> float:
    if frame.pp == 1:
        return 0.0
    stages = frame.pp * order.virtual
    uneven = 1.0 * (frame.blocks % stages > 0 or order.ends != EVEN) + 0.5 * (stages > frame.blocks)
    return uneven + 0.25 * float(np.log2(order.virtual)) + 3.0 * (order.schedule not in ("1f1b", "interleaved"))


def as_fast(blocks: Sequence[Block], fastest: float, usable: float, cluster: Cluster, seq: int) -> list[Candidate]:
    """Candidates that may fit and are as fast as `fastest` seconds within the error, the most common first. Bytes are
    lower bounds."""
    found: list[tuple[float, Candidate]] = []
    for block in blocks:
        if block.seconds is None:
            continue
        there = (block.seconds <= fastest * (1 + SAME)) & (block.nbytes <= usable)
        if not there.any():
            continue
        scores = np.broadcast_to(unusual(block.frame, cluster, seq), there.shape)
        for at in np.flatnonzero(there.ravel()).tolist():
            one = Candidate(float(block.seconds.flat[at]), float(block.nbytes.flat[at]), block.place(at))
            found.append((float(scores.flat[at]), one))
    return [one for _, one in sorted(found, key=lambda each: (round(each[0], 6), each[1].seconds))]


@cache
def _published() -> list[tuple[dict[str, Any], Layout]]:
    rows = json.loads(PUBLISHED_CHOICES.read_text(encoding="utf-8"))
    return [(row, Layout.parse(row["layout"])) for row in rows]


def resembling(parameters: int, layout: Layout) -> dict[str, str] | None:
    """The published run of a model of about this size whose layout splits it equally: publisher, model, cluster,
    layout and source. None where there is none."""

    def kind(of: Layout) -> tuple[Any, ...]:
        return of.tp, of.pp, of.cp, of.ep, of.stage, of.schedule in ("1f1b", "interleaved")

    near = [
        row
        for row, published in _published()
        if kind(published) == kind(layout) and 1 / ALIKE <= parameters / row["parameters"] <= ALIKE
    ]
    if not near:
        return None
    best = min(near, key=lambda row: abs(float(np.log(parameters / row["parameters"]))))
    return {key: best[key] for key in ("publisher", "model", "cluster", "layout", "source")}


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
    frame = block.frame
    lists: Any = (BatchChoice, frame.rows), (ZeroChoice, frame.shardings), (ScheduleChoice, frame.orders)
    for axis, (kind, choices) in enumerate(lists):
        if key in kind._fields:
            return axis, [getattr(choice, key) for choice in choices]
    return 0, [getattr(frame, key)] * len(frame.rows)


def _legal(block: Block, key: str) -> set[Any]:
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
