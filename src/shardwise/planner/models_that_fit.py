"""Models of the catalog that fit one device with so much memory: to generate with, and to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.cluster import Cluster, Device, Link
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog
from shardwise.model.lora import Lora
from shardwise.model.parameters import count
from shardwise.planner.runnable import space_for
from shardwise.planner.serving import TYPES, least_bytes
from shardwise.planner.shortfall import fits
from shardwise.predict.memory.capacity import room_of
from shardwise.report.room import DeviceRoom

LENGTH = 2048
"""Tokens of the one sequence."""
ADAPTERS = "rank=16"
KINDS = {"bfloat16": "generate bf16", "int8": "int8", "int4": "int4", "lora": "train LoRA r16", "full": "train"}
"""Ways to use a model -> words."""
BYTES = {"lora": 2, "full": 14}
"""Bytes per parameter that training needs at least."""
LEANEST = {"recompute": "full", "micro": 1}


@dataclass(frozen=True)
class ModelFit:
    """One model, and the bytes that each of `KINDS` needs where it fits; adapters for experts there are none."""

    name: str
    parameters: int
    held: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "parameters": self.parameters,
            "bytes": {kind: self.held.get(kind) for kind in KINDS},
        }


def models_that_fit(memory: int) -> list[ModelFit]:
    """The models that fit in some way, largest first. Raises `UserError` where none does."""
    unknown = Link(None, None)
    cluster = Cluster(1, 1, Device("device", "cuda", memory, None), unknown, unknown)
    room = room_of(cluster)
    sizes = ((name, model, count(model)) for name, model in catalog().items())
    rows = [
        ModelFit(name, params, _held(model, cluster, room)) for name, model, params in sizes if params < room.usable
    ]
    fitting = [row for row in rows if row.held]
    if not fitting:
        raise UserError("no model of the catalog fits so little memory; the smallest are tiny ones of `list models`")
    return sorted(fitting, key=lambda row: (-row.parameters, row.name))


def _held(model: ModelConfig, cluster: Cluster, room: DeviceRoom) -> dict[str, float]:
    length = min(LENGTH, model.max_positions)
    held = {kind: least_bytes(model, length, kind) for kind in KINDS if kind in TYPES and not model.why_not_runnable()}
    step = Workload(length, 1)
    ways = {"full": model} | ({} if model.experts else {"lora": model.replace(lora=Lora.parse(ADAPTERS))})
    for kind, trained in ways.items():
        if count(model) * BYTES[kind] > room.safe:
            continue
        if found := fits(space_for(trained, cluster, step, None, LEANEST)[0], room.safe):
            held[kind] = found.nbytes
    return {kind: nbytes for kind, nbytes in held.items() if nbytes <= room.usable}
