"""The split of a model: `Layout`, `Workload`, the rank mesh, the placement of every tensor, and the `UnitPlan`."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout
    from shardwise.layout.legality import check, check_runnable, fewer_ranks
    from shardwise.layout.mesh import Mesh
    from shardwise.layout.units import UnitPlan, unit_plan
    from shardwise.layout.workload import Workload

__all__ = ["Layout", "Mesh", "UnitPlan", "Workload", "check", "check_runnable", "fewer_ranks", "unit_plan"]

lazily(__name__)
