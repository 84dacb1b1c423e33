"""How long a step takes, given how long one rank computes: the ledger's collectives priced on a cluster.

The time of the arithmetic is measured, not modelled, so this says what splitting adds to it: no more, no less.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout.axes import KV, TP, named
from shardwise.layout.mesh import Mesh
from shardwise.layout.units import UnitPlan
from shardwise.predict.traffic.ledger import predict_ledger


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
    from shardwise.schedule.choose import transport_rows

    mesh = Mesh.of(plan.layout, plan.model)
    ledger = predict_ledger(plan)
    groups = {row.axes: mesh.group(named(row.axes), 0) for row in ledger}
    waited_for = {mesh.name(TP), mesh.name(KV)}
    exposed = hideable = 0.0
    for row, sent in zip(ledger, transport_rows(ledger, groups, cluster), strict=True):
        assert sent.time_s is not None
        if row.axes in waited_for or row.phase in ("optimizer", "loss"):
            exposed += sent.time_s
        else:
            hideable += sent.time_s
    return StepTime(compute, exposed, hideable)
