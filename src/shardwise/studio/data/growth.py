"""Computing against communication of a step, as devices are added to a plan's best layout."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import log

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.layout import with_replicas
from shardwise.planner.plan import Plan
from shardwise.predict.step_seconds import StepTiming, step_seconds
from shardwise.report import time_parts
from shardwise.report.units import format_time
from shardwise.studio.columns import Columns, How, Table

Growth = list[tuple[Layout, StepTiming]]


def grown(best: Plan) -> Growth:
    """The first layout with 1, 2, 4, ... replicas and the same batch, with its step; only layouts that exist."""
    found: Growth = []
    replicas = 1
    while replicas <= best.workload.batch:
        with suppress(UserError):
            layout = with_replicas(best.winner.layout, replicas)
            nodes = -(-layout.ranks // best.cluster.devices_per_node)
            timing = step_seconds(
                best.model, layout, best.workload, replace(best.cluster, nodes=nodes), engine=best.engine
            )
            found.append((layout, timing))
        replicas *= 2
    return found


def table_of(growth: Growth) -> Table:
    """A row for each layout: devices, seconds of computing and of communication, and the step's."""
    columns: Columns = {
        "devices": ("", lambda one: one[0].ranks),
        "layout": ("", lambda one: str(one[0])),
        "computing": ("seconds", lambda one: _computing(one[1])),
        "communication": ("seconds", lambda one: sum(one[1].links.values())),
        "not hidden": ("seconds", lambda one: time_parts.grouped(one[1].parts)["communication"]),
        "step": ("seconds", lambda one: one[1].seconds),
    }
    return Table.of("Computing and communication as devices grow", growth, columns)


def _computing(timing: StepTiming) -> float:
    return time_parts.grouped(timing.parts)["compute"]


def meets(growth: Growth) -> float | None:
    """Devices from which a step communicates for longer than it computes, on straight lines between logarithms; None
    where it never does, or always."""
    places = [(one.ranks, sum(timing.links.values()) / _computing(timing)) for one, timing in growth]
    for (few, below), (many, above) in pairwise(places):
        if 0 < below < 1 <= above:
            return float(few * (many / few) ** (log(below) / log(below / above)))
    return None


def how_grown(growth: Growth, command: str) -> How:
    """The formula with its numbers. command: what prints the step of the plan's layout."""
    steps = [
        "The best layout with more or fewer replicas and the same batch: arithmetic is shared by more devices, the "
        "bytes of gradients and weights on a device's links are not.",
        "Computing: matrix products, attention, kernels bound by memory, the optimizer. Communication: all collectives "
        "and messages one after another, hidden ones, too.",
    ]
    steps += [
        f"{layout}: computing {format_time(_computing(timing))}, communication "
        f"{format_time(sum(timing.links.values()))}, the step {format_time(timing.seconds)}"
        for layout, timing in growth
    ]
    return How(steps, command, "docs/prediction.md")
