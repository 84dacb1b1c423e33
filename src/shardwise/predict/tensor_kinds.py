"""The kinds of tensor parallelism side by side: what each moves and holds in the same step."""

from dataclasses import dataclass, replace
from itertools import product

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.algorithm_names import COLLECTIVES
from shardwise.layout.axes import TP
from shardwise.layout.keys import CHOICES
from shardwise.layout.units import usual_backend
from shardwise.model.parameters import Model
from shardwise.predict.estimate import estimate
from shardwise.predict.traffic.ring_volume import ring_bytes


@dataclass(frozen=True)
class TensorKind:
    """One kind of tensor parallelism in a step. Bytes are of the rank with the largest peak."""

    layout: Layout
    payload: dict[str, int]
    """Collective over the tensor-parallel ranks -> payload in bytes per step."""
    sent: int
    """Bytes that the rank sends for these on a ring."""
    saved: int
    """Bytes of activations saved for backward, at most."""
    peak: int
    """Bytes at the peak."""
    seconds: float | None
    """Seconds of the step; None without constants of time for the cluster."""

    @property
    def name(self) -> str:
        return f"tpkind={self.layout.tpkind}{',sp' if self.layout.sp else ''}"


def tensor_kinds(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> list[TensorKind]:
    """Every kind that can split the step as `layout` does, its own first. Empty without tensor parallelism."""
    if layout.tp == 1:
        return []
    kinds = [_kind(model, layout, workload, cluster)]
    for kind, sp in product(CHOICES["tpkind"], (False, True)):
        if (kind, sp) == (layout.tpkind, layout.sp):
            continue
        try:
            kinds.append(_kind(model, replace(layout, tpkind=kind, sp=sp), workload, cluster))
        except UserError:  # no such layout: not every kind has sp, or divides these heads
            continue
    return kinds


def _kind(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> TensorKind:
    report = estimate(model, layout, workload, cluster)
    role = max(report.roles, key=lambda role: role.peak_bytes)
    plan = unit_plan(model, layout, workload, rank=role.ranks[0], backend=usual_backend(cluster))
    rows = [row for row in role.ledger if row.axes == "_".join(TP)]
    payload = dict.fromkeys(COLLECTIVES.values(), 0)
    for row in rows:
        payload[COLLECTIVES[row.op]] += row.payload_bytes
    sent = sum(ring_bytes(row, plan) for row in rows)
    return TensorKind(layout, payload, round(sent), role.bytes.saved, role.peak_bytes, report.time)
