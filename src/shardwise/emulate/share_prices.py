"""Prices of the collectives of a share, from the network model, as the table that its processes read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import PP
from shardwise.predict.time import Pricing
from shardwise.predict.time.link_use import named
from shardwise.predict.time.network import MEASURED, Collectives
from shardwise.report.step_report import LedgerRow

SIZES = (2.0 ** np.arange(8, 41, 0.5)).tolist()
"""Bytes at which a price is given: the network model's own samples, and one between each two."""
MESSAGE = "recv"


def collectives_of(cluster: Cluster, layout: Layout) -> Collectives:
    """The network model of a cluster. Raises `UserError` where it has no numbers, with the command that measures
    them."""
    try:
        return Pricing(cluster, layout=layout).collectives
    except UserError as error:
        if cluster.device.kind == "cpu" and not cluster.device.measured:
            raise UserError(
                "--measure needs the speed of this machine's collectives: run `shardwise calibrate device --ranks "
                f"{cluster.devices_per_node} --out FILE.toml` and give --cluster FILE.toml"
            ) from None
        raise error from None


def price_rows(
    collectives: Collectives, mesh: Mesh, rank: int, ledger: Iterable[LedgerRow]
) -> list[tuple[str, list[int], list[float]]]:
    """(operation, ranks of the group, seconds at each of `SIZES`) for every group in a rank's ledger.

    Messages between the stages of a pipeline take no time here: the simulation of the schedule has them.
    """
    rows = []
    for axis in sorted({row.axes for row in ledger}):
        group = mesh.group(named(axis), rank)
        stride = stride_of(group)
        for op in MEASURED:
            name = "all_gather_into" if op == "all_gather" else op
            rows.append((name, list(group), _numbers(collectives.seconds(name, np.array(SIZES), len(group), stride))))
        hop = 0.0 * np.array(SIZES) if named(axis) == PP else collectives.hop(np.array(SIZES), stride)
        rows.append((MESSAGE, list(group), _numbers(hop)))
    return rows


def stride_of(group: tuple[int, ...]) -> int:
    """Distance of neighbors in a group; of an uneven one, the mean, rounded up."""
    ordered = sorted(group)
    return -(-(ordered[-1] - ordered[0]) // (len(ordered) - 1))


def message_seconds(collectives: Collectives, mesh: Mesh, ledger: Iterable[LedgerRow]) -> tuple[float, float]:
    """Seconds of the largest message between two stages, and of the tied table's gradients."""
    seconds = {False: 0.0, True: 0.0}
    stride = stride_of(mesh.group(PP, 0))
    for row in ledger:
        if row.op == "send" and named(row.axes) == PP:
            tied = row.unit == "tied"
            once = float(collectives.hop(row.payload_bytes / row.count, stride))
            seconds[tied] = max(seconds[tied], once)
    return seconds[False], seconds[True]


def _numbers(array: Any) -> list[float]:
    return [float(seconds) for seconds in array]
