"""Predict memory, communication and time of one training step of a layout, in closed form.

--dry-run observes memory and communication instead: it runs the training step on fake tensors and a fake process
group.

--breakdown shows the terms behind the totals (parameters by mechanism, bytes per parameter under each ZeRO stage, saved
tensors, FLOPs, recompute modes).

--compare shows another layout beside this one, quantity by quantity.

--links shows calls and bytes of each axis, and their time inside a node and between nodes.

--measure runs one rank's real share of the layout on the device at hand, with waits of predicted length for its
collectives.

--params P alone shows weights, gradients and optimizer state of P parameters. --zero-table N,... shows their bytes per
GPU under ZeRO stages 0 to 3 on N GPUs, for MODEL or for P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from shardwise import predict
from shardwise.cli import estimate_measure
from shardwise.cli.clusters import HostOptions, NetworkOptions, cluster_of, usual_cluster
from shardwise.cli.declare import arg, borrow
from shardwise.cli.estimate_measure import MeasureOptions
from shardwise.cli.models import LoraOptions, ModelOptions, model_of, subject_of
from shardwise.cli.output import print_result, working
from shardwise.cli.quantities import count_of, numbers
from shardwise.cli.workloads import EngineOptions, StepOptions, engine_of, workload_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.model_size import size_json, size_words
from shardwise.model.parameters import Model, count
from shardwise.predict.cluster_links import link_lines, links_line, with_links
from shardwise.predict.memory.capacity import explained, try_room
from shardwise.predict.tables import balance_lines, kinds_table, node_line, timing_lines
from shardwise.records import dataclass
from shardwise.report import StepReport, tables
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count
from shardwise.runtime.installed import require
from shardwise.runtime.job.slow_ranks import SlowRanks

ENGINE = "engine precision recompute_modules recompute_layers"
"""EstimateOptions of another engine's software."""
SLOW = "slow emulate"
USUAL_GPUS, SMALL_GPU = [1, 2, 4, 8, 16], 24e9
"""Numbers of GPUs, and the bytes of one, that --params alone is answered for."""


@dataclass
class EstimateOptions(
    MeasureOptions, EngineOptions, LoraOptions, StepOptions, HostOptions, NetworkOptions, ModelOptions
):
    borrowed = borrow((SlowRanks, SLOW))
    layout: str | None = arg("how the model is split, such as tp=8,dp=8,zero=1", "TEXT")
    zero_table: list[int] | None = arg(
        "show a table of ZeRO stages for these numbers of GPUs",
        "N,...",
        read=numbers,
        uses="model set offline params",
        idle="belongs to one step's estimate: leave it out with --zero-table",
    )
    params: float | None = arg(
        "parameters: 7e9, 7B, 350M",
        "P",
        read=partial(count_of, "parameters, such as 7e9 or 7B"),
        uses="zero_table model offline",
    )
    compare: str | None = arg("another layout to compare with", "TEXT", excludes="dry_run breakdown links verbose")
    links: bool = arg("show communication by axis and link", excludes=f"{ENGINE} {SLOW} dry_run breakdown verbose")
    breakdown: bool = arg("show the terms behind the totals", excludes=f"{ENGINE} {SLOW} dry_run verbose")
    dry_run: bool = arg("run the training step on fake tensors; needs torch", excludes=f"{ENGINE} {SLOW}")
    verbose: bool = arg("list every collective of the step instead of sums")


@dataclass
class EstimatedStep:
    """The step that is estimated."""

    model: Model
    layout: Layout
    workload: Workload
    cluster: Cluster
    assumed: tuple[str, ...]
    """Numbers of the workload that were not given."""

    def estimate(self, **more: Any) -> StepReport:
        """The prediction, with a note for each number that was not given. more: for `predict.estimate`."""
        return self.noted(predict.estimate(*self.subject, **more))

    def noted(self, report: StepReport) -> StepReport:
        """The report with what was assumed."""
        return replace(report, notes=(*(f"assumed: {note}" for note in self.assumed), *report.notes))

    @property
    def subject(self) -> tuple[Model, Layout, Workload, Cluster]:
        """The step as functions of `predict` take it."""
        return self.model, self.layout, self.workload, self.cluster

    @property
    def title(self) -> str:
        """The step in one line."""
        return (
            f"{self.model.name}: {size_words(self.model)}, layout {self.layout} on {self.cluster}, "
            f"{self.workload.batch_words} a step\n"
        )

    @property
    def head(self) -> tuple[str, ...]:
        """What was assumed, the links, and the title."""
        return *(f"assumed: {note}" for note in self.assumed), *link_lines(self.cluster), self.title


def run(args: EstimateOptions) -> int:
    if args.zero_table is not None or args.params is not None:
        return _zero_table(args, args.zero_table or USUAL_GPUS)
    step, other = _step(args)
    slowed = _slowed(args)
    if args.measure:
        return _measure(args, step)
    if other is not None:
        return _compare(args, step, other, slowed | engine_of(args))
    if args.links:
        return _links(args, step)
    if args.breakdown:
        return _breakdown(args, step)
    report = _dry_run(step) if args.dry_run else step.estimate(**slowed, **engine_of(args))
    shown = _lines(report, step, args.dry_run, args.verbose)
    return print_result(args, lambda: report.to_json() | {"size": size_json(step.model)}, shown)


