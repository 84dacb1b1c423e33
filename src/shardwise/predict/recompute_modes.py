"""The recompute modes side by side: what each saves and costs in the same step."""

from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.keys import CHOICES
from shardwise.model.parameters import Model
from shardwise.predict.breakdown import training_flops
from shardwise.predict.estimate import estimate


@dataclass(frozen=True)
class RecomputeMode:
    """One mode. Bytes are of the rank with the largest peak."""

    name: str
    saved: int
    """Bytes of activations saved for backward, at most."""
    peak: int
    seconds: float | None
    """Seconds of the step; None without constants of time for the cluster."""
    added: float
    """FLOPs of recomputation over the model's."""


def recompute_modes(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> tuple[RecomputeMode, ...]:
    """Every mode that the layout can have, the one that recomputes least first."""
    modes = []
    for name in CHOICES["recompute"]:
        changed = replace(layout, recompute=name)
        try:
            report = estimate(model, changed, workload, cluster)
        except UserError:  # no such layout
            continue
        role = max(report.roles, key=lambda role: role.peak_bytes)
        flops = training_flops(model, changed, workload)
        added = flops.recompute / (flops.matrices + flops.attention)
        modes.append(RecomputeMode(name, role.bytes.saved, role.peak_bytes, report.time, added))
    return tuple(modes)
