"""Memory: bytes by class on every device of a layout against its capacity; what else would fit; a step's moments."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, islice
from math import prod
from typing import Any, NamedTuple

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.context import SequenceCut
from shardwise.layout.gathers import slot_bytes
from shardwise.layout.keys import KEYS, defaults
from shardwise.layout.step import role_of
from shardwise.layout.units import usual_backend
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.predict import estimate
from shardwise.predict.context_balance import context_balance
from shardwise.predict.memory.activations import saved_items
from shardwise.predict.memory.capacity import capacity_of
from shardwise.predict.memory.peak import inputs, moments, saved_inputs, tables
from shardwise.predict.memory.pipeline import moments as moments_of_rank
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.step import OPTIMIZER_BYTES, optimizer_bytes, parameter_bytes
from shardwise.report.palette import BYTE_CLASSES
from shardwise.report.step_report import DTYPE_BYTES, HOMES, StepReport
from shardwise.report.units import format_bytes, format_count, format_ranks
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.studio.columns import How, Table, View, command_line
from shardwise.studio.data.opens import NUMBERS, WORDS, opens
from shardwise.studio.data.sizes import SEQ, most_seq, offered, seqs, sized, sizes, too_long
from shardwise.studio.query import Query


def sequence(model: ModelConfig, layout: Layout, workload: Workload) -> tuple[Table, int]:
    """One row per context-parallel rank of a layout with cp > 1, and the tokens of a sequence with its padding."""
    cut, balance = SequenceCut.of(layout, workload.seq), context_balance(model, layout, workload)
    plain = replace(cut, zigzag=False)
    rows = []
    for rank in range(cut.cp):
        first, second = cut.places(rank)
        before, after = plain.places(rank)
        work = balance.flops[rank], balance.plain_flops[rank]
        rows.append((rank, first.start, first.stop, second.start, second.stop, before.start, after.stop, *work))
    units = dict.fromkeys(
        ("rank", "first chunk from", "to", "second chunk from", "to ", "plain cut from", " to"), ""
    ) | {"attention": "count", "attention, plain cut": "count"}
    order = "zigzag order" if cut.zigzag else "plain order"
    return Table.of_rows(f"Tokens of each context-parallel rank, in {order}, and FLOPs", units, rows), cut.padded


def how_sequence(layout: Layout, workload: Workload, command: str) -> How:
    """The cut in words."""
    cut = SequenceCut.of(layout, workload.seq)
    chunk = cut.local // 2
    steps = [
        f"{cut.seq:,} tokens, with padding {cut.padded:,}, are 2 x {cut.cp} chunks of {chunk:,}",
        f"zigzag: rank r has chunks r and {2 * cut.cp - 1} - r"
        if cut.zigzag
        else "ulysses: rank r has chunks 2 r and 2 r + 1, and attends with its share of the heads over all tokens",
        "attention: pairs of a token and the tokens that it sees, times the FLOPs of a pair, forward, all layers; in a "
        "plain cut the last rank's tokens see most",
    ]
    return How(steps, command, "Megatron-LM, ring-flash-attention, Llama 3 (docs/context.md)")


CLUSTERS = ("8xH100", "2x8xH100", "8x8xH100", "8xA100", "8x8xA100", "8xB200", "1xH100")
_HOMES = [
    "offload: master weights and moments of what a rank updates, 12 bytes per parameter; on disk two slots of them.",
    "From ZeRO stage 2 on, gradients wait in the host's memory for its cores to update from.",
    "offload_params: the compute-precision interval that gathers read. offload_activations: what blocks save.",
    "Communication buffers: those between the file and the update, and a chunk of gradients.",
]
BATCH = 32
"""Sequences of a step, or the next number above that the layout can share out."""
MOST_MOMENTS = 4000
"""Moments up to which a step's are drawn."""


