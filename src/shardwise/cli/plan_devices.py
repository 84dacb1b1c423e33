"""`plan MODEL` without a cluster: which GPUs it needs, kind by kind; and `--find model --memory`: which models fit."""

from collections.abc import Iterator
from typing import Any

from shardwise.cli.declare import leave_out
from shardwise.cli.models import model_of, traced_of
from shardwise.cli.output import print_result
from shardwise.cli.plan_emit import profile_of
from shardwise.cli.workloads import workload_of
from shardwise.cluster.catalog import price_date
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.layout.legality import beyond_positions
from shardwise.layout.model_size import size_words
from shardwise.layout.usual_workload import usual_serving
from shardwise.model import ModelConfig
from shardwise.planner.device_needs import (
    KINDS,
    LENGTH,
    DeviceNeed,
    ModelFit,
    models_that_fit,
    serving_needs,
    training_needs,
)
from shardwise.planner.price_words import money
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_time


def run(args: Any) -> int:
    """The smallest number of each device of the catalog. Raises `UserError`."""
    message = "needs --cluster, such as 8xH100; without one, plan MODEL says which GPUs the model needs"
    others = "fix reserve tokens pue host_watts mtbf save restart deadline host_memory network emit out find by "
    others += "rate ttft tpot why links all"
    leave_out(args, others, message)
    if not args.serve and (traced := traced_of(args)):
        raise UserError(f"{traced.name} is a traced module: give --cluster, such as 8xH100")
    model = model_of(args)
    if args.serve:
        workload, notes = usual_serving(model, args.prompt, args.output, args.concurrency)
        needs = serving_needs(model, workload, profile_of(args), args.price)
    else:
        workload, notes = workload_of(args, model)
        needs = training_needs(model, workload, profile_of(args), args.price)
    data = {
        "model": model.name, "workload": workload.to_json(), "assumed": list(notes),
        "notes": list(beyond_positions(model, workload.seq)), "prices_of": price_date(),
        "devices": [need.to_json() for need in needs],
    }  # fmt: skip
    return print_result(args, data, _needs_lines(model, workload, notes, needs, args.price))


def _needs_lines(
    model: ModelConfig, workload: Workload, notes: tuple[str, ...], needs: list[DeviceNeed], price: float | None
) -> Iterator[Renderable]:
    if workload.batch:
        asked = f"training with {workload.batch_words} per step"
        choice = "without pipelines, one shard group"
    else:
        asked = f"serving {workload.concurrency:,} clients, prompts of {workload.prompt:,} tokens, answers of "
        asked += f"{workload.output:,}"
        choice = "tp and pp, weights in the type that serves fastest on so few"
    yield f"{model.name}: {size_words(model)}, {asked}"
    yield from (f"assumed: {note}" for note in notes)
    yield from beyond_positions(model, workload.seq)
    yield f"the smallest 1, 2, 4, 8, ... GPUs of each kind that fit, cheapest tokens first ({choice})\n"
    yield _needs_table(needs)
    yield "\nlinks: each kind's usual ones, `shardwise list links`; --cluster with --network names others"
    yield (
        "\nprices: --price" if price is not None else f"\nprices: the lowest list price of {price_date()} that is "
        "recorded, per device-hour on demand; they vary by provider and month, up to threefold: --price X takes yours"
    )  # fmt: skip
    more = "" if workload.batch else f" --serve --prompt {workload.prompt} --output {workload.output}"
    more += "" if workload.batch else f" --concurrency {workload.concurrency}"
    yield f"all layouts of one cluster, ranked: shardwise plan {model.name} --cluster {needs[0].cluster}{more}"


def _needs_table(needs: list[DeviceNeed]) -> FittedTable:
    serving = any(need.weights for need in needs)
    columns = [
        Column("smallest cluster", left=True), Column("layout", left=True, wraps=True),
        *([Column("weights", left=True, drop=4)] if serving else []), Column("memory", drop=3),
        Column("per token" if serving else "step", drop=2), Column("tokens/s"), Column("USD/h"), Column("USD/M tokens"),
    ]  # fmt: skip
    table = FittedTable(columns)
    for need in needs:
        table.add_row(
            str(need.cluster), str(need.layout), *([need.weights] if serving else []), format_bytes(need.nbytes),
            format_time(need.seconds), format_count(need.tokens_per_second), money(need.usd_per_hour),
            money(need.usd_per_million_tokens),
        )  # fmt: skip
    return table


def find_models(args: Any) -> int:
    """The models of the catalog that fit one device of --memory. Raises `UserError`."""
    if args.memory is not None and (args.model is not None or args.find != "model"):
        raise UserError("--memory is for --find model without MODEL: the models of the catalog that fit one device")
    if args.find != "model":
        raise UserError("plan needs MODEL, a name of `shardwise list models`; only --find model --memory has none")
    if args.cluster is not None or args.memory is None:
        raise UserError("plan --find model needs MODEL and --cluster (the largest of its family), or --memory SIZE")
    memory = args.memory
    fits = models_that_fit(memory)
    data: dict[str, Any] = {"memory_bytes": memory, "tokens": LENGTH, "models": [one.to_json() for one in fits]}
    return print_result(args, data, _fit_lines(memory, fits))


def _fit_lines(memory: int, fits: list[ModelFit]) -> Iterator[Renderable]:
    yield f"models of the catalog that fit one device of {format_bytes(memory)}, 2 GB of it reserved; bytes needed\n"
    columns = [Column("model", left=True), Column("parameters", drop=1), *(Column(words) for words in KINDS.values())]
    table = FittedTable(columns)
    for one in fits:
        cells = (format_bytes(held) if (held := one.held.get(kind)) else "-" for kind in KINDS)
        table.add_row(one.name, format_count(one.parameters), *cells)
    yield table
    yield (
        f"\ngenerate: weights in that type, and the cache of one sequence of {LENGTH:,} tokens; training: "
        f"one sequence of {LENGTH:,} tokens, full recompute (fewer tokens where the model has fewer positions)"
    )
