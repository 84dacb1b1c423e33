"""`plan`: model, cluster and workload in; the best layouts with their figures out, and why they are the best."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from typing import Any

from shardwise.cluster import Cluster
from shardwise.cluster.catalog import DevicePrice, price_of
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload
from shardwise.layout.legality import beyond_positions
from shardwise.layout.model_size import size_words
from shardwise.model.flops import MFU, training_flops_per_sequence
from shardwise.model.parameters import Model, count
from shardwise.planner import shortfall
from shardwise.planner.answer import Answer, By, winners
from shardwise.planner.common import SAME, Alternative, resembling
from shardwise.planner.price_words import price_line, priced
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import Candidate
from shardwise.planner.runnable import OWN, space_for, why_not_trained
from shardwise.planner.space import Space
from shardwise.predict.arguments import as_cluster, as_model, as_workload
from shardwise.predict.cluster_links import link_lines
from shardwise.predict.memory.capacity import explained, room_of
from shardwise.predict.memory.engine_settings import MUON, USUAL, EngineSettings
from shardwise.predict.tables import node_line
from shardwise.predict.time.constants import constants
from shardwise.predict.time.ranges import large_run
from shardwise.predict.traffic.slow_links import tensor_warnings
from shardwise.records import dataclass
from shardwise.report import time_parts
from shardwise.report.printing import Printable
from shardwise.report.room import DeviceRoom
from shardwise.report.step_report import Role, StepReport
from shardwise.report.table import Column, FittedTable
from shardwise.report.tables import memory_table
from shardwise.report.terminal import Renderable
from shardwise.report.timing_table import LEAST
from shardwise.report.units import format_bytes, format_share, format_time

_BAR = 24
"""Characters of the longest bar."""
EXPERTS = (
    "experts: published steps of such models are predicted 16% off on average, from -60% to +9% (27 rows of "
    "Megatron-Bridge, docs/prediction.md), so the ranges are wide, and layouts this close are not told apart",
    "tokens are taken to spread evenly over the experts, none dropped: a rank whose experts get a fifth more than the "
    "mean takes that much longer for them, and keeps as much more of their activations",
)
"""Notes on every plan of a model with experts."""


@dataclass(frozen=True, repr=False)
class Plan(Answer[Priced], Printable):
    """The best layouts of a model on a cluster, best first, and what there is to say about the first.

    cluster: the whole one; `by="cost"` may choose layouts on fewer of its nodes.
    """

    alternatives: tuple[Alternative, ...]
    unlimited: Priced | None
    """The fastest layout if memory were no limit; None where that is the winner."""
    none_runs: str = ""
    """Reason why none of the layouts runs here yet, in a plan for this runtime; empty if all run."""
    capacity: str = ""
    """Derivation of the usable bytes; empty where nothing is reserved."""
    device_price: DevicePrice | None = None
    """Of one device; None where it has no list price and none was given."""
    fastest: Priced | None = None
    """The fastest layout that fits, where the first is as fast within the error and more common."""
    same: tuple[Candidate, ...] = ()
    """Layouts that may fit and are as fast as the fastest within the error, the most common first."""
    room: DeviceRoom = field(default_factory=lambda: DeviceRoom(0.0))
    """A device's room. Layouts fit with its margin, unless none does."""
    settings: EngineSettings = USUAL
    """Of the engine, beside its layouts."""

    @property
    def searched(self) -> float:
        """Bytes of a device that layouts were held to."""
        at_risk = any(self.room.state(one.held.total) == "at risk" for one in self.ranked)
        return self.room.usable if at_risk else self.room.safe

    def tables(self) -> Iterator[Renderable]:
        return plan_tables(self)

    def conclusion(self) -> str:
        return plan_conclusion(self)

    @property
    def notes(self) -> tuple[str, ...]:
        narrow = self.settings.precision
        products = (f"products in {narrow}, as {self.engine} has them",) if narrow else ()
        experts, muon = EXPERTS if self.model.experts else (), (MUON,) if self.workload.optimizer == "muon" else ()
        longer = beyond_positions(self.model, self.workload.seq)
        return (*longer, MFU, *products, *muon, *experts, *large_run(self.winner.layout.ranks))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The best layout's risk to run out of memory; and layouts shown whose tensor parallelism runs over slow links,
        a line for each tp."""
        risk = self.room.warning(self.winner.held.total)
        slow = tensor_warnings(self.cluster, ((one.layout.tp, one.parts) for one in self.ranked), "the step")
        return (*([risk] if risk else []), *slow)

    def tokens_per_second(self, one: Priced) -> float:
        """Tokens per second, summed over all devices."""
        return self.workload.batch * self.workload.seq / one.seconds

    def utilisation(self, one: Priced) -> float:
        """Model FLOPs over the peak of the devices that are used (MFU), in bf16; causal attention counted once."""
        peak = self.cluster.device.peak("bfloat16")
        assert peak
        return self._flops / (one.seconds * one.layout.ranks * peak)

    @cached_property
    def _flops(self) -> float:
        return float(self.workload.batch * training_flops_per_sequence(self.model, self.workload.seq))

    def price(self, one: Priced) -> dict[str, Any] | None:
        """US dollars per hour and per million tokens, with the source; None where the device has no price."""
        return priced(self.device_price, one.layout.ranks, self.tokens_per_second(one))

    def device_seconds(self, one: Priced) -> float:
        """Device-seconds of one step: its cost, up to the price of a device."""
        return one.layout.ranks * one.seconds

    def to_json(self) -> dict[str, Any]:
        return self.asked_json() | {
            "ranked": [self._row(one) for one in self.ranked],
            "usable": self.capacity or None,
            "room": self.room.to_json(self.winner.held.total),
            "none_runs_here": self.none_runs or None,
            "fastest": None if self.fastest is None else self._row(self.fastest),
            "as_fast": [{"layout": str(one.place.layout), "seconds": one.seconds} for one in self.same],
            "unlimited": None if self.unlimited is None else self._row(self.unlimited),
            "alternatives": [_alternative_json(each) for each in self.alternatives],
            "price": self.price(self.winner),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def not_runnable(self, one: Priced) -> str | None:
        """Why this project's `train` rejects a layout; None where it runs it."""
        return why_not_trained(one.layout, self.model, self.workload)

    def _row(self, one: Priced) -> dict[str, Any]:
        return {
            "layout": str(one.layout),
            "devices": one.layout.ranks,
            "seconds": one.seconds,
            "low": float(one.range.low),
            "high": float(one.range.high),
            "tokens_per_second": self.tokens_per_second(one),
            "mfu": self.utilisation(one),
            "device_seconds": self.device_seconds(one),
            "bytes": one.held.to_json() | {"total": one.held.total},
            "memory": self.room.state(one.held.total),
            **({"node_bytes": one.node._asdict()} if any(one.node) else {}),
            "pipeline_rank": one.place,
            "parts": one.parts,
            "not_runnable": self.not_runnable(one),
            "resembles": resembling(count(self.model), one.layout),
        }


