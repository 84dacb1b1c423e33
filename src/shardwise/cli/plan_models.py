"""`plan a,b,c`: several models side by side, one row for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.cli.clusters import cluster_of
from shardwise.cli.declare import changed, leave_out
from shardwise.cli.models import model_of, subject_of
from shardwise.cli.output import print_result, progress
from shardwise.cli.plan_emit import profile_of
from shardwise.cli.workloads import workload_of
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import price_of
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout.usual_workload import odd_part
from shardwise.model.parameters import count
from shardwise.planner.price_words import money, priced
from shardwise.predict.cluster_links import link_lines, with_links
from shardwise.predict.fixing import fixed_of
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time


def several(text: str) -> list[str]:
    """The models of a list a,b,c; empty for one model, and for a file whose name has a comma."""
    if "," not in text or Path(text).exists():
        return []
    return [name.strip() for name in text.split(",") if name.strip()]


def run(args: Any, names: list[str]) -> int:
    """Plan each of the models, and print a row for each. Raises `UserError` where none can be planned."""
    if args.cluster is None:
        raise UserError("several models side by side need --cluster, such as 8xH100")
    alone = "tokens pue host_watts mtbf save restart find deadline emit out"
    leave_out(args, alone, "is for one model: give a single MODEL")
    cluster = cluster_of(args)
    rows = []
    for name in names:
        progress(name)
        rows.append(_row(changed(args, model=name), cluster))
    progress()
    if all(row["layout"] is None for row in rows):
        raise UserError(f"none of the {len(rows)} models can be planned; the first: {rows[0]['reason']}")
    data = with_links({"cluster": str(cluster)}, cluster) | {"models": rows}
    return print_result(args, data, _lines(args, cluster, rows))


def _row(args: Any, cluster: Cluster) -> dict[str, Any]:
    """The best of one model. A model that cannot be planned has the reason alone."""
    row: dict[str, Any] = {"model": args.model, "parameters": None, "layout": None, "reason": None}
    try:
        return row | (_served if args.serve else _trained)(args, cluster)
    except UserError as error:
        return row | {"reason": str(error)}


def _trained(args: Any, cluster: Cluster) -> dict[str, Any]:
    from shardwise.planner import plan

    model = subject_of(args)
    workload, assumed = workload_of(args, model, odd_part(cluster.devices))
    best = plan(
        model, cluster, workload, engine=profile_of(args), by=args.by, top=1, fix=fixed_of(args.fix or ""),
        reserve=args.reserve, explain=False,
    )  # fmt: skip
    one = best.winner
    return {
        "model": model.name,
        "parameters": count(model),
        "layout": str(one.layout),
        **keyed(workload, "seq batch"),
        "assumed": list(assumed),
        "seconds": one.seconds,
        "tokens_per_second": best.tokens_per_second(one),
        "mfu": best.utilisation(one),
        "bytes": one.held.total,
        "price": best.price(one),
    }


def _served(args: Any, cluster: Cluster) -> dict[str, Any]:
    from shardwise.planner.serving import plan_serving, type_name

    model = model_of(args)
    numbers = {name: getattr(args, name) for name in ("prompt", "output", "concurrency", "rate", "ttft", "tpot")}
    result = plan_serving(model, cluster, engine=profile_of(args), by=args.by, top=1, **numbers)
    one = result.winner
    return {
        "model": model.name,
        "parameters": count(model),
        "layout": str(one.layout),
        "weights": type_name(one.weights, model),
        "assumed": list(result.assumed),
        **keyed(one, "first_token_seconds=first_token token_seconds=token tokens_per_second bytes=held"),
        "price": priced(price_of(cluster.device, args.price), one.devices, one.tokens_per_second),
    }


def _lines(args: Any, cluster: Cluster, rows: list[dict[str, Any]]) -> Iterator[Renderable]:
    yield f"the best of each model on {cluster}, {'serving' if args.serve else 'training'}"
    assumed = dict.fromkeys(note for row in rows if args.serve and row["layout"] for note in row["assumed"])
    yield from (f"assumed: {note}" for note in assumed)
    yield from link_lines(cluster)
    yield ""
    middle = (
        [Column("weights", left=True, drop=2), Column("first token", drop=3), Column("per token")]
        if args.serve
        else [Column("batch x seq", drop=3), Column("step"), Column("MFU", drop=2)]
    )
    columns = [
        Column("model", left=True), Column("parameters", drop=4), Column("layout", left=True, wraps=True), *middle,
        Column("tokens/s"), Column("memory", drop=1), Column("USD/M tokens", drop=5),
    ]  # fmt: skip
    table = FittedTable(columns)
    for row in (row for row in rows if row["layout"]):
        cells = (
            [row["weights"], format_time(row["first_token_seconds"]), format_time(row["token_seconds"])]
            if args.serve
            else [f"{row['batch']:,} x {row['seq']:,}", format_time(row["seconds"]), format_share(row["mfu"])]
        )
        usd = money(row["price"] and row["price"]["usd_per_million_tokens"])
        table.add_row(
            row["model"], format_count(row["parameters"]), row["layout"], *cells,
            format_count(row["tokens_per_second"]), format_bytes(row["bytes"]), usd,
        )  # fmt: skip
    yield table
    failed = [row for row in rows if not row["layout"]]
    yield from (f"\n{row['model']}: {row['reason']}" for row in failed)
    if any(row.get("assumed") for row in rows):
        yield "\nbatch and length of sequences that were not given are the usual ones for each model (--seq, --batch)"
