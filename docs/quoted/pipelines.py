"""Pipelines: bubbles, what is held, what crosses a boundary."""

from __future__ import annotations

from quoted.showing import Inputs, Values, topic
from quoted.tokens import boundary_bytes
from shardwise.schedule.pipeline import Action, PipelineSchedule, build, complete
from shardwise.schedule.pipeline.closed_forms import least_micro, simulated
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.plan import loop
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.schedule.pipeline.verify import verify

shows = topic(4, "Pipelines")


def unit_times(schedule: PipelineSchedule) -> Times:
    """F = B = 1 on every stage."""
    return Times.equal(schedule.stages, 1.0, 0.5, 0.5)


def of_total(p: int, m: int) -> float:
    """GPipe's and 1F1B's bubble of the total time: (p - 1) / (m + p - 1)."""
    return (p - 1) / (m + p - 1)


@shows("pp-boundary", "quoted.tokens.boundary_bytes", text="{bytes:,} bytes = {kib:g} KiB")
def _boundary(inputs: Inputs) -> Values:
    nbytes = boundary_bytes(32, 4096)
    return {"bytes": nbytes, "kib": nbytes / 1024}


@shows("pp-boundary-8k", "quoted.tokens.boundary_bytes", text="{bytes:,} bytes = {kib:g} KiB")
def _boundary_8k(inputs: Inputs) -> Values:
    nbytes = boundary_bytes(16, 8192)
    return {"bytes": nbytes, "kib": nbytes / 1024}


@shows(
    "bubble-naive",
    "schedule.pipeline.closed_forms.simulated",
    "shardwise pipeline simulate naive --ranks 8 --micro 4 --times F=1,B=1",
    text="{p4:g} at P=4, {p8:g} at P=8 of the time, simulated with 4 micro-batches",
)
def _naive_bubble(inputs: Inputs) -> Values:
    idle = {str(p): simulated("naive", p, 4, 1, unit_times).bubble_of_total for p in (4, 8)}
    return idle | {"p4": idle["4"], "p8": idle["8"]}


@shows(
    "bubble-gpipe",
    "schedule.pipeline.closed_forms.least_micro",
    "quoted.pipelines.of_total",
    text="{p4} at P=4 ({share4:.2%}), {p8} at P=8 ({share8:.2%})",
)
def _gpipe_bubble(inputs: Inputs) -> Values:
    # Strictly under 10%: one micro-batch fewer gives just that.
    under = 0.1 - 1e-6
    least = {p: least_micro("gpipe", p, 1, under, unit_times).micro for p in (4, 8)}
    shares = {f"share{p}": of_total(p, m) for p, m in least.items() if m}
    return {str(p): m for p, m in least.items()} | {f"p{p}": m for p, m in least.items()} | shares


@shows(
    "1f1b-drawing",
    "schedule.pipeline.build",
    "schedule.pipeline.simulate.simulate",
    "schedule.pipeline.memory.peaks",
    "shardwise pipeline show 1f1b --ranks 4 --micro 8",
    text="p=4, m=8, F=B=1: warm-ups {warmups}, {idle:g} units idle a rank ({share:.0%}), {peaks} held; as drawn "
    "{idle_drawn:g} units ({share_drawn:.0%}), {peaks_drawn} held",
)
def _drawing_of_1f1b(inputs: Inputs) -> Values:
    p, m = 4, 8
    waves = [action for first in range(0, m, p) for action in _wave(first, p)]
    drawn = complete("as drawn", [[a._replace(stage=s) for a in waves] for s in range(p)], loop(p, 1), m)
    real = build("1f1b", p, m)
    assert verify(drawn) == [] and verify(real) == []
    values: Values = {"stage_s_order": [_computations(real, rank) for rank in range(p)]}
    for name, schedule in (("", real), ("_drawn", drawn)):
        timed = simulate(schedule, unit_times(schedule))
        held = [peak.forward for peak in peaks(schedule)]
        values |= {f"idle{name}": timed.idle[0], f"share{name}": timed.bubble_of_total, f"peaks{name}": held}
    return values | {"warmups": [_leading(order) for order in values["stage_s_order"]]}


def _wave(first: int, p: int) -> list[Action]:
    """All forwards of p micro-batches, then their backwards in the reverse order; stage 0's."""
    forward = range(first, first + p)
    return [Action("F", 0, k) for k in forward] + [Action("B", 0, k) for k in reversed(forward)]


def _computations(schedule: PipelineSchedule, rank: int) -> str:
    """The order of a rank's forwards and backwards, such as F0 F1 B0."""
    return " ".join(f"{a.kind}{a.micro}" for a in schedule.actions[rank] if a.kind in ("F", "B"))


def _leading(order: str) -> int:
    """Forwards before the first pair of a forward and a backward."""
    return order[: order.index("B")].count("F") - 1


@shows(
    "1f1b-memory",
    "schedule.pipeline.memory.peaks",
    "shardwise pipeline verify 1f1b --ranks 4 --micro 8",
    text="{peaks_p4_m8} micro-batches at P=4, M=8; idle {idle:g} units as GPipe's {gpipe:g}",
)
def _memory_of_1f1b(inputs: Inputs) -> Values:
    idle = [simulated(name, 4, 8, 1, unit_times).idle[0] for name in ("1f1b", "gpipe")]
    held = [peak.forward for peak in peaks(build("1f1b", 4, 8))]
    return {"peaks_p4_m8": held, "idle": idle[0], "gpipe": idle[1]}