def plan_conclusion(plan: Plan) -> str:
    """The best layout in one sentence."""
    one = plan.winner
    risk = "at risk, " if plan.room.state(one.held.total) == "at risk" else ""
    memory = f"{risk}{format_bytes(one.held.total)} of {format_bytes(plan.usable)} per device"
    return (
        f"best of {plan.considered:,} layouts of {plan.model.name} on {plan.cluster}: {one.layout}, "
        f"{format_time(one.seconds)} per step ({format_share(plan.utilisation(one))} MFU), {memory}, "
        f"bound by {time_parts.longest(one.parts)}{_same(plan)}"
    )


def _same(plan: Plan) -> str:
    """The published run that the layout is like; how many layouts are as fast, and which is the fastest."""
    like = resembling(count(plan.model), plan.winner.layout)
    run = f"; split as {like['publisher']}'s {like['model']} on {like['cluster']}" if like else ""
    if plan.fastest is None:
        return run
    faster = format_share(plan.winner.seconds / plan.fastest.seconds - 1)
    return (
        f"{run}; up to {len(plan.same):,} layouts are as fast within the error of {100 * SAME:.0f}%, and this is the "
        f"most common one; the fastest, {plan.fastest.layout}, is {faster} faster"
    )


def plan_tables(plan: Plan) -> Iterator[Renderable]:
    """All that is printed for a plan."""
    workload, winner = plan.workload, plan.winner
    if plan.none_runs:
        yield f"None of these run here yet: {plan.none_runs}; --engine NAME plans for other software"
    yield f"{plan_conclusion(plan)}\n"
    yield (
        f"{plan.model.name}: {size_words(plan.model)}, {workload.batch} sequences of "
        f"{workload.seq} tokens per step, engine {plan.engine}"
    )
    runs = "" if plan.none_runs else f" that {plan.engine} can run"
    # The count is by the lower bound of their bytes.
    yield (
        f"{plan.considered:,} layouts{runs}, up to {plan.fitting:,} fit in {format_bytes(plan.searched)} "
        f"per device; {_ORDERS[plan.by]}"
    )
    yield from link_lines(plan.cluster)
    yield f"{plan.capacity}\n" if plan.capacity else ""
    yield _ranked(plan)
    yield ""
    yield from _refused(plan)
    yield from plan.warnings
    yield f"the best, {winner.layout}:\n"
    ranks = Mesh.of(winner.layout, plan.model).stage(winner.place)
    name = "all" if winner.layout.pp == 1 else f"fullest: stage {winner.place}"
    role = Role(name, ranks, winner.held, ())
    report = StepReport(
        "predicted", {"name": plan.model.name}, str(winner.layout), workload.to_json(), str(plan.cluster), (role,)
    )  # fmt: skip
    yield memory_table(report, plan.room)
    yield from node_line(winner.node, plan.cluster)
    yield _time(plan)
    yield from _binding(plan)
    if plan.alternatives:
        yield "\nwhy not"
        yield from (f"  {why_not(one, plan)}" for one in plan.alternatives)
    if plan.notes:
        yield "\nwhat is assumed"
        yield from (f"  {note}" for note in plan.notes)
    yield "\n" + price_line(plan.price(winner), plan.cluster.device.name)


