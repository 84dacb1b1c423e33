"""The seconds of one layout's step on a cluster: the closed form of `predict.time`, for the software that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.keys import changed
from shardwise.layout.units import UnitPlan, usual_backend
from shardwise.model.parameters import Model
from shardwise.records import dataclass
from shardwise.report.units import format_time

if TYPE_CHECKING:
    from shardwise.schedule.stragglers import Stragglers


@dataclass(frozen=True)
class StepTiming(Json):
    """A step's time. seconds: the prediction; low, high: its 80% range; parts: where they go, adding up to `seconds`
    (`predict.time.step.StepSeconds` says what each is). engine: the profile of the software that was assumed. notes:
    what stands in for measurements of the device, and of the host where something is offloaded."""

    json_keys = "engine seconds low high parts busy links"
    json_omits = ("busy", "links")

    engine: str
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    notes: tuple[str, ...] = ()
    busy: dict[str, float] = field(default_factory=dict)
    """Seconds of the device, and of link, cores and disk of the host, hidden or not; empty without offloading."""
    links: dict[str, float] = field(default_factory=dict)
    """Seconds of collectives and messages by part, hidden or not; without exchanges outside of lockstep."""


def own_engine(cluster: Cluster) -> str:
    """The profile of this project's runtime on the cluster's kind of device."""
    return "shardwise-cpu" if cluster.device.kind == "cpu" else "shardwise"


def step_seconds(
    model: Model, layout: Layout, workload: Workload, cluster: Cluster, engine: str | None = None,
    slow: Stragglers | None = None, emulated: float | None = None, dtype: str | None = None,
    plan: UnitPlan | None = None,
) -> StepTiming:  # fmt: skip
    """Predict the seconds of one steady training step; where replicas train apart from each other, the mean of a round.

    engine: a profile of `predict.time.ENGINES`; None is this project's runtime. slow: slow ranks; the time is then a
    mean over steps. emulated: seconds that the arithmetic of a step lasts in place of the predicted ones. dtype:
    torch's name of the products' type; None for the layout's. plan: of the first rank, where there is one. Raises
    `UserError` for a device without constants, a link whose figures are not known, and what has no closed form.
    """
    from shardwise.predict.time import Pricing, StepShape, time_range, training_step
    from shardwise.predict.time import engine as engine_of
    from shardwise.predict.time.profiles import attending
    from shardwise.predict.time.ranges import large_run
    from shardwise.predict.time.step import link_seconds

    _check(model, layout, workload)
    name, pricing = engine or own_engine(cluster), Pricing(cluster, layout=layout)
    split = replace(StepShape.of(layout, workload, dtype), schedule=layout.schedule if layout.pp > 1 else "1f1b")
    if layout.offloads_activations:
        from shardwise.predict.memory.activations import stored_by_part

        plan = plan or unit_plan(model, layout, workload, backend=usual_backend(cluster))
        stored = sum(stored_by_part(plan.as_micro_batch(0) if plan.routing.uneven else plan).values())
        split = replace(split, saved_bytes=float(stored) / max(1, len(plan.of_kind("block"))))
    step = training_step(model, split, attending(engine_of(name), layout.attention), pricing)
    parts = {part: float(seconds) for part, seconds in step.parts.items()}
    outer: tuple[str, ...] = ()
    if layout.local_sgd:
        from shardwise.predict.time.outer import outer_seconds

        whole = outer_seconds(model, layout, split, engine_of(name), pricing)
        outer = (_rounds(layout, sum(parts.values()), whole),)
        parts["outer"] = whole / layout.every
    if layout.served:
        from shardwise.predict.time.outer import served_parts

        cuda = cluster.device.kind == "cuda"
        parts = served_parts(parts, model, layout, split, engine_of(name), pricing, cuda)
    slowed = ""
    if slow is not None or emulated is not None:
        from shardwise.predict.time.stragglers import with_stragglers

        parts, slowed = with_stragglers(parts, model, layout, slow, emulated)
    busy = {name: float(seconds) for name, seconds in step.busy.items()}
    sent = link_seconds(model, split, attending(engine_of(name), layout.attention), pricing)
    links = {part: float(seconds) for part, seconds in sent.items()}
    host = pricing.host.notes(layout.uses_disk) if busy else ()
    unknown = engine_of(name).uncertain
    around = time_range(parts, pricing.constants, assumed=len(host), routed=bool(model.experts), unknown=unknown)
    notes = (*pricing.constants.notes, *host, *outer, *([slowed] if slowed else []), *large_run(layout.ranks))
    return StepTiming(name, sum(parts.values()), float(around.low), float(around.high), parts, notes, busy, links)


def _check(model: Model, layout: Layout, workload: Workload) -> None:
    """Raise `UserError` for what has no modelled time."""
    from shardwise.predict.supported import MOST_DEVICES, in_closed_form

    for key, value in changed(layout).items():
        if "untimed" in key.marks:
            raise UserError(f"the time of {key.text(value)} is not modelled")
    if model.lora and layout.offloads_params:
        raise UserError(f"the time of frozen weights with offload_params={layout.offload_params} is not modelled")
    if layout.ranks > MOST_DEVICES:
        raise UserError(f"time is predicted for up to {MOST_DEVICES:,} devices")
    count = workload.micro_batches(layout)
    if layout.pp > 1 and not in_closed_form(layout.schedule, layout.virtual, layout.pp, count):
        raise UserError(f"schedule={layout.schedule} with {count} micro-batches has no closed form of its time")


def _rounds(layout: Layout, step: float, outer: float) -> str:
    return (
        f"sync=local: {format_time(step)} for a step and {format_time(outer)} for an outer step, one in "
        f"{layout.every}; the time is the mean of a round"
    )


def partly(share: float, without: Mapping[str, float], full: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part where a share of the blocks is recomputed, from those where none is and where all are."""
    return {part: seconds + (full[part] - seconds) * share for part, seconds in without.items()}


def partly_recomputed(share: float, without: StepTiming, full: StepTiming) -> StepTiming:
    """Time of a step in which a share of the blocks is recomputed."""
    numbers = {name: getattr(without, name) + (getattr(full, name) - getattr(without, name)) * share
               for name in ("seconds", "low", "high")}  # fmt: skip
    return replace(without, **numbers, parts=partly(share, without.parts, full.parts))


def try_step_seconds(
    model: Model, layout: Layout, workload: Workload, cluster: Cluster | None, engine: str | None = None,
    slow: Stragglers | None = None, emulated: float | None = None, dtype: str | None = None,
    plan: UnitPlan | None = None,
) -> tuple[StepTiming | None, str]:  # fmt: skip
    """(the time, "") or (None, a sentence why there is none; empty where nothing is known of how fast devices are)."""
    if cluster is None or cluster.device.memory_bandwidth is None:
        return None, ""
    try:
        return step_seconds(model, layout, workload, cluster, engine, slow, emulated, dtype, plan), ""
    except UserError as error:
        return None, f"no time of a step: {error}"
