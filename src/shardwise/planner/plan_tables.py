"""Output of a training plan: the answer in a screen, and what is behind it (`why_tables`)."""

from collections import Counter
from collections.abc import Iterator, Sequence

from shardwise.layout import Mesh
from shardwise.layout.keys import divisors
from shardwise.layout.model_size import named_size, size_words
from shardwise.model.flops import MFU
from shardwise.model.parameters import count
from shardwise.planner.common import SAME, Alternative, resembling
from shardwise.planner.plan import EXPERTS, Plan
from shardwise.planner.price_words import price_line
from shardwise.planner.pricing import Priced
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

_BAR = 24
"""Characters of the longest bar."""


def plan_tables(plan: Plan) -> Iterator[Renderable]:
    """The answer: the best layout and its neighbors, what binds, and what was assumed."""
    if plan.none_runs:
        yield f"None of these run here yet: {plan.none_runs}; --engine NAME plans for other software"
    yield plan_conclusion(plan)
    like = resembling(count(plan.model), plan.winner.layout)
    words = [f"split as {like['publisher']}'s {like['model']}"] if like else []
    if plan.fastest is not None:
        words.append(f"most common of up to {len(plan.same):,} within the error of {100 * SAME:.0f}%")
    yield from ["; ".join(words)] if words else []
    yield ""
    yield _ranked(plan, plan.ranked[: plan.shown])
    yield from _refused(plan)
    yield from plan.warnings
    yield from (note for note in plan.notes if note not in (MFU, *EXPERTS))
    yield from _binding(plan)
    yield from _near_batch(plan)
    yield from (f"assumed: {note}" for note in plan.assumed)
    yield from link_lines(plan.cluster)
    yield price_line(plan.price(plan.winner), plan.cluster.device.name)


def why_tables(plan: Plan) -> Iterator[Renderable]:
    """Memory and time of the best layout by part, the alternatives, and assumptions."""
    workload, winner = plan.workload, plan.winner
    yield (f"\n{plan.model.name}: {size_words(plan.model)}, {workload.batch_words} per step, engine {plan.engine}")
    runs = "" if plan.none_runs else f" that {plan.engine} can run"
    # The count is by the lower bound of their bytes.
    yield (
        f"{plan.considered:,} layouts{runs}, up to {plan.fitting:,} fit in {format_bytes(plan.searched)} "
        f"per device; {_ORDERS[plan.by]}"
    )
    yield from filter(None, [plan.capacity])
    if like := resembling(count(plan.model), winner.layout):
        yield f"split as {like['publisher']}'s {like['model']} on {like['cluster']}"
    if plan.fastest is not None:
        faster = format_share(winner.seconds / plan.fastest.seconds - 1)
        yield f"the fastest, {plan.fastest.layout}, is {faster} faster than the first"
    yield f"\nthe best, {winner.layout}:\n"
    ranks = Mesh.of(winner.layout, plan.model).stage(winner.place)
    name = "all" if winner.layout.pp == 1 else f"fullest: stage {winner.place}"
    role = Role(name, ranks, winner.held, ())
    report = StepReport(
        "predicted", {"name": plan.model.name}, str(winner.layout), workload.to_json(), str(plan.cluster), (role,)
    )  # fmt: skip
    yield memory_table(report, plan.room)
    yield from node_line(winner.node, plan.cluster)
    yield _time(plan)
    yield from _unlimited(plan)
    if plan.alternatives:
        yield "\nwhy not"
        yield from (f"  {why_not(one, plan)}" for one in plan.alternatives)
    if plan.notes:
        yield "\nwhat is assumed"
        yield from (f"  {note}" for note in plan.notes)


def plan_conclusion(plan: Plan) -> str:
    """The best layout in one sentence."""
    one = plan.winner
    risk = "at risk, " if plan.room.state(one.held.total) == "at risk" else ""
    memory = f"{risk}{format_bytes(one.held.total)} of {format_bytes(plan.usable)} per device"
    return (
        f"best of {plan.considered:,} layouts of {named_size(plan.model)} on {plan.cluster}: {one.layout}, "
        f"{format_time(one.seconds)} per step, {format_count(plan.tokens_per_second(one))} tokens/s "
        f"({format_share(plan.utilisation(one))} MFU), {memory}"
    )


def _ranked(plan: Plan, rows: Sequence[Priced]) -> FittedTable:
    layout, step = Column("layout", left=True, wraps=True), Column("step, 80% range")
    columns = [Column(""), layout, step, Column("memory", "bytes")]
    table = FittedTable([*columns, Column("device-s", "count")] if plan.by == "cost" else columns)
    for place, one in enumerate(rows, 1):
        off = max(float(one.range.high) / one.seconds - 1, 1 - float(one.range.low) / one.seconds)
        cost = [plan.device_seconds(one)] if plan.by == "cost" else []
        table.add_row(place, str(one.layout), f"{format_time(one.seconds)} ±{100 * off:.0f}%", one.held.total, *cost)
    return table


_ORDERS = {
    "throughput": "of layouts within the error of the fastest the most common first, then the fastest",
    "fastest": "fastest first",
    "memory": "fewest bytes first",
    "cost": "fewest device-seconds first",
    "pareto": "layouts that no other one beats in both time and memory",
}


def _refused(plan: Plan) -> Iterator[str]:
    """The layouts of another engine that the runtime here does not run."""
    if plan.none_runs or plan.engine in OWN:
        return
    reasons = Counter(filter(None, map(plan.not_runnable, plan.ranked)))
    if not reasons and not plan.model.trace:
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
        f"\nbound by: {time_parts.longest(one.parts)}, {share} of the step (computing: "
        f"{format_share(computed / one.seconds)})"
    )


def _unlimited(plan: Plan) -> Iterator[str]:
    if plan.unlimited is not None:
        gain = plan.winner.seconds / plan.unlimited.seconds - 1
        yield (
            f"\nmemory is a limit, too: with {format_bytes(plan.unlimited.held.total)} per device, "
            f"{plan.unlimited.layout} would be {format_share(gain)} faster"
        )
    elif plan.alternatives:
        yield "\nmemory is no limit: no layout is faster, fit or not"


def _near_batch(plan: Plan) -> Iterator[str]:
    """A batch near the plan's that more replicas divide."""
    batch, devices = plan.workload.batch, plan.winner.layout.ranks
    most = max(dp for dp in divisors(devices) if batch % dp == 0)
    for dp in reversed([dp for dp in divisors(devices) if dp > most]):
        near = max(1, round(batch / dp)) * dp
        if abs(near - batch) <= NEAR * batch:
            yield f"batch {batch}: with {near}, dp={dp} becomes possible"
            return


NEAR = 1 / 16
"""Share of a batch by which another one is near."""


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