_ORDERS = {
    "throughput": "of layouts within the error of the fastest the most common first, then the fastest",
    "fastest": "fastest first",
    "memory": "fewest bytes first",
    "cost": "fewest device-seconds first",
    "pareto": "layouts that no other one beats in both time and memory",
}


def _ranked(plan: Plan) -> FittedTable:
    columns = [
        Column(""), Column("layout", left=True, wraps=True), Column("step", "seconds"),
        Column("80% range", drop=1), Column("tokens/s", "count", drop=2), Column("MFU", "share", drop=3),
        Column("memory", "bytes"),
    ]  # fmt: skip
    table = FittedTable([*columns, Column("device-s", "count")] if plan.by == "cost" else columns)
    for place, one in enumerate(plan.ranked, 1):
        span = f"{format_time(float(one.range.low))} to {format_time(float(one.range.high))}"
        numbers = plan.tokens_per_second(one), plan.utilisation(one), one.held.total
        cost = [plan.device_seconds(one)] if plan.by == "cost" else []
        table.add_row(place, str(one.layout), one.seconds, span, *numbers, *cost)
    return table


def _refused(plan: Plan) -> Iterator[str]:
    """The layouts of another engine that the runtime here does not run."""
    if plan.none_runs or plan.engine in OWN:
        return
    reasons = Counter(filter(None, map(plan.not_runnable, plan.ranked)))
    if not reasons:
        yield "`train` here runs every layout shown, but not with that software's kernels and overlaps"
    best = ", the best included" if plan.not_runnable(plan.winner) else ""
    for reason, layouts in reasons.items():
        yield f"{layouts} of the {len(plan.ranked)} shown{best}: {reason}"


def _time(plan: Plan) -> FittedTable:
    from rich.text import Text

    one = plan.winner
    spread = f"80% range {format_time(float(one.range.low))} to {format_time(float(one.range.high))}"
    columns = (
        Column("part", left=True, wraps=True),
        Column("time", "seconds"),
        Column("share", "share"),
        Column("", left=True),
    )
    table = FittedTable(columns, title=f"\ntime of one step ({format_time(one.seconds)}, {spread})")
    longest = max(one.parts.values())
    for name, words in time_parts.STEP.items():
        seconds = one.parts.get(name, 0.0)
        if seconds >= LEAST * one.seconds:
            bar = "█" * max(1, round(_BAR * seconds / longest))
            table.add_row(words, seconds, seconds / one.seconds, Text(bar, "blue"))
    return table


def _binding(plan: Plan) -> Iterator[str]:
    one = plan.winner
    computed = time_parts.grouped(one.parts)["compute"]
    share = format_share(max(one.parts.values()) / one.seconds)
    yield (
        f"\nbound by: {time_parts.longest(one.parts)} ({share} of the step). "
        f"Computing is {format_share(computed / one.seconds)}; the rest is waiting and moving data."
    )
    if plan.unlimited is not None:
        gain = one.seconds / plan.unlimited.seconds - 1
        yield (
            f"Memory is a limit, too: with {format_bytes(plan.unlimited.held.total)} per device, "
            f"{plan.unlimited.layout} would be {format_share(gain)} faster."
        )
    elif plan.alternatives:
        yield "Memory is no limit: no layout is faster, fit or not."


def why_not(one: Alternative, plan: Plan) -> str:
    """One alternative in one line."""
    name = one.key if one.value is True else f"{one.key}={str(one.value).lower()}"
    if one.best is None and one.least <= plan.searched:
        return f"{name}: does not fit the host's memory"
    if one.best is None:
        return f"{name}: does not fit; every such layout needs at least {format_bytes(one.least)} per device"
    crosses = " crosses nodes" if one.crosses else ""
    slower = f"{format_share(one.slower / plan.winner.seconds, signed=True)} (+{format_time(one.slower)} per step)"
    if one.slower <= 0:
        return f"{name}{crosses}: as fast, {one.best.layout}, {format_bytes(one.best.held.total)} per device"
    grew = f"{time_parts.STEP[one.part]} +{format_time(one.grew)}"
    return f"{name}{crosses}: {slower}, {grew}; best such layout {one.best.layout}"


