"""Workers and servers: the figures of a record of updates, as tables and as what the page draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.schedule.outer_rounds import OuterRound
from shardwise.schedule.run_traffic import WorkerTraffic
from shardwise.schedule.update_record import STRAGGLER, UpdateRecord
from shardwise.studio.columns import Columns, Table

KINDS = ("fresh", "stale", "dropped", "idle", "update")
"""Kinds of events, by number."""
_FRESH, _STALE, _DROPPED, _IDLE, _UPDATE = range(5)
MOST_WAITS = 12
"""Pairs of workers that are drawn: the ones with the longest waits."""


def gradients_table(record: UpdateRecord, worker: str) -> Table:
    """Every listed gradient: what it read, when, and what became of it."""
    columns: Columns = {
        worker: ("", lambda one: one.worker),
        "step": ("", lambda one: one.step),
        "version read": ("", lambda one: one.read),
        "updates behind": ("", lambda one: one.staleness),
        "began": ("seconds", lambda one: one.started),
        "pushed": ("seconds", lambda one: one.arrived),
        "answered": ("seconds", lambda one: None if math.isnan(one.answered) else one.answered),
        "waited for": ("", lambda one: one.waited_for),
        "in update": ("", lambda one: "dropped" if one.update is None else one.update + 1),
    }
    title = "Every gradient"
    if record.left_out:
        title = f"The first {len(record.gradients):,} gradients; {record.left_out:,} later ones are counted alone"
    return Table.of(title, record.gradients, columns)


def staleness_table(record: UpdateRecord) -> Table:
    """Gradients by the updates between the weights that they read and their own update."""
    rows, total = sorted(record.staleness.items()), sum(record.staleness.values())
    columns = {"updates behind": [behind for behind, _ in rows], "gradients": [count for _, count in rows]}
    return Table("Staleness", columns | {"share": [count / total for _, count in rows]}, {"share": "share"})


def workers_table(record: UpdateRecord, worker: str) -> Table:
    """A row per worker."""
    units = {worker: "", "gradients": "", "dropped": "", "computing": "seconds", "waiting": "seconds"}
    units |= {"share of waiting": "share", "a gradient": "seconds", "over the median": ""}
    rows = [
        (
            number, tally.gradients, tally.dropped, tally.computing, tally.waiting, tally.waiting_share,
            tally.computing / tally.gradients if tally.gradients else 0.0, slowness,
        )
        for number, (tally, slowness) in enumerate(zip(record.workers, record.slowness(), strict=True))
    ]  # fmt: skip
    return Table.of_rows("Each of them over the whole run", units, rows)


def waits_table(record: UpdateRecord, worker: str) -> Table:
    """Seconds that one worker waited for another one's gradient, the longest first."""
    waits = [
        (number, other, seconds, seconds / tally.waiting)
        for number, tally in enumerate(record.workers)
        for other, seconds in tally.waited_for.items()
        if seconds
    ]
    waits.sort(key=lambda row: (-row[2], row[:2]))
    units = {worker: "", "waited for": "", "time": "seconds", "of its waiting": "share"}
    return Table.of_rows("Who waits for whom", units, waits)


def compared_table(records: Mapping[str, UpdateRecord]) -> Table:
    """A row per way to agree. records: layout -> its record over as many steps."""
    columns: Columns = {
        "layout": ("", lambda item: item[0]),
        "takes": ("seconds", lambda item: item[1].seconds),
        "waiting": ("share", lambda item: item[1].waiting_share),
        "updates behind, mean": ("", lambda item: item[1].mean_staleness),
        "at most": ("", lambda item: max(item[1].staleness, default=0)),
        "gradients dropped": ("", lambda item: item[1].dropped),
    }
    return Table.of("Ways to agree", list(records.items()), columns)


def rounds_table(rounds: Sequence[OuterRound]) -> Table:
    """A row per round of rank 0's replica."""
    columns: Columns = {
        "round": ("", lambda one: one.number),
        "steps": ("", lambda one: one.steps),
        "last step": ("", lambda one: one.last_step),
        "time": ("seconds", lambda one: one.ended - one.started),
        "loss of all replicas": ("", lambda one: None if math.isnan(one.loss) else one.loss),
    }
    return Table.of("Rounds of rank 0's replica", rounds, columns)


def traffic_table(traffic: Sequence[WorkerTraffic]) -> Table:
    """Messages of the whole run by worker, server and direction."""
    units = {"worker": "", "server": "", "operation": "", "messages": "", "bytes": "bytes"}
    return Table.of_rows("Messages of the run", units, traffic)


def drawn(record: UpdateRecord) -> dict[str, Any]:
    """Events: a row per worker with its gradients and its waits, and a last row with the updates.

    `label` is the version read, or made; `gradient` the row of the gradient's table, -1 for an update.
    """
    rows: list[tuple[int, float, float, int, int, int]] = []
    last: dict[int, float] = {}
    for place, one in enumerate(record.gradients):
        kind = _DROPPED if one.staleness is None else _STALE if one.staleness else _FRESH
        rows.append((one.worker, one.started, one.arrived - one.started, kind, one.read, place))
        if one.waited_for is not None and one.answered > one.arrived:
            rows.append((one.worker, one.arrived, one.answered - one.arrived, _IDLE, one.read, place))
        if one.update is not None:
            last[one.update] = max(one.arrived, last.get(one.update, 0.0))
    updates = [(record.first + i, at) for i, at in enumerate(record.updated) if record.first + i in last]
    rows += [
        (len(record.workers), last[version], max(0.0, at - last[version]), _UPDATE, version + 1, -1)
        for version, at in updates
    ]
    types = {"rank": "u2", "start": "f8", "seconds": "f8", "kind": "u1", "label": "i4", "gradient": "i4"}
    columns = list(zip(*rows, strict=True)) or [()] * len(types)
    return {name: np.array(values, dtype) for (name, dtype), values in zip(types.items(), columns, strict=True)}


def worker_bars(record: UpdateRecord, worker: str) -> list[dict[str, Any]]:
    """A bar per worker: computing and waiting."""
    return [
        {
            "label": f"{worker} {number}",
            "detail": f"{slowness:.2f} of median" + (", slow" if slowness >= STRAGGLER else ""),
            "total": tally.computing + tally.waiting,
            "parts": [["computing", tally.computing], ["idle", tally.waiting]],
        }
        for number, (tally, slowness) in enumerate(zip(record.workers, record.slowness(), strict=True))
    ]


def stragglers(record: UpdateRecord) -> list[int]:
    """Workers whose gradients take longer than those of the others."""
    return [worker for worker, slowness in enumerate(record.slowness()) if slowness >= STRAGGLER]
