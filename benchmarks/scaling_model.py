"""A step's time from the measured arithmetic of one rank and the price of the ledger's collectives on a cluster."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout.axes import KV, TP, named
from shardwise.layout.mesh import Mesh
from shardwise.layout.units import UnitPlan
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.schedule.choose import cost


class StepTime(NamedTuple):
    """Seconds of one step. compute: as given. exposed: collectives that every rank waits for, those over tp and those
    after the last backward. hideable: those of units over the data ranks, under way while other units compute."""

    compute: float
    exposed: float
    hideable: float

    @property
    def low(self) -> float:
        """When everything that can be hidden is: the longer of computation and data-parallel traffic counts."""
        return max(self.compute, self.hideable) + self.exposed

    @property
    def high(self) -> float:
        """When nothing is hidden."""
        return self.compute + self.exposed + self.hideable


def step_time(plan: UnitPlan, compute: float, cluster: Cluster) -> StepTime:
    """Price a plan's ledger on `cluster`, the cheapest algorithm for each collective.

    compute: seconds that one rank's arithmetic takes in a step, measured. Under stages 1 and 2 the parameters are
    gathered after the optimizer, when nothing computes: that part is exposed. Raises `UserError` where the
    cluster lacks devices or a link's figures.
    """
    mesh = Mesh.of(plan.layout, plan.model)
    waited_for = {mesh.name(TP), mesh.name(KV)}
    exposed = hideable = 0.0
    for row in predict_ledger(plan):
        group = mesh.group(named(row.axes), 0)
        # Every device of a node is in one such group, and all work at once.
        on_first = sum(rank // cluster.devices_per_node == group[0] // cluster.devices_per_node for rank in group)
        sharing = max(1, cluster.devices_per_node // on_first)
        seconds = (
            row.count * cost(row.op, row.payload_bytes / max(row.count, 1), group, cluster, sharing=sharing).seconds
        )
        if row.axes in waited_for or row.phase in ("optimizer", "loss"):
            exposed += seconds
        else:
            hideable += seconds
    return StepTime(compute, exposed, hideable)
