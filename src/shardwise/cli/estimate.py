"""Predict memory, communication and time of one training step of a layout, in closed form.

--dry-run observes memory and communication instead: it runs the training step on fake tensors and a fake process
group.

--breakdown shows the terms behind the totals (parameters by mechanism, bytes per parameter under each ZeRO stage, saved
tensors, FLOPs, recompute modes).

--compare shows another layout beside this one, quantity by quantity.

--links shows calls and bytes of each axis, and their time inside a node and between nodes.

--measure runs one rank's real share of the layout on the device at hand, with waits of predicted length for its
collectives.

--zero-table N,... shows bytes per GPU of ZeRO stages 0 to 3 on N GPUs, for MODEL or for --params parameters.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardwise.cli import estimate_measure
from shardwise.cli.clusters import add_cluster, cluster_of, usual_cluster
from shardwise.cli.flags import add_flags
from shardwise.cli.models import add_lora, add_model, model_of, subject_of
from shardwise.cli.output import print_json, print_result, show, working
from shardwise.cli.workloads import workload_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.model_size import size_json, size_words
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model, count
from shardwise.predict.cluster_links import link_lines, links_line, with_links
from shardwise.report.units import format_count
from shardwise.runtime.job.slow_ranks import SlowRanks

if TYPE_CHECKING:
    from shardwise.report import StepReport
    from shardwise.report.terminal import Renderable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    parser.add_argument("--layout", metavar="TEXT", help="how the model is split, such as tp=8,dp=8,zero=1")
    add_cluster(parser)
    add_flags(parser, Workload, "seq", "batch", "isolate_documents", "optimizer")
    add_lora(parser)
    add_flags(parser, SlowRanks, "slow", "emulate")
    add_engine(parser)
    parser.add_argument("--dry-run", action="store_true", help="run the training step on fake tensors; needs torch")
    parser.add_argument("--verbose", action="store_true", help="list every collective of the step instead of sums")
    parser.add_argument("--breakdown", action="store_true", help="show the terms behind the totals")
    parser.add_argument("--compare", metavar="TEXT", help="another layout to compare with")
    parser.add_argument("--links", action="store_true", help="show communication by axis and link")
    parser.add_argument("--zero-table", metavar="N,...", help="show a table of ZeRO stages for these numbers of GPUs")
    parser.add_argument("--params", metavar="P", help="parameters for --zero-table: 7e9, 7B, 350M")
    estimate_measure.add_arguments(parser)


ENGINE_FLAGS = ("engine", "precision", "recompute_modules", "recompute_layers")
"""Flags of another engine's software."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Flags of `ENGINE_FLAGS`."""
    parser.add_argument("--engine", metavar="NAME", help="software whose memory and time are predicted (shardwise)")
    parser.add_argument("--precision", metavar="TYPE", help="that engine's products: fp8 or mxfp8")
    parser.add_argument("--recompute-modules", metavar="A+B", help="modules that it recomputes: layernorm+mlp")
    parser.add_argument("--recompute-layers", metavar="N", type=int, help="blocks of a chunk that it recomputes")


