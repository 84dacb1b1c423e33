"""Layouts of rows that state none, but that it was the fastest."""

from __future__ import annotations

from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.planner.plan import plan
from shardwise.validation.scoreboard.configuration import Row, whole

FASTEST = "most performant"
"""Words in a row's notes that its layout was the fastest of all."""


def laid_out(row: Row, model: ModelConfig, cluster: Cluster, engine: str, assumed: list[str]) -> Row:
    """The row with the fastest layout that the planner knows, in 16 bits, where it states none but says that it was the
    fastest; any other row as it is. Raises `UserError` where none fits."""
    if row.get("tp") is not None or FASTEST not in str(row.get("notes", "")):
        return row
    layout = _fastest(model, cluster, whole(row, "seq"), whole(row, "gbs"), whole(row, "cp", 1), engine)
    assumed.append(f"layout not stated but the fastest: {engine}'s fastest as planned")
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "vpp": layout.virtual}
    return {**row, **degrees, "mbs": layout.micro, "zero_stage": layout.stage, "recompute": layout.recompute}


@lru_cache
def _fastest(model: ModelConfig, cluster: Cluster, seq: int, batch: int, cp: int, engine: str) -> Layout:
    fixed = {"cp": cp}
    best = plan(model, cluster, Workload(seq, batch), engine=engine, top=1, fixed=fixed, explain=False).ranked[0].layout
    if best.tp > cluster.devices_per_node:
        raise UserError("the layout is not stated, and the fastest as planned splits tensors over nodes, which few do")
    return best
