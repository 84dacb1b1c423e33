"""Plan: the ranked layouts of a model on a cluster, why the first is best, and predictions against published runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.planner import plan as search
from shardwise.planner.alternatives import Alternative
from shardwise.planner.plan import Plan
from shardwise.predict.fixing import fixed_of
from shardwise.report import time_parts
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.studio.columns import How, Table, View, command_line
from shardwise.studio.data.memory import CLUSTERS
from shardwise.studio.data.models import SEQ, most_seq, offered, seqs, too_long
from shardwise.studio.data.opens import opens
from shardwise.studio.data.sizes import sized, sizes
from shardwise.studio.query import Query

BY = ("throughput", "memory", "cost", "pareto")
TOP = 12
"""Layouts that are shown."""


def data(given: Mapping[str, str]) -> View:
    """The best layouts, what the first spends its time on, and what other choices would cost."""
    query = Query(given)
    model, changes = sized(query, "llama-3-70b")
    cluster = query.text("cluster", "8x8xH100")
    seq = query.whole("seq", min(SEQ, most_seq(model)), 1, 1 << 24)
    batch = query.whole("batch", 128, 1, 1 << 20)
    names, left_out = offered(lambda one: too_long(one, seq if query.has("seq") else 1))
    by, fix = query.word("by", "throughput", BY), query.text("fix", "")
    query.done()
    found = _found(model, cluster, seq, batch, by, fix)
    winner = found.winner
    words = [query.state["model"], *changes, "--cluster", cluster, "--seq", seq, "--batch", batch, "--top", TOP]
    words += ["--by", by] * (by != "throughput") + ["--fix", fix] * bool(fix)
    command = command_line("plan", *words)
    return View(
        query.state,
        {"model": names, "cluster": CLUSTERS, "by": BY, "seq": sorted({seq, *seqs(model)})} | sizes(model),
        {"ranked": _ranked(found), "parts": _parts(found), "alternatives": _alternatives(found)},
        {
            "ranked": _how_ranked(found, command),
            "parts": _how_parts(found, command),
            "alternatives": How(
                [
                    "For every key of the layout, the fastest layout that fits with another value of it, less the "
                    f"winner's {format_time(winner.seconds)}."
                ],
                command,
            ),
        },
        {
            "best": str(winner.layout),
            "seconds": winner.seconds,
            "range": [float(winner.range.low), float(winner.range.high)],
            "tokens": found.tokens_per_second(winner),
            "mfu": found.utilisation(winner),
            "nbytes": round(winner.held.total),
            "usable": found.usable,
            "considered": found.considered,
            "fitting": found.fitting,
            "parameters": count(found.model),
            "fixes": [_fix(one) for one in found.alternatives],
            "memory_binds": _memory_binds(found),
            "left_out": left_out,
            "opens": opens(query.state, winner.layout, "plan", found.workload.micro_batches(winner.layout)),
            "not_runnable": found.not_runnable(winner),
            "beyond": _beyond(found),
        },
    )


@lru_cache(maxsize=32)
def _found(model: ModelConfig, cluster: str, seq: int, batch: int, by: str, fix: str) -> Plan:
    workload = Workload(seq=seq, batch=batch)
    return search(model, Cluster.parse(cluster), workload, by=by, fixed=fixed_of(fix), top=TOP)  # type: ignore[arg-type]


def _ranked(found: Plan) -> Table:
    ranked = found.ranked
    columns: dict[str, list[Any]] = {
        "place": list(range(1, len(ranked) + 1)),
        "layout": [str(one.layout) for one in ranked],
        "step": [one.seconds for one in ranked],
        "80% from": [float(one.range.low) for one in ranked],
        "to": [float(one.range.high) for one in ranked],
        "tokens/s": [found.tokens_per_second(one) for one in ranked],
        "MFU": [found.utilisation(one) for one in ranked],
        "memory": [round(one.held.total) for one in ranked],
        "devices": [one.layout.ranks for one in ranked],
    }
    units = {"step": "seconds", "80% from": "seconds", "to": "seconds"}
    units |= {"tokens/s": "count", "MFU": "share", "memory": "bytes"}
    return Table("The best layouts", columns, units)


def _parts(found: Plan) -> Table:
    names = [name for name in time_parts.STEP if any(one.parts.get(name, 0.0) > 0 for one in found.ranked)]
    columns: dict[str, list[Any]] = {"layout": [str(one.layout) for one in found.ranked]}
    columns |= {time_parts.STEP[name]: [float(one.parts.get(name, 0.0)) for one in found.ranked] for name in names}
    return Table("Where a step's time goes", columns, {time_parts.STEP[name]: "seconds" for name in names})


def _alternatives(found: Plan) -> Table:
    ones, winner = found.alternatives, found.winner
    columns: dict[str, list[Any]] = {
        "instead": [_fix(one) for one in ones],
        "best such layout": [str(one.best.layout) if one.best else "does not fit" for one in ones],
        "step": [one.best.seconds if one.best else None for one in ones],
        "costs": [one.slower if one.best else None for one in ones],
        "slower by": [one.slower / winner.seconds if one.best else None for one in ones],
        "memory": [round(one.best.held.total) if one.best else round(one.least) for one in ones],
        "because": [_because(one) for one in ones],
    }
    units = {"step": "seconds", "costs": "seconds", "slower by": "share", "memory": "bytes"}
    return Table("One thing changed, all else chosen anew", columns, units)


def _fix(one: Alternative) -> str:
    return f"{one.key}={str(one.value).lower() if isinstance(one.value, bool) else one.value}"


def _because(one: Alternative) -> str:
    if one.best is None:
        return f"the leanest needs {format_bytes(one.least)} a device"
    crosses = "its groups leave a node; " if one.crosses else ""
    return f"{crosses}{time_parts.STEP[one.part]} +{format_time(one.grew)}" if one.slower > 0 else "as fast"


def _memory_binds(found: Plan) -> str:
    if found.unlimited is None:
        return "Memory does not bind: no layout is faster, fit or not." if found.alternatives else ""
    gain = found.winner.seconds / found.unlimited.seconds - 1
    return (
        f"Memory binds: with {format_bytes(found.unlimited.held.total)} a device, {found.unlimited.layout} would be "
        f"{format_share(gain)} faster."
    )


def _beyond(found: Plan) -> str:
    """What the runtime here cannot run yet, and what that costs; empty where it costs nothing."""
    if found.none_runs:
        return f"None of these run here yet: {found.none_runs}."
    if not (one := found.beyond):
        return ""
    return f"Best if {found.beyond_needs} ran here: {one.layout}, {format_time(one.seconds)}."


def _how_ranked(found: Plan, command: str) -> How:
    capacity = f" ({found.capacity})" if found.capacity else ""
    runs = "" if found.none_runs else f" that {found.engine} can run"
    return How(
        [
            f"{found.considered:,} layouts{runs}; {found.fitting:,} fit into "
            f"{format_bytes(found.usable)} per device{capacity}; each of these is priced, none is sampled.",
            f"tokens/s = {found.workload.batch} sequences x {found.workload.seq} tokens / "
            f"{format_time(found.winner.seconds)} = {format_count(found.tokens_per_second(found.winner))}",
            f"MFU = model FLOPs of the step (causal attention once) / ({found.winner.layout.ranks} devices x peak in "
            f"bf16 x step) = {format_share(found.utilisation(found.winner))}",
            f"Constants of the engine profile {found.engine}; the range holds 80% of published runs.",
        ],
        command,
        "docs/planner.md, docs/prediction.md",
    )


def _how_parts(found: Plan, command: str) -> How:
    one = found.winner
    sums = " + ".join(
        f"{time_parts.STEP[name]} {format_time(float(one.parts[name]))}"
        for name in time_parts.STEP
        if one.parts.get(name, 0) > 0
    )
    return How([f"{one.layout}: {sums} = {format_time(one.seconds)}"], command, "docs/prediction.md")


def scoreboard(given: Mapping[str, str]) -> View:
    """Every published run of the project's table: predicted against measured. The state does not change it."""
    table, summary = _scored()
    how = How(
        [
            "Each dot is one published run: its configuration is predicted without a look at the result.",
            "Seconds of a step; for serving, seconds a token. Inside the band the prediction is off by 25% or less.",
        ],
        command_line("validate", "--rows"),
        "src/shardwise/validation/scoreboard/published.json: every row with its citation",
    )
    return View({}, {}, {"scoreboard": table, "sources": summary}, {"scoreboard": how, "sources": how})


@lru_cache(maxsize=1)
def _scored() -> tuple[Table, Table]:
    from shardwise.validation.scoreboard import PUBLISHED, cases, predict, read, scores

    asked, skipped = cases(read(PUBLISHED))
    predictions, refused = predict(asked)
    rows = Table(
        "Published runs",
        {
            "source": [one.case.source for one in predictions],
            "run": [one.case.describe() for one in predictions],
            "measured": [one.measured for one in predictions],
            "predicted": [one.seconds for one in predictions],
            "error": [one.error for one in predictions],
            "in the 80% range": [one.inside for one in predictions],
        },
        {"measured": "seconds", "predicted": "seconds", "error": "share"},
    )
    found = scores(predictions, [*skipped, *refused])
    shares = {"median error": "median_abs_error", "90th percentile": "p90_abs_error", "bias": "bias"}
    columns: dict[str, list[Any]] = {"source": [score.source for score in found], "runs": [s.rows for s in found]}
    columns |= {heading: [getattr(score, field) for score in found] for heading, field in shares.items()}
    columns["in the 80% range"] = [score.coverage for score in found]
    units = dict.fromkeys([*shares, "in the 80% range"], "share")
    return rows, Table("By source", columns, units)