def engine_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `predict.estimate` for `ENGINE_FLAGS`, where they were given. Raises `UserError`."""
    if all(getattr(args, name) is None for name in ENGINE_FLAGS):
        return {}
    from shardwise.predict.memory.engine_rows import engine_memory
    from shardwise.predict.memory.engine_settings import EngineSettings
    from shardwise.predict.time.profiles import engine

    if args.engine is not None and engine_memory(args.engine) is None:
        engine(args.engine)
    modules = tuple((args.recompute_modules or "").replace("+", " ").split())
    settings = EngineSettings(args.precision or "", modules, args.recompute_layers or 0)
    return {"engine": args.engine, "settings": settings}


def run(args: argparse.Namespace) -> int:
    return _step(args) if args.zero_table is None and args.params is None else _zero_table(args)


def _step(args: argparse.Namespace) -> int:
    usual_cluster(args)
    model = subject_of(args) if args.model else None
    missing = [f"--{name}" for name in ("layout", "cluster") if getattr(args, name) is None]
    if model is None or missing:
        raise UserError(f"estimate needs {', '.join(missing if args.model else ['MODEL', *missing])}")

    from shardwise.predict import estimate

    layout, cluster = Layout.parse(args.layout), cluster_of(args)
    other = Layout.parse(args.compare) if args.compare is not None else layout
    parts = math.lcm(layout.dp * layout.micro, other.dp * other.micro)
    workload, assumed = workload_of(args, model, parts)
    slowed = _slowed(args)
    if args.measure:
        check_alone(args, "measure", *ENGINE_FLAGS)
        return _measure(args, model, layout, workload, cluster, assumed)
    estimate_measure.check_unused(args)
    if args.compare is not None:
        from shardwise.report.predictions import prediction_tables, predictions_json

        check_alone(args, "compare", "dry_run", "breakdown", "links", "verbose")
        slowed |= engine_of(args)
        a, b = (estimate(model, each, workload, cluster, **slowed) for each in (layout, other))
        head = (*(f"assumed: {note}" for note in assumed), *link_lines(cluster))
        return print_result(args, with_links(predictions_json(a, b), cluster), chain(head, prediction_tables(a, b)))
    if args.links:
        return _links(args, model, layout, workload, cluster, assumed)
    if args.breakdown:
        return _breakdown(args, model, layout, workload, cluster, assumed)
    if args.dry_run:
        check_alone(args, "dry_run", *ENGINE_FLAGS)
        if slowed:
            raise UserError("--dry-run has no times: leave out --slow and --emulate")
        from shardwise.runtime.installed import require

        if isinstance(model, Blueprint):
            raise UserError("--dry-run needs a configuration, and a trace was observed already: leave it out")
        require("--dry-run", "torch")
        from shardwise.runtime.dryrun import dry_run

        with working(f"dry run of {model.name}") as progress:
            report = dry_run(model, layout, workload, cluster, progress)
    else:
        report = estimate(model, layout, workload, cluster, **slowed, **engine_of(args))
    report = noted(report, assumed)
    shown = _lines(report, model, layout, workload, cluster, args.dry_run, args.verbose)
    return print_result(args, lambda: report.to_json() | {"size": size_json(model)}, shown)


def _measure(
    args: argparse.Namespace, model: Model, layout: Layout, workload: Workload, cluster: Cluster,
    assumed: tuple[str, ...],
) -> int:  # fmt: skip
    from shardwise.cli.show.measured_table import measured_lines

    report, measured = estimate_measure.measured_report(args, model, layout, workload, cluster)
    data = noted(report, assumed).to_json() | {"measured": measured.to_json()}
    head = _head(model, layout, workload, cluster, assumed)
    return print_result(
        args, data, chain(head, measured_lines(report, measured, workload.batch * workload.seq), report.notes)
    )


def _links(
    args: argparse.Namespace,
    model: Model,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    assumed: tuple[str, ...],
) -> int:
    from shardwise.cli.show.link_table import link_tables
    from shardwise.predict import estimate
    from shardwise.predict.time.link_use import link_uses

    check_alone(args, "links", *ENGINE_FLAGS, "dry_run", "slow", "emulate", "breakdown", "verbose")
    report = noted(estimate(model, layout, workload, cluster), assumed)
    if report.time is None:
        raise UserError(f"--links needs the time of a step, which has none on {cluster}: {'; '.join(report.notes)}")
    uses = link_uses(model, layout, cluster, report.roles)
    data = report.to_json() | {"links": [use.to_json() for use in uses]}
    return print_result(
        args, data, chain(_head(model, layout, workload, cluster, assumed), link_tables(uses, report.time))
    )


def check_alone(args: argparse.Namespace, flag: str, *others: str) -> None:
    """Raise `UserError` where one of `others` is given, which change nothing beside --`flag`."""
    for name in others:
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} does nothing with --{flag}: leave it out")


def noted(report: StepReport, assumed: tuple[str, ...]) -> StepReport:
    """The report with a note for each number of the workload that was not given."""
    return replace(report, notes=(*(f"assumed: {note}" for note in assumed), *report.notes))


def _breakdown(
    args: argparse.Namespace, model: Model, layout: Layout, workload: Workload, cluster: Cluster,
    assumed: tuple[str, ...],
) -> int:  # fmt: skip
    from shardwise.cli.show.breakdown_table import breakdown_tables
    from shardwise.predict import estimate
    from shardwise.predict.breakdown import breakdown
    from shardwise.predict.recompute_modes import recompute_modes

    check_alone(args, "breakdown", *ENGINE_FLAGS, "dry_run", "slow", "emulate", "verbose")
    if isinstance(model, Blueprint):
        raise UserError("--breakdown needs a model with a configuration, which a traced module has not: leave it out")
    report = noted(estimate(model, layout, workload, cluster), assumed)
    terms, modes = (
        breakdown(model, layout, workload, cluster, report),
        recompute_modes(model, layout, workload, cluster),
    )
    breakdown_json = terms.to_json() | {"recompute": modes}
    data = report.to_json() | {"breakdown": breakdown_json}
    head = _head(model, layout, workload, cluster, assumed)
    return print_result(args, data, chain(head, breakdown_tables(terms, modes)))


def _head(
    model: Model, layout: Layout, workload: Workload, cluster: Cluster, assumed: tuple[str, ...]
) -> tuple[str, ...]:
    notes = (f"assumed: {note}" for note in assumed)
    return *notes, *link_lines(cluster), _title(model, layout, workload, cluster)


def _title(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> str:
    return (
        f"{model.name}: {size_words(model)}, layout {layout} on {cluster}, "
        f"{workload.batch} sequences of {workload.seq} tokens a step\n"
    )


def _slowed(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `predict.estimate` for --slow and --emulate, where they were given."""
    if not args.slow and args.emulate is None:
        return {}
    from shardwise.schedule.stragglers import Stragglers, emulated_seconds

    return {"slow": Stragglers.parse(args.slow or ()), "emulated": emulated_seconds(args.emulate)}


