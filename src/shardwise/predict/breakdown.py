"""The terms behind an estimate: parameters by mechanism, bytes per parameter, saved tensors, FLOPs.

Every number comes from the functions that `estimate` adds up, so each table's sum is the estimate's own total.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Workload, check, unit_plan
from shardwise.layout.optimizers import MODEL
from shardwise.layout.units import UnitPlan, usual_backend
from shardwise.model import ModelConfig
from shardwise.model.flops import (
    Recompute,
    attention_flops_per_token,
    hardware_flops_per_token,
    matmul_parameters,
    training_flops_per_token,
)
from shardwise.model.groups import count_groups
from shardwise.predict.memory.saved_terms import SavedTerm, saved_terms
from shardwise.predict.memory.servers import with_servers
from shardwise.predict.memory.step import OUTER, optimizer_arrays, predict_bytes
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.predict.traffic.ring_volume import ring_bytes
from shardwise.report.step_report import Bytes, Role, StepReport

ARRAYS = {
    "weights": "weights", "gradients": "gradients", MODEL: "master weights", "first": "first moment",
    "second": "second moment", OUTER: "state of outer steps", "server": "a parameter server's state",
}  # fmt: skip
"""Arrays per parameter in the order of the table, with their names."""


@dataclass(frozen=True, eq=False)
class StageStates(Json):
    """Bytes that a rank has per parameter array under one ZeRO stage."""

    json_keys = "stage layout bytes=nbytes dtypes sent_bytes=sent"

    stage: int
    layout: Layout
    nbytes: dict[str, int]
    """Key of `ARRAYS` -> bytes."""
    dtypes: dict[str, str]
    """Key of `ARRAYS` -> dtype, for arrays of one dtype."""
    sent: int
    """Bytes that the rank sends for weights and gradients per step, on rings."""

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class TrainingFlops:
    """Model FLOPs of one step, over all ranks."""

    tokens: int
    matrices: int
    """6 per matrix element and token; 4 for a frozen one."""
    attention: int
    """Products of queries, keys and values, causal."""
    recompute: int
    """FLOPs that recomputation adds, which are no model FLOPs."""
    matrix_elements: int
    """Matrix elements that one token is multiplied with: the N of 6ND."""


@dataclass(frozen=True)
class Breakdown(Json):
    """Terms of an estimate, for the rank whose peak is the largest."""

    json_keys = "role parameters parameters_of_rank=here stage states saved flops"

    role: str
    ranks: tuple[int, ...]
    parameters: dict[str, int]
    """Group of `model.groups.GROUPS` -> parameters of the whole model."""
    here: int
    """Parameters of the rank's part of the model, before ZeRO cuts them."""
    stage: int
    """ZeRO stage of the layout."""
    states: tuple[StageStates, ...]
    """The layout's own stage, and those others that it can have."""
    saved: tuple[SavedTerm, ...]
    flops: TrainingFlops

    @property
    def own(self) -> StageStates:
        return next(states for states in self.states if states.stage == self.stage)


def breakdown(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, report: StepReport
) -> Breakdown:
    """Terms of `report`, which `estimate` gave for the same arguments."""
    role = max(report.roles, key=lambda role: role.peak_bytes)
    plan = unit_plan(model, layout, workload, rank=role.ranks[0], backend=usual_backend(cluster))
    states = [_states(plan, role)]
    for stage in range(4):
        if stage != layout.zero and (other := _under(plan, stage)):
            states.append(_states(other, role))
    states.sort(key=lambda one: one.stage)
    return Breakdown(
        role.role, role.ranks, count_groups(model), sum(unit.numel for unit in plan.units), layout.zero, tuple(states),
        saved_terms(plan), training_flops(model, layout, workload),
    )  # fmt: skip


def _under(plan: UnitPlan, stage: int) -> UnitPlan | None:
    """The plan under another ZeRO stage, without the keys that this stage has not; None where it cannot be."""
    try:
        layout = plan.layout.with_stage(stage)
        check(layout, plan.model, plan.workload)
        return replace(plan, layout=layout)
    except LayoutError:
        return None


def _states(plan: UnitPlan, role: Role) -> StageStates:
    held, arrays = predict_bytes(plan), optimizer_arrays(plan.short if plan.layout.pp > 1 else plan)
    nbytes = {"weights": held.parameters, "gradients": held.gradients, **arrays}
    if plan.layout.served and not plan.cuda:
        nbytes["server"] = with_servers(plan, role.ranks[0], Bytes()).optimizer
    weights = plan.interval_dtype if plan.layout.stage == 3 else plan.layout.dtype
    dtypes = {"weights": weights, "gradients": plan.grad_dtype, **dict.fromkeys(arrays, plan.master_dtype)}
    dtypes.pop(OUTER, None)
    return StageStates(plan.layout.zero, plan.layout, nbytes, dtypes, round(_sent(plan)))


def _sent(plan: UnitPlan) -> Fraction:
    names = {
        unit.name: {plan.mesh.name(axes) for axes in (unit.shard, unit.again, *(hop.axes for hop in unit.reduce))}
        for unit in plan.units
    }
    rows = (row for row in predict_ledger(plan) if row.axes in names.get(row.unit, ()))
    return sum((ring_bytes(row, plan) for row in rows), Fraction(0))


def training_flops(model: ModelConfig, layout: Layout, workload: Workload) -> TrainingFlops:
    """Terms of `training_flops_per_token`, and what recomputation adds, for a step."""
    tokens, seq = workload.batch * workload.seq, workload.seq
    recompute: Recompute = "full" if layout.recompute == "input" else layout.recompute  # type: ignore[assignment]
    total = training_flops_per_token(model, seq)
    attention = 3 * attention_flops_per_token(model, seq)
    again = hardware_flops_per_token(model, seq, recompute) - total
    return TrainingFlops(
        tokens, tokens * (total - attention), tokens * attention, tokens * again, matmul_parameters(model)
    )
