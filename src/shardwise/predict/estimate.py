"""`estimate`: model, layout, workload and cluster in, `StepReport` out, without torch and in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, check, unit_plan
from shardwise.layout.axes import TP
from shardwise.layout.experts import RoutedRows
from shardwise.layout.legality import beyond_positions
from shardwise.layout.optimizers import DEFAULT, states_of
from shardwise.layout.step import role_of
from shardwise.layout.unit import Backend
from shardwise.layout.units import UnitPlan, usual_backend
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.predict.arguments import Length, as_step
from shardwise.predict.cluster_links import links_json
from shardwise.predict.memory.capacity import try_room
from shardwise.predict.memory.engine_settings import MUON, USUAL, EngineSettings, check_optimizer
from shardwise.predict.memory.homes import disk_bytes, host_bytes
from shardwise.predict.memory.step import OPTIMIZER_BYTES, predict_bytes, state_bytes
from shardwise.predict.step_seconds import StepTiming, partly_recomputed, try_step_seconds
from shardwise.predict.traced_layout import check_traced
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.predict.traffic.schedules import as_under_auto, predict_transport
from shardwise.report.step_report import Bytes, Role, StepReport, merge_roles

if TYPE_CHECKING:
    from shardwise.schedule.stragglers import Stragglers


def estimate(
    model: Model | str, layout: Layout | str | Mapping[str, Any], workload: Workload | Cluster | str | None = None,
    cluster: Cluster | Workload | str | None = None, backend: Backend | None = None, engine: str | None = None,
    recorded: Sequence[Role] = (), slow: Stragglers | None = None, emulated: float | None = None,
    settings: EngineSettings | None = None, *, seq: Length = None, batch: Length = None,
) -> StepReport:  # fmt: skip
    """Predict one steady training step: bytes by class and ledger of every rank role, and its time where that is known.

    model, layout, cluster: objects, or their names and texts: "llama-3-8b", "tp=2,dp=4", "8xH100"; a layout also a
    dict. A traced module is a `Blueprint`, or its file. Workload and cluster may come in either order. seq, batch:
    tokens per sequence and sequences per step, in place of a workload; usual ones where they are left out.
    cluster: where it would run; None means local processes on the CPU. backend: what carries the collectives; None
    means what the runtime would choose there (`usual_backend`). engine: the profile of the software that is timed
    (`predict.time.ENGINES`), and whose memory is counted where it is known (`predict/memory/engines.toml`); None means
    this project's runtime. recorded: roles of a measured step of a model with experts, whose routing the prediction
    then follows rank by rank. slow: slow ranks, and emulated: seconds of a step's arithmetic, as `train` has them.
    settings: of the engine, beside the layout. What is not priced yet is said in the report's `notes`.
    Raises `LayoutError` when the layout does not suit model, workload or devices, and `UserError` for a workload
    without sequences and for a slow rank that does not exist.
    """
    model, layout, workload, cluster, assumed = as_step(model, layout, workload, cluster, seq, batch)
    _check(model, layout, workload, cluster, slow)
    (settings := settings or USUAL).check(engine or "", layout)
    check_optimizer(engine or "", workload.optimizer)
    backend = backend or usual_backend(cluster)
    counted = "" if recorded else _counted(engine, model, layout)
    plan_of = cache(partial(unit_plan, model, layout, workload, backend=backend))
    roles = _roles(plan_of, Mesh.of(layout, model), recorded, counted, settings)
    timing, why = _timed(model, layout, workload, cluster, engine, slow, emulated, settings, plan_of)
    room, peak = try_room(cluster, engine, bool(model.experts)), max(role.peak_bytes for role in roles)
    names = as_under_auto(roles)
    unscheduled = f"algorithm={layout.algorithm} has no schedule for {names}: as under auto" if names else ""
    notes = [
        *assumed, *filter(None, [room.warning(peak) if room else ""]), *beyond_positions(model, workload.seq),
        *(model.counted.assumptions if model.counted else ()),
        *_memory_notes(engine or "", counted, model, layout, workload, backend),
        *filter(None, [unscheduled]), *(timing.notes if timing else ()), *filter(None, [why]),
    ]  # fmt: skip
    return StepReport(
        source="predicted", model={"name": model.name} if model.trace else model.to_json(),
        layout=str(layout), workload=workload.to_json(), cluster=str(cluster) if cluster else f"{layout.ranks}xCPU",
        roles=tuple(roles), time=timing.seconds if timing else None, timing=timing.to_json() if timing else None,
        notes=tuple(notes), balance=_balance(model, layout, workload), room=room.to_json(peak) if room else None,
        cluster_links=links_json(cluster) if cluster else None,
    )  # fmt: skip


def _counted(engine: str | None, model: Model, layout: Layout) -> str:
    """The engine whose memory is counted; empty for this runtime's."""
    if not engine:
        return ""
    from shardwise.predict.memory.engine_bytes import counts_engine

    return engine if counts_engine(engine, model, layout) else ""