def _lines(
    report: StepReport,
    model: Model,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    observed: bool,
    verbose: bool,
) -> Iterator[Renderable]:
    from shardwise.predict.memory.capacity import explained, try_room
    from shardwise.predict.node_bytes import node_bytes
    from shardwise.predict.tables import balance_lines, kinds_table, node_line, timing_lines
    from shardwise.report import tables

    yield _title(model, layout, workload, cluster)
    room = try_room(cluster, routed=bool(model.experts))
    yield f"{report.conclusion(room)}\n"
    yield tables.memory_table(report, room)
    homes = node_line(node_bytes(model, layout, workload, cluster), cluster)
    yield from (f"{line}\n" for line in (explained(cluster), *homes, links_line(cluster)) if line)
    if verbose:
        yield tables.ledger_table(report)
    else:
        yield tables.communication_table(report)
        yield "--verbose has the ledger: every collective of the step\n"
    yield from balance_lines(report)
    if layout.inner_ranks != layout.tp and isinstance(model, ModelConfig):
        from shardwise.predict.tensor_kinds import tensor_kinds

        if kinds := tensor_kinds(model, layout, workload, cluster):
            yield kinds_table(kinds)
    if not observed:
        yield from timing_lines(report, cluster, workload.batch * workload.seq)
    yield from report.notes


def _zero_table(args: argparse.Namespace) -> int:
    if args.zero_table is None:
        raise UserError("--params needs the numbers of GPUs: add --zero-table 1,2,4,8,16")
    if (args.params is None) == (args.model is None):
        raise UserError("--zero-table needs either MODEL or --params")
    single = ("layout", "cluster", "host_memory", "seq", "batch", "isolate_documents", "optimizer", "slow", "emulate")
    for name in (
        *single,
        *ENGINE_FLAGS,
        "lora",
        "compare",
        "dry_run",
        "breakdown",
        "verbose",
        "measure",
        *estimate_measure.OWN,
    ):
        if getattr(args, name) not in (None, False):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} belongs to one step's estimate: leave it out with --zero-table")
    if args.params is not None and args.set:
        raise UserError("--set changes a model, and --params names none: give MODEL in its place")

    from shardwise.predict import zero_table
    from shardwise.predict.memory.states import zero_sent
    from shardwise.report import tables

    params = parameters_of(args.params) if args.params is not None else float(count(model_of(args)))
    table = zero_table(params, gpus_of(args.zero_table))
    sent = {stage: zero_sent(stage) for stage in table}
    if args.json:
        gigabytes = {str(stage): {str(n): held / 1e9 for n, held in row.items()} for stage, row in table.items()}
        print_json(
            {
                "params": params,
                "gigabytes_per_gpu": gigabytes,
                "sent_per_parameter": {str(stage): elements for stage, elements in sent.items()},
            }
        )
    else:
        title = f"{format_count(params)} parameters: weights, gradients and optimizer state on each GPU"
        show(tables.zero_table(table, title, sent=sent), _SENT)
    return 0


_SENT = (
    "communication: elements sent per step, over the 2 per parameter of ZeRO 0 (gradients reduced, sums gathered); "
    "ZeRO 3 gathers weights for forward and for backward"
)


def parameters_of(text: str) -> float:
    """A number of parameters: 7e9, 7B, 350M. Raises `UserError`."""
    digits, scale = text.strip(), 1.0
    if digits[-1:].upper() in ("K", "M", "B", "T"):
        digits, scale = digits[:-1], {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[digits[-1].upper()]
    try:
        params = float(digits) * scale
    except ValueError:
        params = math.nan
    if not 1 <= params < math.inf:
        raise UserError(f"--params {text}: give a number of parameters, such as 7e9 or 7B")
    return params


def gpus_of(text: str) -> list[int]:
    """Numbers of GPUs: 1,2,4. Raises `UserError`."""
    try:
        gpus = [int(word) for word in text.split(",")]
    except ValueError:
        gpus = []
    if not gpus or min(gpus) < 1:
        raise UserError(f"--zero-table {text}: give numbers of GPUs, such as 1,2,4,8,16")
    return gpus
