"""What this project's runtime would send and hold of a layout, of a model whose parameters a recording has."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from shardwise.audit.axes import TENSOR
from shardwise.audit.reading import RankRecording
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint, Cut, Parameter, Part
from shardwise.model.operations import LinearOp, Width
from shardwise.predict.memory.step import gradient_bytes, optimizer_bytes, parameter_bytes
from shardwise.predict.traffic.ledger import weight_ledger
from shardwise.report.step_report import Bytes
from shardwise.report.units import format_bytes

_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")
"""Name of the block that a parameter is in: up to the first number."""


class PlannedRow(NamedTuple):
    """Calls of one kind in a step with one micro-batch."""

    calls: int
    elements: int
    dtype: str


@dataclass(frozen=True)
class Planned:
    """A step of one rank."""

    rows: dict[tuple[str, str, str], PlannedRow]
    """("parameters", "gradients" or "activations", phase, operation) -> what is sent."""
    bytes: Bytes
    """Parameters, gradients and AdamW's state; nothing else is known."""
    elements: int
    """Of all parameters of one tensor-parallel rank."""
    trained: dict[str, int]
    """Name -> elements of a trained parameter there."""


def planned_step(one: RankRecording, layout: Layout, tokens: int, model: ModelConfig | None = None) -> Planned | None:
    """The plan of a rank; None where its parameters are not known, or the layout does not suit them.

    tokens: of a micro-batch, for activations; 0 where they are not known. model: the program's, where the recording has
    none.
    """
    inner = replace(layout, pp=1, schedule=Layout().schedule, virtual=1)  # a recording has its stage's parameters
    described = blueprint_of(one, inner) if one.model is not None else model if layout.pp == 1 else None
    if described is None:
        return None
    try:
        plan = unit_plan(described, inner, Workload(seq=max(1, tokens), batch=inner.dp))
        rows: dict[tuple[str, str, str], PlannedRow] = {}
        for row in weight_ledger(plan):
            if row.axes == TENSOR and not tokens:
                continue
            what = "parameters" if row.op == "all_gather_into" else "gradients"
            key = "activations" if row.axes == TENSOR else what, row.phase, row.op
            before = rows.get(key, PlannedRow(0, 0, row.dtype))
            elements = before.elements + row.elements * row.count
            rows[key] = PlannedRow(before.calls + row.count, elements, row.dtype)
        held = Bytes(parameter_bytes(plan), gradient_bytes(plan), optimizer_bytes(plan))
        parameters = list(plan.blueprint.parameters())
        sizes = {p.name: p.numel // (1 if p.cut == "replicated" else inner.tp) for p in parameters}
        trained = {p.name: sizes[p.name] for p in parameters if not p.frozen}
        elements = sum(sizes.values())
        return Planned(rows, held, elements, trained) if elements else None
    except (UserError, ZeroDivisionError):
        return None


def blueprint_of(one: RankRecording, layout: Layout) -> Blueprint:
    """Blocks by the first number in names, everything else around them, and cuts by the shapes on this rank."""
    assert one.model is not None
    name, _, _, rows = one.model
    # Flat parameters of FSDP1 are shards themselves; DeepSpeed's stage 2 keeps whole ones.
    flat = layout.zero >= 2 and one.zero is None and all(shape == local for _, shape, _, _, local in rows)
    shards = layout.shard_ranks if layout.zero >= 2 else 1
    parts: dict[str, list[Parameter]] = defaultdict(list)
    maps: dict[str, list[LinearOp]] = defaultdict(list)
    for full, shape, _, trained, local in rows:
        match = _BLOCK.match(full)
        part = match[0] if match else ""
        cut: Cut = "replicated"
        if layout.tp > 1 and 0 < len(shape) < 3 and shape != local:  # FSDP may shard the first dim, too
            if len(shape) == 2 and local[1] * layout.tp == shape[1]:
                cut = "row"
            elif local[0] * shards * layout.tp < 1.5 * shape[0]:
                cut = "column"
        whole = [shape[0] * (shards if flat else 1), *shape[1:]] if shape else [1]
        sizes = (whole[0], prod(whole[1:])) if len(whole) > 1 else (whole[0],)
        within = full.removeprefix(f"{part}.") if part else full
        parts[part].append(Parameter(within, sizes, cut=cut, frozen=not trained))
        if cut != "replicated" and len(shape) == 2:
            outputs, inputs = shape
            maps[part].append(LinearOp("linear", Width(inputs, cut == "row"), (Width(outputs, cut == "column"),)))
    return Blueprint(name, 1, tuple(
        Part(part or "root", "block" if part else "root", part, tuple(some), tuple(maps[part]), 0, 0)
        for part, some in parts.items()
    ))  # fmt: skip


def beyond(held: Bytes, planned: Bytes, tensors: int) -> list[str]:
    """Classes of state that take more than the plan, in words. tensors: parameters, whose step counts are small."""
    results = []
    for name in ("parameters", "gradients", "optimizer"):
        has, due = getattr(held, name), getattr(planned, name)
        if has > 1.02 * due + 64 * tensors:
            results.append(f"{name} take {format_bytes(has)}, where the layout needs {format_bytes(due)}")
    return results
