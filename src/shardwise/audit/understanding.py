"""The layout of a recorded program: axes from its groups, the ZeRO stage, tensor parallelism and the pipeline from what
every group does in one step. A recording that names the engine of a call decides; else the pattern does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.audit.axes import DATA, FLOATS, PIPELINE, SHARDS, SMALL, TENSOR, uses
from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.reading import RankRecording
from shardwise.codec import Json
from shardwise.errors import LayoutError
from shardwise.layout import Layout

SCHEDULES = {
    "ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "breadth-first", "ScheduleZBVZeroBubble": "zb-v", "ScheduleDualPipeV": "dualpipe-v",
}  # fmt: skip
"""torch's class -> our name."""


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

    @property
    def axes_of(self) -> dict[tuple[int, ...], str]:
        """Group of collectives -> its axis."""
        return {group: axis for axis, groups in self.groups.items() for group in groups if axis != PIPELINE}


def steady_step(recording: RankRecording) -> int:
    """Number of a step in the middle of a run, from 0."""
    return max(0, min(2, len(recording.steps) - 1))


def steady_calls(recording: RankRecording) -> list[Call]:
    """Calls of that step, between two optimizer steps; without two steps, all calls."""
    step = steady_step(recording)
    return [call for call in recording.calls if call.step == step or not step]


def understand(recordings: Sequence[RankRecording]) -> Understood:
    """The layout that the calls of a steady step show."""
    world = max([one.world for one in recordings] + [len(recordings)])
    calls = [call for one in recordings for call in steady_calls(one)]
    by_group: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call in calls:
        if call.op not in (*MESSAGES, "barrier") and len(call.group) > 1:
            by_group[call.group].append(call)
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    reasons: dict[str, str] = {}
    stages: set[int] = set()
    for group, some in by_group.items():
        for axis, why, stage in uses(some):
            groups[axis].add(group)
            reasons.setdefault(axis, why)
            stages |= {stage} if stage is not None else set()
    chain = _pipeline(calls, world)
    if chain:
        groups[PIPELINE], reasons[PIPELINE] = set(chain), "ranks send one another activations and gradients"
    groups = {axis: some for axis, some in groups.items() if some}
    sizes = {axis: max(len(group) for group in some) for axis, some in groups.items()}
    return _layout(recordings, world, sizes, groups, reasons, max(stages, default=0), calls)


def _pipeline(calls: Iterable[Call], world: int) -> list[tuple[int, ...]]:
    """Chains of ranks that send one another floating-point messages."""
    near: dict[int, set[int]] = defaultdict(set)
    for call in calls:
        if call.op in MESSAGES and call.peer is not None and call.dtype in FLOATS:
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
    shard, replicas = sizes.get(SHARDS, 1), sizes.get(DATA, 1)
    if groups.get(DATA) and groups.get(DATA) == groups.get(SHARDS):
        replicas = 1
    known = next((one.zero for one in recordings if one.zero), None)
    if stage and known is not None:
        # With one micro-batch, stages 1 and 2 may make the same calls.
        stage, reasons["zero"] = known, f"DeepSpeed's engine has stage {known}"
    keys: dict[str, Any] = {DATA: shard * replicas, TENSOR: sizes.get(TENSOR, 1), PIPELINE: sizes.get(PIPELINE, 1)}
    if stage:
        keys["zero"] = stage
        if shard > 1 and replicas > 1:
            keys[SHARDS] = shard
    summed = (call for call in calls if call.op == "reduce_scatter" and call.phase == "forward")
    if scattered := any(call.group in groups.get(TENSOR, ()) for call in summed):
        reasons["sp"] = "activations are scattered in the forward pass"
    keys["sp"] = int(scattered)
    pipeline = next((one.pipeline for one in recordings if one.pipeline), None)
    if keys[PIPELINE] > 1:
        keys |= _schedule(pipeline, calls, max(groups[PIPELINE], key=len), reasons)
    # Type of parameters as they are gathered or stored; autocast does not show in what is sent.
    gathered = Counter(c.dtype for c in calls if c.engine == "fsdp" and c.op == "all_gather_into")
    stored = Counter(row[2] for one in recordings if one.model for row in one.model[3])
    sent = Counter(call.dtype for call in calls if call.dtype in FLOATS and max(call.inputs, call.outputs) > SMALL)
    most = next((some.most_common(1)[0][0] for some in (gathered, stored, sent) if some), "float32")
    keys["precision"] = {"float64": "fp64", "float32": "fp32"}.get(most, "bf16")
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
        named = all(c.engine for c in large if c.group in grouped or c.op in MESSAGES)
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
    messages = [call.op for call in calls if call.rank == chain[-1] and call.op in MESSAGES]
    first = messages.index("send") if "send" in messages else len(messages)
    if 0 < first == messages.count("recv") > 2:
        reasons["schedule"] = "the last stage receives every micro-batch before it sends a gradient"
        return {"schedule": "gpipe"}
    reasons["schedule"] = "the last stage sends a gradient before it receives every micro-batch"
    return {"schedule": "1f1b"}
