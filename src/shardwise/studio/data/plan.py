"""Plan: the ranked layouts of a model on a cluster, why the first is best, and predictions against published runs."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardwise.cluster import Cluster
from shardwise.codec import keyed
from shardwise.layout import Workload
from shardwise.layout.keys import difference
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.planner import plan as search
from shardwise.planner.common import SAME, Alternative
from shardwise.planner.plan import Plan
from shardwise.predict.fixing import fixed_of
from shardwise.report import time_parts
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.studio.columns import Columns, How, Table, View, command_line
from shardwise.studio.data.growth import grown, how_grown, meets, table_of
from shardwise.studio.data.memory import CLUSTERS
from shardwise.studio.data.opens import opens
from shardwise.studio.data.sizes import SEQ, most_seq, offered, seqs, sized, sizes, too_long
from shardwise.studio.query import Query

BY = ("throughput", "fastest", "memory", "cost", "pareto")
TOP = 12
"""Layouts that are shown."""


def data(params: Mapping[str, str]) -> View:
    """The best layouts, what the first spends its time on, and what other choices would cost."""
    query = Query(params)
    model, changes = sized(query, "llama-3-70b")
    cluster = query.text("cluster", "8x8xH100")
    seq = query.whole("seq", min(SEQ, most_seq(model)), 1, 1 << 24)
    batch = query.whole("batch", 128, 1, 1 << 20)
    names, left_out = offered(lambda one: too_long(one, seq if query.has("seq") else 1))
    by, fix = query.word("by", "throughput", BY), query.text("fix", "")
    query.done()
    result = _found(model, cluster, seq, batch, by, fix)
    winner, growth = result.winner, grown(result)
    words = [query.state["model"], *changes, "--cluster", cluster, "--seq", seq, "--batch", batch]
    step = command_line("estimate", *words, "--layout", winner.layout, "--engine", result.engine)
    chosen = [*["--by", by] * (by != "throughput"), *["--fix", fix] * bool(fix)]
    command = command_line("plan", *words, "--top", TOP, *chosen)
    parts = [(str(one.layout), one.parts) for one in result.ranked]
    terms = time_parts.as_sum(winner.parts, time_parts.STEP, winner.seconds)
    return View(
        query.state,
        {"model": names, "cluster": CLUSTERS, "by": BY, "seq": sorted({seq, *seqs(model)})} | sizes(model),
        {
            "ranked": _ranked(result),
            "parts": Table.of_parts("Where a step's time goes", "layout", time_parts.STEP, parts),
            "alternatives": _alternatives(result),
            "growth": table_of(growth),
        },
        {
            "ranked": _how_ranked(result, command),
            "parts": How([f"{winner.layout}: {terms}"], command, "docs/prediction.md"),
            "growth": how_grown(growth, step),
            "alternatives": How(
                [
                    "For every key of the layout, the fastest layout that fits with another value of it, less the "
                    f"winner's {format_time(winner.seconds)}."
                ],
                command,
            ),
        },
        {
            **keyed(winner, "best=layout seconds nbytes=held.total"),
            **keyed(result, "usable considered fitting"),
            "range": [float(winner.range.low), float(winner.range.high)],
            "tokens": result.tokens_per_second(winner),
            "mfu": result.utilisation(winner),
            "memory": result.room.state(winner.held.total),
            "as_fast": len(result.same),
            "error": SAME,
            "fastest": str(result.fastest.layout) if result.fastest else "",
            "meets": meets(growth),
            "parameters": count(result.model),
            "fixes": [_fix(one) for one in result.alternatives],
            "memory_binds": _memory_binds(result),
            "left_out": left_out,
            "opens": opens(query.state, winner.layout, "plan", result.workload.micro_batches(winner.layout)),
            "not_runnable": result.not_runnable(winner),
            "none_runs": f"None of these run here yet: {result.none_runs}." if result.none_runs else "",
        },
    )


@lru_cache(maxsize=32)
def _found(model: ModelConfig, cluster: str, seq: int, batch: int, by: str, fix: str) -> Plan:
    workload = Workload(seq=seq, batch=batch)
    return search(model, Cluster.parse(cluster), workload, by=by, fix=fixed_of(fix), top=TOP)  # type: ignore[arg-type]


def _ranked(best: Plan) -> Table:
    ranked = best.ranked
    least = min(one.seconds for one in (*ranked, best.fastest or best.winner))
    columns: dict[str, list[Any]] = {
        "place": list(range(1, len(ranked) + 1)),
        "layout": [str(one.layout) for one in ranked],
        "differs by": ["", *(difference(one.layout, best.winner.layout) for one in ranked[1:])],
        "as fast": ["yes" if one.seconds <= least * (1 + SAME) else "" for one in ranked],
        "step": [one.seconds for one in ranked],
        "80% from": [float(one.range.low) for one in ranked],
        "to": [float(one.range.high) for one in ranked],
        "tokens/s": [best.tokens_per_second(one) for one in ranked],
        "MFU": [best.utilisation(one) for one in ranked],
        "memory": [one.held.total for one in ranked],
        "devices": [one.layout.ranks for one in ranked],
    }
    units = {"step": "seconds", "80% from": "seconds", "to": "seconds"}
    units |= {"tokens/s": "count", "MFU": "share", "memory": "bytes"}
    return Table("The best layouts", columns, units)


def _alternatives(best: Plan) -> Table:
    columns: Columns = {
        "instead": ("", _fix),
        "best such layout": ("", lambda one: str(one.best.layout) if one.best else "does not fit"),
        "step": ("seconds", lambda one: one.best and one.best.seconds),
        "costs": ("seconds", lambda one: one.best and one.slower),
        "slower by": ("share", lambda one: one.best and one.slower / best.winner.seconds),
        "memory": ("bytes", lambda one: one.best.held.total if one.best else one.least),
        "because": ("", _because),
    }
    return Table.of("One thing changed, all else chosen anew", best.alternatives, columns)


def _fix(one: Alternative) -> str:
    return f"{one.key}={str(one.value).lower()}"


def _because(one: Alternative) -> str:
    if one.best is None:
        return f"each needs at least {format_bytes(one.least)} a device"
    crosses = "its groups leave a node; " if one.crosses else ""
    return f"{crosses}{time_parts.STEP[one.part]} +{format_time(one.grew)}" if one.slower > 0 else "as fast"


def _memory_binds(best: Plan) -> str:
    if best.unlimited is None:
        return "Memory does not bind: no layout is faster, fit or not." if best.alternatives else ""
    gain = best.winner.seconds / best.unlimited.seconds - 1
    return (
        f"Memory binds: with {format_bytes(best.unlimited.held.total)} a device, {best.unlimited.layout} would be "
        f"{format_share(gain)} faster."
    )


def _how_ranked(best: Plan, command: str) -> How:
    capacity = f" ({best.capacity})" if best.capacity else ""
    runs = "" if best.none_runs else f" that {best.engine} can run"
    return How(
        [
            f"{best.considered:,} layouts{runs}; up to {best.fitting:,} fit into "
            f"{format_bytes(best.usable)} per device{capacity}; each of these is priced, none is sampled.",
            f"tokens/s = {best.workload.batch} sequences x {best.workload.seq} tokens / "
            f"{format_time(best.winner.seconds)} = {format_count(best.tokens_per_second(best.winner))}",
            f"MFU = model FLOPs of the step (causal attention once) / ({best.winner.layout.ranks} devices x peak in "
            f"bf16 x step) = {format_share(best.utilisation(best.winner))}",
            f"Constants of the engine profile {best.engine}; the range holds 80% of published runs.",
        ],
        command,
        "docs/planner.md, docs/prediction.md",
    )


def scoreboard(params: Mapping[str, str]) -> View:
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

    runs_to_score, skipped = cases(read(PUBLISHED))
    predictions, refused = predict(runs_to_score)
    of_runs: Columns = {
        "source": ("", lambda one: one.case.source),
        "run": ("", lambda one: one.case.describe()),
        "measured": ("seconds", lambda one: one.measured),
        "predicted": ("seconds", lambda one: one.seconds),
        "error": ("share", lambda one: one.error),
        "in the 80% range": ("", lambda one: one.inside),
    }
    of_sources: Columns = {
        "source": ("", lambda score: score.source),
        "runs": ("", lambda score: score.rows),
        "median error": ("share", lambda score: score.median_abs_error),
        "90th percentile": ("share", lambda score: score.p90_abs_error),
        "bias": ("share", lambda score: score.bias),
        "in the 80% range": ("share", lambda score: score.coverage),
    }
    ranked = scores(predictions, [*skipped, *refused])
    return Table.of("Published runs", predictions, of_runs), Table.of("By source", ranked, of_sources)
