"""The terms behind an estimate: parameters by mechanism, bytes per parameter, saved tensors, FLOPs.

Every number comes from the functions that `estimate` adds up, so each table's sum is the estimate's own total.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import cast

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Workload, check, unit_plan
from shardwise.layout.layout import with_stage
from shardwise.layout.legality import suited
from shardwise.layout.optimizers import MODEL
from shardwise.layout.pipeline import stages
from shardwise.layout.units import UnitPlan, usual_backend
from shardwise.model import ModelConfig
from shardwise.model.adapters import factor_of
from shardwise.model.blueprint import Parameter, Part
from shardwise.model.flops import (
    Recompute,
    attention_flops_per_token,
    hardware_flops_per_token,
    matmul_parameters,
    traced_flops,
    training_flops_per_token,
)
from shardwise.model.parameters import Model, blueprint
from shardwise.model.trace import Trace, TracedStep
from shardwise.predict.memory.activations import kept_items, saved_items, saved_mask
from shardwise.predict.memory.pipeline import most_under_way, stages_of
from shardwise.predict.memory.servers import with_servers
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.step import OUTER, optimizer_arrays, predict_bytes
from shardwise.predict.memory.traced import saved_by_part, trace_of
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.predict.traffic.ring_volume import ring_bytes
from shardwise.report.step_report import Bytes, Role, StepReport

GROUPS = ("embedding", "attention", "MLP", "experts", "norms", "adapters", "head", "other")
"""MLP: dense feed-forward parts. experts: routed and shared ones, and their router. head: the output projection, empty
where it is tied to the embedding. other: of a traced module, whose names say nothing."""


def group_of(part: Part, parameter: Parameter) -> str:
    """One of `GROUPS`."""
    words = parameter.name.split(".")
    if factor_of(parameter.name)[1]:
        return "adapters"
    if any(word == "norm" or word.endswith("_norm") for word in words):
        return "norms"
    if part.kind in ("embedding", "head"):
        return part.kind
    if parameter.cut == "expert" or words[:2] in (["mlp", "router"], ["mlp", "shared"]):
        return "experts"
    return {"attention": "attention", "mlp": "MLP"}.get(words[0], "other")


def count_groups(model: Model) -> dict[str, int]:
    """Number of parameters by group, tied ones once; groups that a model lacks are left out."""
    counts = dict.fromkeys(GROUPS, 0)
    for part in blueprint(model).parts:
        for parameter in part.parameters:
            counts[group_of(part, parameter)] += part.count * parameter.numel
    return {group: number for group, number in counts.items() if number}


MASK = "mask of packed documents"


@dataclass(frozen=True)
class SavedTerm:
    """One tensor that is saved for backward."""

    part: str
    """"embedding", "block" or "head"; "deferred" for tensors that a pipeline keeps for later gradients of weights."""
    name: str
    nbytes: int
    """Bytes on the rank when its saved activations are the most."""
    count: int
    """Such tensors: parts of the rank times micro-batches under way."""


def saved_terms(plan: UnitPlan) -> tuple[SavedTerm, ...]:
    """Every kind of saved tensor, in the order of the forward pass; of a traced module those of equal parts, or of a
    stage, together. Their sum is the class `saved` of `predict_bytes`."""
    sums: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()

    def add(kind: str, items: dict[str, int], times: int) -> None:
        for name, nbytes in items.items():
            sums[kind, name] += times * nbytes
            counts[kind, name] += times

    if traced := trace_of(plan):
        _add_traced(plan, *traced, add)
        return tuple(SavedTerm(*key, nbytes, counts[key]) for key, nbytes in sums.items())
    s = Sizes.of(plan)
    if plan.layout.pp == 1:
        for part in plan.parts:
            add(plan.blueprint.kind(part), saved_items(plan, s, part), 1)
        masks = 1
    else:
        way = most_under_way(plan)
        for stage, parts in plan.stages.items():
            for part in parts:
                add(plan.blueprint.kind(part), saved_items(plan, s, part), way.saved[stage])
                add("deferred", kept_items(plan, s, part), way.kept[stage])
        masks = way.attending
    add("block", {MASK: saved_mask(plan, s)}, masks)
    return tuple(SavedTerm(kind, name, nbytes, counts[kind, name]) for (kind, name), nbytes in sums.items() if nbytes)


def _add_traced(
    plan: UnitPlan, trace: Trace, step: TracedStep, add: Callable[[str, dict[str, int], int], None]
) -> None:
    if plan.layout.pp > 1:
        way, stages = most_under_way(plan), stages_of(plan)
        for stage in plan.stages:
            add("stage", {f"stage {stage}": stages.of(stage).saved}, way.saved[stage])
        add("stage", {"buffers": stages.lasting} if stages.lasting else {}, 1)
        return
    for name, nbytes in saved_by_part(plan, trace, step).items():
        add(plan.blueprint.kind(name), {f"of {plan.blueprint.part(name).module}": nbytes}, 1)


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
    """Matrix elements that one token is multiplied with: the N of 6ND; 0 for a traced module."""


@dataclass(frozen=True)
class Breakdown(Json):
    """Terms of an estimate, for the rank whose peak is the largest."""

    json_keys = "role parameters parameters_of_rank=here stage states saved flops"

    role: str
    ranks: tuple[int, ...]
    parameters: dict[str, int]
    """Group of `GROUPS` -> parameters of the whole model."""
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


def breakdown(model: Model, layout: Layout, workload: Workload, cluster: Cluster, report: StepReport) -> Breakdown:
    """Terms of `report`, which `estimate` gave for the same arguments."""
    layout, _ = suited(layout, model)
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
        layout = with_stage(plan.layout, stage)
        if isinstance(plan.subject, ModelConfig):
            check(layout, plan.subject, plan.workload)
        return replace(plan, layout=layout)
    except LayoutError:
        return None


def _states(plan: UnitPlan, role: Role) -> StageStates:
    held, arrays = predict_bytes(plan), optimizer_arrays(plan.short if plan.layout.pp > 1 else plan)
    nbytes = {"weights": held.parameters, "gradients": held.gradients, **arrays}
    if plan.layout.served and not plan.cuda:
        nbytes["server"] = with_servers(plan, role.ranks[0], Bytes()).optimizer
    weights = plan.dtypes.interval if plan.layout.stage == 3 else plan.layout.dtype
    dtypes = {"weights": weights, "gradients": plan.dtypes.gradients, **dict.fromkeys(arrays, plan.dtypes.master)}
    dtypes.pop(OUTER, None)
    return StageStates(plan.layout.zero, plan.layout, nbytes, dtypes, round(_sent(plan)))


def _sent(plan: UnitPlan) -> Fraction:
    names = {
        unit.name: {
            plan.mesh.name(axes) for axes in (unit.sharded_over, unit.again, *(hop.axes for hop in unit.reduce))
        }
        for unit in plan.units
    }
    rows = (row for row in predict_ledger(plan) if row.axes in names.get(row.unit, ()))
    return sum((ring_bytes(row, plan) for row in rows), Fraction(0))


def training_flops(model: Model, layout: Layout, workload: Workload) -> TrainingFlops:
    """Terms of `training_flops_per_sequence`, and what recomputation adds, for a step."""
    tokens, seq = workload.batch * workload.seq, workload.seq
    if model.trace:
        attention, rest, blocks = (workload.batch * flops for flops in traced_flops(model))
        return TrainingFlops(tokens, rest, attention, blocks * (layout.recompute == "full"), 0)
    total = training_flops_per_token(model, seq)
    attention = 3 * attention_flops_per_token(model, seq)
    if layout.recompute == "input":
        again = _from_inputs(model, layout, seq)
    else:
        again = hardware_flops_per_token(model, seq, cast(Recompute, layout.recompute)) - total
    return TrainingFlops(
        tokens, tokens * (total - attention), tokens * attention, tokens * again, matmul_parameters(model)
    )


def _from_inputs(model: Model, layout: Layout, seq: int) -> int:
    """FLOPs per token of recomputation from the first input of each stage: each block runs for all behind it, too."""
    blocks = [sum(op.flops_per_token(seq) for op in part.operations)
              for part in blueprint(model).of_kind("block") for _ in range(part.count)]  # fmt: skip
    last = accumulate(stages(model, layout).layers)
    return sum(
        flops * (stop - place)
        for stop, count in zip(last, stages(model, layout).layers, strict=True)
        for place, flops in enumerate(blocks[stop - count : stop], stop - count)
    )
