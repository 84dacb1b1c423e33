"""The layout of a recorded program: axes from its groups, the ZeRO stage, tensor parallelism and the pipeline from what
every group does in one step. A recording that names the engine of a call decides; else the pattern does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.audit.calls import Call
from shardwise.audit.reading import RankRecording
from shardwise.codec import Json
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.layout.axes import DP, PP, SHARD, TP

(DATA,), (SHARDS,), (TENSOR,), (PIPELINE,) = DP, SHARD, TP, PP
Axis = str
"""One of these. Ranks of a group are replicas whose gradients are summed, or share a state, an operation, a model."""
SCHEDULES = {
    "ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "breadth-first", "ScheduleZBVZeroBubble": "zb-v", "ScheduleDualPipeV": "dualpipe-v",
}  # fmt: skip
"""torch's class -> our name."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
SMALL = 64
"""Bytes up to which a call is a scalar: a norm, a loss, a count."""


@dataclass(frozen=True)
class Understood(Json):
    """A program's layout."""

    layout: Layout | None
    """None where the axes contradict one another."""
    confidence: Literal["sure", "likely", "not sure"]
    world: int
    axes: dict[str, int]
    """Axis -> ranks."""
    groups: dict[str, tuple[tuple[int, ...], ...]]
    """Axis -> its groups of ranks."""
    micro_batches: int | None
    """Per step; None where nothing shows it."""
    reasons: tuple[str, ...]
    """What every part of the layout was seen from."""

    def fits(self, layout: Layout) -> bool:
        return self.layout == layout


def steady_calls(recording: RankRecording) -> list[Call]:
    """Calls of one step in the middle of a run, between two optimizer steps; without steps, all calls."""
    last = len(recording.steps) - 1
    if last < 1:
        return list(recording.calls)
    return [call for call in recording.calls if call.step == min(2, last)]


def understand(recordings: Sequence[RankRecording]) -> Understood:
    """The layout that the calls of a steady step show."""
    world = max([one.world for one in recordings] + [len(recordings)])
    calls = [call for one in recordings for call in steady_calls(one)]
    uses: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call in calls:
        if call.op not in ("send", "recv", "barrier") and len(call.group) > 1:
            uses[call.group].append(call)
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    reasons: dict[str, str] = {}
    stages: set[int] = set()
    for group, some in uses.items():
        for axis, why, stage in _uses(some, len(recordings)):
            groups[axis].add(group)
            reasons.setdefault(axis, why)
            stages |= {stage} if stage is not None else set()
    chain = _pipeline(calls, world)
    if chain:
        groups[PIPELINE], reasons[PIPELINE] = set(chain), "ranks send one another activations and gradients"
    groups = {axis: some for axis, some in groups.items() if some}
    sizes = {axis: max(len(group) for group in some) for axis, some in groups.items()}
    return _layout(recordings, world, sizes, groups, reasons, max(stages, default=0), calls)


def _uses(calls: Sequence[Call], ranks: int) -> Iterable[tuple[Axis, str, int | None]]:
    """(axis, reason, ZeRO stage) of every use that a group is put to in a step."""
    kinds: Counter[tuple[str, str, str]] = Counter()
    for call in calls:
        if call.dtype in FLOATS and max(call.inputs, call.outputs) > SMALL:
            kinds[call.engine, call.op, call.phase] += 1
    by = {engine: {(op, phase) for e, op, phase in kinds if e == engine} for engine in {e for e, _, _ in kinds}}
    for engine in ("fsdp", "deepspeed"):
        yield from _sharded(engine, by.get(engine, set()))
    if by.get("ddp", set()) & {("all_reduce", "backward")}:
        yield DATA, "DDP all-reduces gradients in the backward pass", None
    if "zero-redundancy" in by:
        yield DATA, "ZeroRedundancyOptimizer broadcasts the updated parameters", 1
    if any(phase in ("forward", "backward") for _, phase in by.get("dtensor", set())):
        yield TENSOR, "DTensor redistributes activations in the forward or the backward pass", None
    yield from _by_pattern(by.get("", set()))


def _sharded(engine: str, did: set[tuple[str, str]]) -> Iterable[tuple[Axis, str, int | None]]:
    """Uses by FSDP or DeepSpeed."""
    gathers = {phase for op, phase in did if op in ("all_gather_into", "all_gather", "broadcast")}
    scatters = {op for op, _ in did} & {"reduce_scatter", "all_to_all", "reduce"}
    name = {"fsdp": "FSDP", "deepspeed": "DeepSpeed"}[engine]
    if "backward" in gathers:
        yield SHARDS, f"{name} gathers parameters in the forward and again in the backward pass", 3
    elif "forward" in gathers:
        yield SHARDS, f"{name} gathers parameters once, and scatters gradients", 2 if engine == "fsdp" else 3
    elif gathers and did:
        yield SHARDS, f"{name} gathers parameters after the optimizer", 2 if scatters else 1
    elif scatters:
        yield SHARDS, f"{name} scatters gradients", 2
    if ("all_reduce", "backward") in did and not gathers:
        yield DATA, f"{name} all-reduces gradients", None