def _balance(model: Model, layout: Layout, workload: Workload) -> dict[str, Any] | None:
    if layout.cp == 1 or model.trace:
        return None
    from shardwise.predict.context_balance import context_balance

    return context_balance(model, layout, workload).to_json()


def _timed(
    model: Model, layout: Layout, workload: Workload, cluster: Cluster | None, engine: str | None,
    slow: Stragglers | None, emulated: float | None, settings: EngineSettings, plan_of: Callable[..., UnitPlan],
) -> tuple[StepTiming | None, str]:  # fmt: skip
    if cluster is not None and settings.modules:
        return None, "no time of a step: that of recomputed modules is not modelled"
    plan = plan_of(rank=0) if layout.offloads_activations else None
    timing, why = try_step_seconds(model, layout, workload, cluster, engine, slow, emulated, settings.dtype, plan)
    if timing is None or not settings.layers or model.trace:
        return timing, why
    whole = replace(layout, recompute="full")
    full, why = try_step_seconds(model, whole, workload, cluster, engine, slow, emulated, settings.dtype)
    share = settings.recomputed(model.layers, layout.pp * layout.virtual)
    return full and partly_recomputed(share, timing, full), why


def _memory_notes(
    engine: str, counted: str, model: Model, layout: Layout, workload: Workload, backend: Backend
) -> list[str]:
    """Origin of the bytes, and assumptions behind them. counted: the engine whose memory it is."""
    if counted:
        muon = [MUON] if workload.optimizer == "muon" else []
        return [
            *muon,
            f"memory is that of {engine}, from what its code saves for backward; communication is this runtime's",
        ]
    why: list[str] = []
    if engine:
        from shardwise.predict.memory.engine_bytes import OWN, why_not_counted

        why = [f"memory is this runtime's: {why_not_counted(engine, model, layout)}"] if engine not in OWN else []
    return [*_notes(model, layout, backend), *why, *_optimizer_note(layout, workload)]


def _roles(
    plan_of: Callable[..., UnitPlan], mesh: Mesh, recorded: Sequence[Role], engine: str, settings: EngineSettings
) -> list[Role]:
    """Roles of all ranks; recorded: those of a measured step, to be followed. engine: whose memory it is."""
    if recorded:
        return [_of_record(plan_of(rank=role.ranks[0]), role) for role in recorded]
    if mesh.layout.served:
        return _served(mesh, plan_of)
    counted = predict_bytes
    if engine:
        from shardwise.predict.memory.engine_bytes import engine_bytes

        def counted(plan: UnitPlan) -> Bytes:
            return engine_bytes(engine, plan, settings)

    return [_role(plan_of(rank=mesh.rank(pp=p)), mesh.stage(p), counted) for p in range(mesh.layout.pp)]


def _check(model: Model, layout: Layout, workload: Workload, cluster: Cluster | None, slow: Stragglers | None) -> None:
    ranks = cluster.devices if cluster else None
    if not workload.batch:
        raise UserError("estimate needs a training workload: give a sequence length and a batch (--seq and --batch)")
    if not isinstance(model, ModelConfig):
        check_traced(layout, model, workload, ranks)
    else:
        check(layout, model, workload, ranks)
        if (reason := model.why_not_runnable()) and not model.counted:
            planned = _planned(model, layout, workload, cluster)
            raise UserError(f"{model.name} cannot be estimated yet: {reason}{planned}")
    if slow is not None:
        slow.check(layout.training_ranks)


