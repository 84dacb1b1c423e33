"""Axes of parallelism from the groups of a program's calls, and what each axis is used for."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from shardwise.audit.calls import Call
from shardwise.codec import Json
from shardwise.layout.axes import DP, PP, SHARD, TP

(DATA,), (SHARDS,), (TENSOR,), (PIPELINE,) = DP, SHARD, TP, PP
"""Ranks of a group are replicas whose gradients are summed, or share a state, an operation, a model."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
SMALL = 64
"""Bytes up to which a call is a scalar: a norm, a loss, a count."""


@dataclass(frozen=True)
class Axis(Json):
    """Groups of one size and stride, such as (0, 2) and (1, 3)."""

    size: int
    stride: int
    """Between ranks of a group; 0 where it varies."""
    groups: int
    calls: Mapping[str, float]
    """Operation -> calls per rank of the groups."""
    nbytes: Mapping[str, float]
    """Operation -> bytes that a rank gives, all calls."""
    guess: str
    """Use that the calls' passes show; "" where they are not known."""


def uses(calls: Iterable[Call]) -> Iterator[tuple[str, str, int | None]]:
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


def _sharded(engine: str, did: set[tuple[str, str]]) -> Iterator[tuple[str, str, int | None]]:
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
    if {("all_reduce", "backward"), ("all_reduce", "")} & did and not gathers:  # DeepSpeed's stage 0: after backward
        yield DATA, f"{name} all-reduces gradients", None


def _by_pattern(did: set[tuple[str, str]]) -> Iterator[tuple[str, str, int | None]]:
    """Uses by the program itself, or by an engine that the recording does not name."""
    gathers = {phase for op, phase in did if op == "all_gather_into"}
    if ("reduce_scatter", "forward") in did:  # sequence parallelism, whose backward pass looks like ZeRO's
        yield TENSOR, "activations are summed in the forward pass", None
    elif ("reduce_scatter", "backward") in did and gathers:
        stage = 3 if "backward" in gathers else 2 if "forward" in gathers else 1
        yield SHARDS, "parameters are gathered, gradients scattered in the backward pass", stage
    elif ("all_reduce", "forward") in did:
        yield TENSOR, "activations are summed in the forward pass", None
    elif ("all_reduce", "backward") in did:
        yield DATA, "gradients are all-reduced in the backward pass", None
    elif ("all_reduce", "") in did:
        yield DATA, "gradients are all-reduced after the backward pass", None


def axes(calls: Iterable[Call]) -> list[Axis]:
    """The axes of all ranks' calls, the busiest first."""
    rows: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        steps = {b - a for a, b in pairwise(call.group)}
        rows[len(call.group), steps.pop() if len(steps) == 1 else 0].append(call)
    result = []
    for (size, stride), made in rows.items():
        if size == 1:
            continue
        ranks = len({call.rank for call in made})
        counts, total = Counter(call.op for call in made), Counter[str]()
        for call in made:
            total[call.op] += call.inputs
        result.append(
            Axis(
                size, stride, len({call.group for call in made}), {op: n / ranks for op, n in counts.items()},
                {op: n / ranks for op, n in total.items()},
                next((why for _, why, _ in uses(made)), "") if any(call.phase for call in made) else "",
            )
        )  # fmt: skip
    return sorted(result, key=lambda axis: -sum(axis.nbytes.values()))