def _step(args: EstimateOptions) -> tuple[EstimatedStep, Layout | None]:
    """The step, and the layout to compare with. Raises `UserError`."""
    usual_cluster(args)
    model = subject_of(args) if args.model else None
    missing = [f"--{name}" for name in ("layout", "cluster") if getattr(args, name) is None]
    if model is None or missing:
        words = ", ".join(missing if args.model else ["MODEL", *missing])
        raise UserError(f"estimate needs {words}, such as llama-3-8b --layout dp=8,zero=3 --cluster 8xH100")
    layout, cluster = Layout.parse(args.layout or ""), cluster_of(args)
    other = None if args.compare is None else Layout.parse(args.compare)
    parts = math.lcm(*(each.dp * each.micro for each in (layout, other or layout)))
    workload, assumed = workload_of(args, model, parts)
    return EstimatedStep(model, layout, workload, cluster, assumed), other


def _slowed(args: EstimateOptions) -> dict[str, Any]:
    """The arguments of `predict.estimate` for --slow and --emulate, where they were given."""
    if not args.slow and args.emulate is None:
        return {}
    from shardwise.schedule.stragglers import Stragglers, emulated_seconds

    return {"slow": Stragglers.parse(args.slow or ()), "emulated": emulated_seconds(args.emulate)}


def _dry_run(step: EstimatedStep) -> StepReport:
    require("--dry-run", "torch")
    from shardwise.runtime.dryrun import dry_run

    with working(f"dry run of {step.model.name}") as progress:
        return step.noted(dry_run(step.model, *step.subject[1:], progress))


def _measure(args: EstimateOptions, step: EstimatedStep) -> int:
    from shardwise.cli.show.measured_table import measured_lines

    report, measured = estimate_measure.measured_report(args, *step.subject)
    data = step.noted(report).to_json() | {"measured": measured.to_json()}
    tokens = step.workload.batch * step.workload.seq
    return print_result(args, data, chain(step.head, measured_lines(report, measured, tokens), report.notes))


def _compare(args: EstimateOptions, step: EstimatedStep, other: Layout, more: dict[str, Any]) -> int:
    from shardwise.report.predictions import prediction_tables, predictions_json

    a, b = (predict.estimate(*replace(step, layout=layout).subject, **more) for layout in (step.layout, other))
    data = with_links(predictions_json(a, b), step.cluster)
    return print_result(args, data, chain(step.head[:-1], prediction_tables(a, b)))


def _links(args: EstimateOptions, step: EstimatedStep) -> int:
    from shardwise.cli.show.link_table import link_tables
    from shardwise.predict.time.link_use import link_uses

    report = step.estimate()
    if report.time is None:
        notes = "; ".join(report.notes)
        raise UserError(f"--links needs the time of a step, which has none on {step.cluster}: {notes}")
    uses = link_uses(step.model, step.layout, step.cluster, report.roles)
    data = report.to_json() | {"links": [use.to_json() for use in uses]}
    return print_result(args, data, chain(step.head, link_tables(uses, report.time)))


def _breakdown(args: EstimateOptions, step: EstimatedStep) -> int:
    from shardwise.cli.show.breakdown_table import breakdown_tables
    from shardwise.predict.breakdown import breakdown
    from shardwise.predict.recompute_modes import recompute_modes

    model, layout, workload, cluster = step.subject
    report = step.estimate()
    terms, modes = (
        breakdown(model, layout, workload, cluster, report),
        recompute_modes(model, layout, workload, cluster),
    )
    data = report.to_json() | {"breakdown": terms.to_json() | {"recompute": modes}}
    return print_result(args, data, chain(step.head, breakdown_tables(terms, modes)))


def _lines(report: StepReport, step: EstimatedStep, observed: bool, verbose: bool) -> Iterator[Renderable]:
    from shardwise.predict.node_bytes import node_bytes

    model, layout, workload, cluster = step.subject
    yield step.title
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
    if layout.inner_ranks != layout.tp:
        from shardwise.predict.tensor_kinds import tensor_kinds

        if kinds := tensor_kinds(model, layout, workload, cluster):
            yield kinds_table(kinds)
    if not observed:
        yield from timing_lines(report, cluster, workload.batch * workload.seq)
    yield from report.notes


def _zero_table(args: EstimateOptions, gpus: list[int]) -> int:
    if (args.params is None) == (args.model is None):
        raise UserError("a table of ZeRO stages is for either MODEL or --params: give one")

    from shardwise.predict.memory.states import largest_model, training_states, zero_sent

    params = args.params if args.params is not None else float(count(model_of(args)))
    table = predict.zero_table(params, gpus)
    sent = {stage: zero_sent(stage) for stage in table}
    data = {
        "params": params,
        "gigabytes_per_gpu": {stage: {n: held / 1e9 for n, held in row.items()} for stage, row in table.items()},
        "sent_per_parameter": sent,
    }
    states = training_states(params)
    data["bytes"] = {**vars(states), "total": states.total}
    held = ", ".join(f"{format_bytes(size)} of {name}" for name, size in vars(states).items())
    parts = (
        f"{format_count(params)} parameters: {held} (AdamW): {format_bytes(states.total)}, "
        f"{states.total / params:g} bytes per parameter\n"
        f"{format_bytes(SMALL_GPU)} hold at most {format_count(largest_model(SMALL_GPU))} parameters in training\n"
    )
    title = f"{format_count(params)} parameters: weights, gradients and optimizer state on each GPU"
    alone = [] if args.zero_table else [parts]
    return print_result(args, data, [*alone, tables.zero_table(table, title, sent=sent), _SENT])


_SENT = (
    "communication: elements sent per step, over the 2 per parameter of ZeRO 0 (gradients reduced, sums gathered); "
    "ZeRO 3 gathers weights for forward and for backward"
)