def _planned(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster | None) -> str:
    """Command that prices this layout of a model that no decoder here computes."""
    from shardwise.model.catalog import catalog
    from shardwise.predict.fixing import text_of
    from shardwise.predict.supported import why_not_planned

    if cluster is None or why_not_planned(model):
        return ""
    name = model.name if catalog().get(model.name) == model else "MODEL"
    asked = f"--cluster {cluster} --seq {workload.seq} --batch {workload.batch}"
    if workload.optimizer != DEFAULT:
        asked += f" --optimizer {workload.optimizer}"
    return f"; its memory and time: shardwise plan {name} {asked} --fix {text_of(layout)}"


def _role(plan: UnitPlan, ranks: tuple[int, ...], counted: Callable[[UnitPlan], Bytes]) -> Role:
    return Role(
        role_of(plan), ranks, counted(plan), predict_ledger(plan), predict_transport(plan, ranks[0]),
        host=host_bytes(plan), disk=disk_bytes(plan),
    )  # fmt: skip


def _served(mesh: Mesh, plan_of: Callable[..., UnitPlan]) -> list[Role]:
    """Workers and parameter servers: ranks differ in the server that they share a process with."""
    from shardwise.predict.memory.servers import with_servers

    roles = {}
    for rank in range(mesh.layout.ranks):
        plan = plan_of(rank=mesh.rank(tp=mesh.index(TP, rank)))
        works = rank < mesh.layout.training_ranks
        held = predict_bytes(plan) if works else Bytes()
        ledger, transport = (predict_ledger(plan), predict_transport(plan, rank)) if works else ((), ())
        host = Bytes()
        if plan.cuda:  # servers are on the host's cores
            host = with_servers(plan, rank, host)
        else:
            held = with_servers(plan, rank, held)
        roles[rank] = Role(f"rank {rank}", (rank,), held, ledger, transport, host=host)
    return list(merge_roles(roles))


def _of_record(plan: UnitPlan, recorded: Role) -> Role:
    plan = replace(plan, routed=RoutedRows.of(recorded.routed or {}))
    ledger, transport = predict_ledger(plan), predict_transport(plan, recorded.ranks[0])
    return Role(
        recorded.role, recorded.ranks, predict_bytes(plan), ledger, transport,
        routed=recorded.routed, host=host_bytes(plan), disk=disk_bytes(plan),
    )  # fmt: skip


def _optimizer_note(layout: Layout, workload: Workload) -> list[str]:
    """Why an optimizer's state is smaller than AdamW's."""
    less = OPTIMIZER_BYTES[layout.precision] - state_bytes(layout.precision, workload.optimizer)
    if not less:
        return []
    kept = "one moment" if len(states_of(workload.optimizer)) > 1 else "no moments"
    return [f"{workload.optimizer} keeps {kept} per parameter where adamw keeps two: {less} bytes less"]


def _notes(model: Model, layout: Layout, backend: Backend) -> list[str]:
    notes = []
    if backend in ("nccl", "staged"):
        forms = "CPUs" if model.trace else "the forms for CUDA, which were measured on one H100"
        notes.append(f"saved activations are those of {forms}; other kernels may save a little differently")
    if layout.compile != "off":
        notes.append(
            "compile=block: saved activations are those of torch's own partitioner; the rest of the peak is that of "
            "eager blocks, beside the gradients that a block's backward returns"
        )
    if layout.local_sgd and layout.every > 1:
        notes.append(
            f"sync=local: bytes and communication are those of a step with an outer step, one in {layout.every}; the "
            "others have none of its rows"
        )
    if layout.recompute == "selective" and layout.attention == "sdpa":
        notes.append("recompute=selective under attention=sdpa frees only the log-sum-exp of the fused kernel")
    if layout.grads == "bf16" and layout.precision == "bf16":
        notes.append("grads=bf16 holds with one micro-batch a step; more are summed in fp32, and counted so")
    if model.trace:
        notes.append("traced module: activations scale with the rows of a micro-batch from two traced sizes")
    elif model.experts:
        notes.append("tokens are taken to spread evenly over the experts, none dropped: a run's own routing differs")
    return notes
