"""A lower bound of a node's host memory, for many candidates at once: what no exact count (`exact.py`) falls below.

Every parameter has at least one owner in each group of data ranks that holds all shards, so the nodes together hold at
least that, and the fullest one at least the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout.optimizers import states_of
from shardwise.model.parameters import Model, count, count_trained
from shardwise.planner.space import LayoutColumns
from shardwise.report.step_report import DTYPE_BYTES

WEIGHT, MASTER = DTYPE_BYTES["bfloat16"], DTYPE_BYTES["float32"]


def host_bound(model: Model, frame: LayoutColumns, cluster: Cluster, optimizer: str) -> Any:
    """At least the bytes of the fullest node's host memory, an array that broadcasts to the frame's shape."""
    homes = frame.homes.layout
    if homes.offload_home == "none":
        return np.zeros((1, 1, 1))
    stage, ranks = frame.columns["zero"], frame.columns["shard"]
    many = np.array(frame.counts)[:, None, None] > 1
    state = len(states_of(optimizer)) * MASTER * homes.offload_fraction * (homes.offload_home == "cpu")
    gradient = np.where(stage >= 2, np.where(many, MASTER, WEIGHT), 0)
    parameters = WEIGHT * (homes.offload_params == "cpu")
    # Of experts, other ranks hold copies.
    copies = 1 if model.experts else frame.data / ranks
    held = (state + gradient) * count_trained(model)[0] + parameters * count(model)
    return held * copies / cluster.nodes