def _by_pattern(did: set[tuple[str, str]]) -> Iterable[tuple[Axis, str, int | None]]:
    """Uses by the program itself, or by an engine that the recording does not name."""
    gathers = {phase for op, phase in did if op == "all_gather_into"}
    if ("reduce_scatter", "backward") in did and gathers:
        stage = 3 if "backward" in gathers else 2 if "forward" in gathers else 1
        yield SHARDS, "parameters are gathered, gradients scattered in the backward pass", stage
    elif ("all_reduce", "forward") in did:
        yield TENSOR, "activations are all-reduced in the forward pass", None
    elif ("all_reduce", "backward") in did:
        yield DATA, "gradients are all-reduced in the backward pass", None
    elif ("all_reduce", "") in did:
        yield DATA, "gradients are all-reduced after the backward pass", None


def _pipeline(calls: Iterable[Call], world: int) -> list[tuple[int, ...]]:
    """Chains of ranks that send one another floating-point messages."""
    near: dict[int, set[int]] = defaultdict(set)
    for call in calls:
        if call.op in ("send", "recv") and call.peer is not None and call.dtype in FLOATS:
            near[call.rank].add(call.peer)
            near[call.peer].add(call.rank)
    chains, left = [], set(near)
    while left:
        chain, edge = set(), {min(left)}
        while edge:
            chain |= edge
            edge = {other for rank in edge for other in near[rank]} - chain
        chains.append(tuple(sorted(chain)))
        left -= chain
    return chains


def _layout(
    recordings: Sequence[RankRecording], world: int, sizes: dict[str, int], groups: dict[str, Any],
    reasons: dict[str, str], stage: int, calls: Sequence[Call],
) -> Understood:  # fmt: skip
    """The layout of these axes."""
    shard, replicas = sizes.get(SHARDS, 1), sizes.get(DATA, 1)
    if groups.get(DATA) and groups.get(DATA) == groups.get(SHARDS):
        replicas = 1
    keys: dict[str, Any] = {DATA: shard * replicas, TENSOR: sizes.get(TENSOR, 1), PIPELINE: sizes.get(PIPELINE, 1)}
    if stage:
        keys["zero"] = stage
        if shard > 1 and replicas > 1:
            keys[SHARDS] = shard
    pipeline = next((one.pipeline for one in recordings if one.pipeline), None)
    if keys[PIPELINE] > 1:
        keys |= _schedule(pipeline, calls, max(groups[PIPELINE], key=len), reasons)
    keys["precision"] = _precision(recordings, calls)
    product = keys[DATA] * keys[TENSOR] * keys[PIPELINE]
    try:
        layout = Layout.parse(",".join(f"{key}={value}" for key, value in keys.items()))
    except LayoutError as error:
        layout, reasons["layout"] = None, str(error)
    regular = all(len({len(group) for group in some}) == 1 for some in groups.values())
    if layout is None or product != world:
        reasons["world"] = f"the axes make {product} of {world} ranks"
        confidence: Literal["sure", "likely", "not sure"] = "not sure"
    else:
        grouped = {group for some in groups.values() for group in some}
        large = [c for c in calls if c.dtype in FLOATS and max(c.inputs, c.outputs) > SMALL]
        named = all(c.engine for c in large if c.group in grouped or c.op in ("send", "recv"))
        confidence = "sure" if regular and named and min(len(one.steps) for one in recordings) > 1 else "likely"
    ordered = {axis: tuple(sorted(some)) for axis, some in groups.items()}
    micro = pipeline[1] if pipeline else None
    return Understood(
        layout, confidence, world, sizes, ordered, micro, tuple(f"{a}: {why}" for a, why in reasons.items())
    )


def _schedule(
    pipeline: tuple[str, int, int] | None, calls: Sequence[Call], chain: tuple[int, ...], reasons: dict[str, str]
) -> dict[str, Any]:
    """Keys of a pipeline's schedule: torch's object says it, else the order of the last stage's messages does."""
    if pipeline is not None and pipeline[0] in SCHEDULES:
        reasons["schedule"] = f"the program has torch's {pipeline[0]}"
        return {"schedule": SCHEDULES[pipeline[0]]} | ({"virtual": pipeline[2]} if pipeline[2] > 1 else {})
    messages = [call.op for call in calls if call.rank == chain[-1] and call.op in ("send", "recv")]
    first = messages.index("send") if "send" in messages else len(messages)
    if 0 < first == messages.count("recv") > 2:
        reasons["schedule"] = "the last stage receives every micro-batch before it sends a gradient"
        return {"schedule": "gpipe"}
    reasons["schedule"] = "the last stage sends a gradient before it receives every micro-batch"
    return {"schedule": "1f1b"}


def _precision(recordings: Sequence[RankRecording], calls: Sequence[Call]) -> str:
    """Type of parameters as they are gathered or stored; autocast does not show in what is sent."""
    gathered = Counter(c.dtype for c in calls if c.engine == "fsdp" and c.op == "all_gather_into")
    stored = Counter(row[2] for one in recordings if one.model for row in one.model[3])
    sent = Counter(call.dtype for call in calls if call.dtype in FLOATS and max(call.inputs, call.outputs) > SMALL)
    most = next((some.most_common(1)[0][0] for some in (gathered, stored, sent) if some), "float32")
    return {"float64": "fp64", "float32": "fp32"}.get(most, "bf16")