def plan(
    model: Model | str,
    cluster: Cluster | str,
    workload: Workload | None = None,
    *,
    engine: str | None = None,
    by: By = "throughput",
    top: int = 10,
    fixed: Mapping[str, Any] | None = None,
    reserved: float | None = None,
    explain: bool = True,
    seq: int | None = None,
    batch: int | None = None,
    price: float | None = None,
    refuses: Callable[[bool, Layout], str] | None = None,
    settings: EngineSettings = USUAL,
) -> Plan:
    """The best `top` layouts for training `model` on `cluster`, exactly: every layout that the engine can run is
    compared with a device's memory, and priced if it fits.

    model, cluster: objects, or their names: "llama-3-8b", "8xH100". workload: a `Workload`; in its place `seq` tokens
    per sequence and `batch` sequences per step. engine: a profile of `predict.time.ENGINES`; None is this project's
    runtime. Where the runtime can run none, as with experts, layouts are ranked as if it could, and `none_runs` says
    so. by: "throughput", of layouts that are as fast as the fastest within the error (`SAME`) the most common first;
    "fastest", whatever they are; "memory"; "cost" (device-seconds per step, on as many nodes as pay off: 1, 2, 4, ...
    and all); or "pareto" (all that no other one beats in time and memory). fixed: keys of the layout and the value that
    they must have. reserved: bytes of a device that training cannot have; None is the usual, with a margin (`room_of`)
    that the best layouts keep, unless none does. explain: with alternatives and what memory costs, or, where nothing
    fits, with what would have to change. price: US dollars per device-hour; None is the lowest list price. refuses: why
    a layout is not to be ranked, "" where it is, if memory keeps its margin (True) or need not. settings: of the
    engine, beside its layouts.
    Raises `UserError` in one line where there is no legal layout or none fits, with what would have to change; for
    unknown names; and for what cannot be planned: devices without constants, decoders of other kinds, engines that do
    not train.
    """
    model, cluster, workload = as_model(model), as_cluster(cluster), as_workload(workload, seq, batch)
    if top < 1:
        raise UserError(f"--top must be a positive integer, not {top}")
    space, none_runs = space_for(model, cluster, workload, engine, fixed or {}, settings)
    room = room_of(cluster, space.engine.name, bool(model.experts), reserved)
    constants(cluster.device)  # raises where the search would, for a device without any
    if explain and (rejected := shortfall.why_no_state_fits(space, room.usable, reserved)):
        raise rejected
    usable = room.safe
    result = winners(space, by, top, usable, explain, refuses and partial(refuses, True))
    if not result.best and room.margin:
        usable = room.usable
        result = winners(space, by, top, usable, explain, refuses and partial(refuses, False))
    if not result.best and refuses and (others := winners(space, by, 1, usable, explain).best):
        best = others[0].layout
        raise UserError(f"no layout that fits will do; the best, {best}: {refuses(False, best)}")
    if not result.best:
        raise _nothing(space, usable, reserved) if explain else _nothing_at_all(space, usable)
    explained_too = explain and by in ("throughput", "fastest", "cost")
    fastest = result.fastest if by == "throughput" and result.fastest != result.best[0] else None
    return Plan(
        model, cluster, workload, space.engine.name, by, room.usable, result.best, result.considered, result.fitting,
        tuple(result.alternatives(usable)) if explained_too else (), result.unlimited() if explained_too else None,
        none_runs, explained(cluster, reserved), price_of(cluster.device, price), fastest, result.same, room, settings,
    )  # fmt: skip


def _nothing(space: Space, usable: float, reserved: float | None) -> UserError:
    leanest = shortfall.least(space)
    if leanest is None:
        return shortfall.why_not_on_the_host(space) if space.size else shortfall.why_no_layout(space)
    return shortfall.why_nothing_fits(space, usable, leanest, reserved)


def _nothing_at_all(space: Space, usable: float) -> UserError:
    """`_nothing` without a search for what would have to change."""
    if not space.frames:
        return shortfall.why_no_layout(space)
    return UserError(
        f"does not fit {space.cluster}: none of {space.size:,} layouts needs at most {format_bytes(usable)} per device"
    )


def _alternative_json(one: Alternative) -> dict[str, Any]:
    return {
        "key": one.key,
        "value": one.value,
        "layout": None if one.best is None else str(one.best.layout),
        "least_bytes": float(one.least),
        "slower_seconds": one.slower if one.best else None,
        "part": one.part or None,
        "grew_seconds": one.grew if one.best else None,
        "crosses_nodes": one.crosses,
    }