def data(params: Mapping[str, str]) -> View:
    """One layout's bytes on each role of ranks, the same with other stages and recompute, and one rank's moments."""
    query = Query(params)
    model, changes = sized(query, "llama-3-8b")
    cluster = Cluster.parse(query.text("cluster", "8xH100"))
    layout = _layout(query, model, cluster.devices)
    seq = query.whole("seq", min(SEQ, most_seq(model)), 1, 1 << 24)
    together = layout.dp * layout.micro
    workload = Workload(seq=seq, batch=query.whole("batch", -(-BATCH // together) * together, 1, 1 << 20))
    # What the state does not give follows the model.
    names, left_out = offered(lambda one: one.why_not_runnable() or too_long(one, seq if query.has("seq") else 1))
    place = min(query.whole("place", 0, 0, 1023), layout.pp - 1)
    query.done()
    query.state["place"] = place
    report = estimate(model, layout, workload, cluster)
    plan = unit_plan(
        model,
        layout,
        workload,
        rank=Mesh.of(layout, model).rank(pp=place),
        backend=usual_backend(cluster),
    )
    words = ("--layout", layout, "--cluster", query.state["cluster"], "--seq", workload.seq, "--batch", workload.batch)
    command = command_line("estimate", query.state["model"], *changes, *words)
    homes = _homes(report)
    cut, padded = sequence(model, layout, workload) if layout.cp > 1 else (None, 0)
    return View(
        query.state,
        {"model": names, "cluster": CLUSTERS, "seq": sorted({seq, *seqs(model)})}
        | sizes(model)
        | {name: KEYS[name].choices for name in WORDS},
        {
            "devices": _devices(report, cluster),
            "fits": _fits(model, layout, workload, cluster),
            "moments": _moments(plan),
        }
        | ({"homes": homes} if homes else {})
        | ({"sequence": cut} if cut else {}),
        {
            "devices": _how_devices(model, plan, report, command),
            "fits": How(["Each row is the same estimate with another ZeRO stage and recompute."], command),
            "moments": _how_moments(plan, command),
        }
        | ({"homes": How(_HOMES, command)} if homes else {})
        | ({"sequence": how_sequence(layout, workload, command)} if cut else {}),
        {
            "layout": str(layout),
            "ranks": layout.ranks,
            "capacity": capacity_of(cluster),
            "room": report.room,
            "parameters": count(model),
            "micro_batches": workload.micro_batches(layout),
            "notes": list(report.notes),
            "classes": list(BYTE_CLASSES),
            "places": layout.pp,
            "sequence_tokens": padded,
            "left_out": left_out,
            "opens": opens(query.state, layout, "memory", workload.micro_batches(layout)),
        },
    )


def _layout(query: Query, model: ModelConfig, devices: int) -> Layout:
    """The layout that the state describes; dp fills the devices unless it is given. Raises `LayoutError`, a
    `UserError`, for what contradicts itself."""
    degrees = {name: query.whole(name, 1, 1, 4096) for name in ("tp", "pp", "cp")}
    degrees["dp"] = query.whole("dp", max(1, devices // prod(degrees.values())), 1, 1 << 16)
    usual = defaults(*WORDS)
    if model.attention_dropout:
        usual["attention"] = "math"
    words = {name: query.word(name, default, KEYS[name].choices) for name, default in usual.items()}
    numbers = {name: query.whole(name, KEYS[name].default, KEYS[name].least, most) for name, most in NUMBERS.items()}
    rest: dict[str, Any] = degrees | words | numbers
    return Layout(**rest, sp=query.flag("sp"))


_CLASS_UNITS = {kind.label: "bytes" for kind in BYTE_CLASSES.values()}
_PLACES = {"host": "host memory", "disk": "disk"}


def _devices(report: StepReport, cluster: Cluster) -> Table:
    capacity = capacity_of(cluster)
    units = {"devices": "", "role": "", **_CLASS_UNITS, "not there at the peak": "bytes", "peak": "bytes", "fits": ""}
    rows = []
    for role in report.roles:
        fits = None if capacity is None else role.peak_bytes <= capacity
        held = (getattr(role.bytes, name) for name in BYTE_CLASSES)
        rows.append((format_ranks(role.ranks), role.role, *held, role.bytes.absent, role.peak_bytes, fits))
    return Table.of_rows("Bytes on each device, the most of each class at one time, and the peak", units, rows)


def _homes(report: StepReport) -> Table | None:
    """Bytes off the devices, a row for each home of each role that has any; None where nothing is."""
    held = [(role, home, getattr(role, home)) for role in report.roles for home in HOMES]
    rows = [
        (format_ranks(role.ranks), _PLACES[home], *(getattr(of, name) for name in BYTE_CLASSES), of.total)
        for role, home, of in held
        if of.total
    ]
    units = {"devices": "", "home": "", **_CLASS_UNITS, "together": "bytes"}
    return Table.of_rows("Bytes that each rank keeps off its device, by home", units, rows) if rows else None


def _fits(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> Table:
    rows = []
    for recompute in ("none", "selective", "full"):
        for zero in range(4):
            rows.append((zero, recompute, *_peak(model, layout, workload, cluster, zero, recompute)))
    units = {"zero": "", "recompute": "", "peak": "bytes", "fits": "", "why not": ""}
    return Table.of_rows("The fullest device with other ZeRO stages and recompute", units, rows)


def _peak(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, zero: int, recompute: str
) -> tuple[int | None, bool | None, str]:
    try:
        changed = replace(layout, zero=zero, recompute=recompute)
        peak = max(role.peak_bytes for role in estimate(model, changed, workload, cluster).roles)
    except UserError as error:
        return None, None, str(error)
    capacity = capacity_of(cluster)
    return peak, None if capacity is None else peak <= capacity, ""


_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "OVERLAP_F_B": "forward, backward"}
"""Kind of a pipeline's action -> phase."""


class MemoryPoint(NamedTuple):
    """Bytes at one moment of a step. words: what is done; phase: of the step, one of forward, loss, backward, optimizer
    and waits. gradients, comm; rest: activations and all that is transient. start, end: when, in a pipeline whose
    schedule is not too long to be simulated; else both 0."""

    words: str
    phase: str
    gradients: int
    comm: int
    rest: int
    start: float = 0.0
    end: float = 0.0


def _moments(plan: UnitPlan) -> Table:
    rows = _through_pipeline(plan) if plan.layout.pp > 1 else _through_step(plan)
    lasting = {"parameters": parameter_bytes(plan), "optimizer state": optimizer_bytes(plan)}
    columns: dict[str, list[Any]] = {"moment": [row.words for row in rows], "phase": [row.phase for row in rows]}
    if any(row.end for row in rows):
        columns |= {"from": [row.start for row in rows], "to": [row.end for row in rows]}
    sizes = {name: [nbytes] * len(rows) for name, nbytes in lasting.items()} | {
        "gradients": [row.gradients for row in rows],
        "communication buffers": [row.comm for row in rows],
        "activations and the rest": [row.rest for row in rows],
        "together": [sum(lasting.values()) + row.gradients + row.comm + row.rest for row in rows],
    }
    return Table(f"{role_of(plan)}: one moment after the other", columns | sizes, dict.fromkeys(sizes, "bytes"))


def _through_step(plan: UnitPlan) -> list[MemoryPoint]:
    """A step without a pipeline, at the moments whose largest is the predicted peak."""
    s, slots = Sizes.of(plan), (plan.layout.stage == 3) * slot_bytes(plan)
    there = inputs(plan, s) - sum(saved_inputs(plan, s, part) for part in plan.parts) + tables(plan, s)
    saved = list(accumulate(sum(saved_items(plan, s, part).values()) for part in plan.parts))
    points: list[MemoryPoint] = []
    for index, (one, beside) in enumerate(moments(plan)):
        if one.when == "loss":
            label = "a later micro-batch: " if index else ""
            points += [
                MemoryPoint(f"{label}forward {part}", "forward", one.gradients, one.comm + slots, there + nbytes)
                for part, nbytes in zip(plan.parts, saved, strict=True)
            ]
        rest = beside + one.arriving
        phase = one.when if one.when in ("loss", "optimizer") else "optimizer" if one.when == "outer" else "backward"
        points.append(MemoryPoint(_words(one.when, one.part), phase, one.gradients, one.comm + slots, rest))
    return points


def _words(when: str, part: str) -> str:
    return {
        "loss": "loss",
        "begin": f"before the backward of {part}",
        "backward": f"backward {part}",
        "reduction": f"gradients of {part} on their way",
        "landing": "the last gradients arrive",
        "optimizer": "optimizer",
        "outer": "outer step",
    }[when]


def _through_pipeline(plan: UnitPlan) -> list[MemoryPoint]:
    """A rank of a pipeline: the fullest moment of each of its actions, and what is there while it waits."""
    drawn = _drawn(plan)
    names, spans = [*map(str, drawn.pipeline.actions), "optimizer"], _spans(drawn)
    phases = [_PHASES.get(action.kind, "") for action in drawn.pipeline.actions] + ["optimizer"]
    points: list[MemoryPoint] = []
    left, now = (0, 0, 0), 0.0
    for full, after in islice(moments_of_rank(drawn, inputs(plan, Sizes.of(plan))), MOST_MOMENTS):
        start, end = spans[full.place] if spans else (0.0, 0.0)
        if start > now and end > start:
            points.append(MemoryPoint("waits", "waits", *left, now, start))
        points.append(
            MemoryPoint(names[full.place], phases[full.place], full.gradients, full.comm, full.rest, start, end)
        )
        left, now = (after.gradients, after.comm, after.rest), max(now, end)
    return points


def _drawn(plan: UnitPlan) -> UnitPlan:
    many = len(plan.short.pipeline.actions) * plan.micro_batches > MOST_MOMENTS * plan.short.micro_batches
    return plan.short if many else plan


def _spans(plan: UnitPlan) -> list[tuple[float, float]] | None:
    """(begin, end) of each action of the rank and of the optimizer, where a forward of one micro-batch on a rank takes
    1, and so do its gradients of inputs and of weights; None for steps that are too long to be drawn."""
    schedule = plan.pipeline.schedule
    assert schedule
    if len(plan.pipeline.actions) > MOST_MOMENTS:
        return None
    simulated = simulate(schedule, Times.shared(schedule, 1, 1, 1))
    return [*simulated.spans[plan.pp_rank], (simulated.makespan, simulated.makespan + 1)]


def _how_devices(model: ModelConfig, plan: UnitPlan, report: StepReport, command: str) -> How:
    layout, first = plan.layout, report.roles[0].bytes
    held = sum(unit.padded for unit in plan.units)
    parts = [f"tp={layout.tp}" if layout.tp > 1 else "", f"pp={layout.pp}" if layout.pp > 1 else ""]
    split = " and ".join(filter(None, parts)) or "no split of the layers"
    steps = [
        f"{model.name} has {format_count(count(model))} parameters; with {split} this rank has "
        f"{format_count(held)} of them.",
        _what_is_sharded(layout),
        f"parameters {format_bytes(parameter_bytes(plan))}: {DTYPE_BYTES[layout.dtype]} bytes each in "
        f"{layout.precision}",
        f"optimizer state {format_bytes(optimizer_bytes(plan))}: {OPTIMIZER_BYTES[layout.precision]} bytes for each "
        "that this rank updates (Adam: two averages, with bf16 weights a copy in fp32)",
        f"saved activations: {format_bytes(first.saved)} on the first role, from what autograd keeps of each layer for "
        f"{layout.micro} x {plan.workload.seq} tokens",
        "The peak is less than the sum, where classes reach their most at different times.",
    ]
    return How(
        [*steps, *report.notes], command, "docs/prediction.md; parameters to saved are exact, the peak within 5%"
    )


def _what_is_sharded(layout: Layout) -> str:
    if layout.shard_ranks == 1:
        why = "" if layout.stage == 0 else f": ZeRO stage {layout.stage} has one data rank here"
        return f"Nothing is sharded over data ranks{why}."
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}
    return f"ZeRO stage {layout.stage} shards {what[layout.stage]} over {layout.shard_ranks} ranks."


def _how_moments(plan: UnitPlan, command: str) -> How:
    if plan.layout.pp > 1:
        lines = [
            "Every action of this rank's list with the fullest moment while it is done, as estimate follows them; the "
            "highest is the predicted peak.",
            "Time: the schedule simulated, where a forward on a rank takes 1, and so do its gradients of inputs and of "
            "weights (Pipelines has other times).",
        ]
        if (drawn := _drawn(plan).micro_batches) < plan.micro_batches:
            steady = plan.pipeline.steady
            assert steady
            more = "; with all of them it holds more activations" if steady.grows else ", and the highest is the same"
            lines.append(f"{drawn} of {plan.micro_batches} micro-batches: the others repeat its steady state{more}.")
    else:
        lines = [
            "One column a moment at which something large comes or goes: each part's forward, the loss, each part's "
            "backward and the reduction of its gradients, the optimizer. The highest is the predicted peak."
        ]
    if plan.micro_batches > 3 and plan.layout.pp == 1:
        lines.append(f"Three of {plan.micro_batches} micro-batches: all later ones equal the third.")
    return How(lines, command)
