"""Output of `plan`: the ranked table, and for the best layout memory, time, what binds, and why not another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.layout import Mesh
from shardwise.layout.model_size import size_words
from shardwise.model.parameters import count
from shardwise.planner.alternatives import Alternative
from shardwise.planner.common import SAME, resembling
from shardwise.planner.price_words import money, price_line
from shardwise.planner.runnable import OWN
from shardwise.predict.cluster_links import link_lines
from shardwise.predict.tables import node_line
from shardwise.report import time_parts
from shardwise.report.step_report import Role, StepReport
from shardwise.report.table import Column, FittedTable
from shardwise.report.tables import memory_table
from shardwise.report.terminal import Renderable
from shardwise.report.timing_table import LEAST
from shardwise.report.units import format_bytes, format_count, format_share, format_time

if TYPE_CHECKING:
    from shardwise.planner.plan import Plan

_BAR = 24


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
        Column(""), Column("layout", left=True, wraps=True), Column("step"), Column("80% range", drop=3),
        Column("tokens/s", drop=1), Column("MFU", drop=2), Column("memory"),
    ]  # fmt: skip
    table = FittedTable([*columns, Column("device-s")] if plan.by == "cost" else columns)
    for place, one in enumerate(plan.ranked, 1):
        cells = [
            str(place),
            str(one.layout),
            format_time(one.seconds),
            f"{format_time(float(one.range.low))} to {format_time(float(one.range.high))}",
            format_count(plan.tokens_per_second(one)),
            format_share(plan.utilisation(one)),
            format_bytes(one.held.total),
        ]
        table.add_row(*cells, *([format_count(plan.device_seconds(one))] if plan.by == "cost" else []))
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
    columns = (Column("part", left=True), Column("time", "seconds"), Column("share", "share"), Column("", left=True))
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


def campaign_lines(campaign: dict[str, Any]) -> Iterator[str]:
    """A whole run's days and money, and what failures leave of the time."""
    if run := campaign.get("run"):
        yield "\n" + _run(run)
    if share := campaign.get("goodput"):
        yield (
            f"\nfailures: a checkpoint every {format_time(share['interval_seconds'])} (Young 1974, Daly 2006) leaves "
            f"{format_share(share['share'])} of the time for progress"
        )
        if run and share["share"]:
            energy = f" and {_energy(run['energy_kwh_at_most'] / share['share'])}" if run["energy_kwh_at_most"] else ""
            yield f"with failures the run takes {format_time(run['seconds'] / share['share'])}{energy}"


def _run(run: dict[str, Any]) -> str:
    cost = "" if run["cost"] is None else f", {money(run['cost'])} USD"
    took, kwh = format_time(run["seconds"]), run["energy_kwh_at_most"]
    host = f", {run['host_watts']:g} W of a host each" if run["host_watts"] else ""
    energy = f"no energy, since the power of {run['device']} is not known"
    if kwh:
        energy = f"{_energy(kwh)} (boards at full power{host}, PUE {run['pue']:g})"
    return f"a whole run: {run['steps']:,} steps, {took}, {run['device_hours']:,.0f} device-hours{cost}, {energy}"


def _energy(kwh: float) -> str:
    return f"at most {kwh / 1000:,.0f} MWh" if kwh >= 10_000 else f"at most {kwh:,.1f} kWh"


def answer_lines(find: str, answer: dict[str, Any]) -> Iterator[Renderable]:
    """Result of `--find`."""
    if find == "cluster":
        yield f"cheapest: {answer['cluster']} with {answer['layout']}"
        yield _run(answer)
        yield from _refusal(answer)
    elif find == "model":
        yield f"largest: {answer['model']} fits {answer['cluster']}"
    elif find == "batch":
        yield from _batch(answer)
    elif find == "sequence":
        yield f"longest: {answer['seq']:,} tokens fit {answer['cluster']}, with {answer['layout']}"
        yield f"{format_bytes(answer['bytes'])} on the fullest device"
        yield from _refusal(answer)
    else:
        yield _curve(answer["sizes"])
        yield (
            f"\nefficiency: tokens/s per device, of the {format_count(answer['ideal_tokens_per_second_per_device'])} "
            f"of the fastest layout on any of these clusters if memory were no limit ({answer['ideal_on']}): so never "
            "above 100%; compute, communication that is not hidden, and the pipeline's bubble are shares of the step"
        )
        refused = Counter(size["not_runnable"] for size in answer["sizes"] if size["not_runnable"])
        yield from (f"{layouts} of these: {reason}" for reason, layouts in refused.items())


def _refusal(answer: dict[str, Any], key: str = "not_runnable") -> Iterator[str]:
    if answer[key]:
        yield answer[key]


def _batch(answer: dict[str, Any]) -> Iterator[str]:
    tokens = format_count(answer["batch"] * answer["seq"])
    yield (
        f"largest batch without accumulating gradients: {answer['batch']:,} sequences ({tokens} tokens) fit "
        f"{answer['cluster']}, with {answer['layout']}"
    )
    yield f"{format_bytes(answer['bytes'])} on the fullest device"
    yield from _refusal(answer)
    of = f"of a step of {answer['of_batch']:,} sequences"
    if answer["micro"] is None:
        yield f"largest micro-batch {of}: none fits"
    else:
        yield f"largest micro-batch {of}: {answer['micro']:,}, with {answer['micro_layout']}"
        yield f"{format_bytes(answer['micro_bytes'])} on the fullest device"
        yield from _refusal(answer, "micro_not_runnable")


def _curve(sizes: list[dict[str, Any]]) -> FittedTable:
    columns = (
        Column("cluster", left=True), Column("layout", left=True, wraps=True), Column("step"),
        Column("tokens/s", drop=5), *(Column(name, drop=drop) for drop, name in enumerate(_SHOWN, 1)),
        Column("efficiency"),
    )  # fmt: skip
    table = FittedTable(columns, title="the same batch on more nodes")
    for size in sizes:
        if size["layout"] is None:
            table.add_row(size["cluster"], "nothing fits", *[""] * (len(columns) - 2))
            continue
        parts = (format_share(size[name] / size["seconds"]) for name in _SHOWN)
        table.add_row(
            size["cluster"], size["layout"], format_time(size["seconds"]), format_count(size["tokens_per_second"]),
            *parts, format_share(size["efficiency"]),
        )  # fmt: skip
    return table


_SHOWN = ("compute", "communication", "bubble")
"""Groups of a step's parts in the scaling table; what is left of the step is waiting for launches."""
