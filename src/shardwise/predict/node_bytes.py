"""Bytes off the devices of one node: of all its ranks together, in the host's memory and on disk."""

from collections import Counter
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import PP
from shardwise.layout.units import usual_backend
from shardwise.model.parameters import Model
from shardwise.predict.memory.homes import disk_bytes, host_bytes


class NodeBytes(NamedTuple):
    """Bytes of the node that needs most of each."""

    host: int = 0
    disk: int = 0


NOTHING = NodeBytes()


def node_bytes(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> NodeBytes:
    """Bytes of the fullest node of `cluster` under a layout, whose ranks fill node after node."""
    if layout.offload_home == "none" and not layout.offloads_activations:
        return NOTHING
    mesh, backend = Mesh.of(layout, model), usual_backend(cluster)
    plans = (unit_plan(model, layout, workload, rank=mesh.rank(pp=p), backend=backend) for p in range(layout.pp))
    of_place = [NodeBytes(host_bytes(plan).total, disk_bytes(plan).total) for plan in plans]
    each = cluster.devices_per_node
    nodes = {
        tuple(sorted(Counter(mesh.index(PP, rank) for rank in range(first, min(first + each, layout.ranks))).items()))
        for first in range(0, layout.ranks, each)
    }
    sums = [
        [sum(count * of_place[place][home] for place, count in node) for home in range(len(NodeBytes._fields))]
        for node in nodes
    ]
    return NodeBytes(*map(max, zip(*sums, strict=True)))
