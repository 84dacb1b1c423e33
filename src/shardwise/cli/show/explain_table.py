"""Effects of a configuration on a model: memory and traffic of a step, or what fits a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop import Reading
from shardwise.layout import Workload, check
from shardwise.layout.optimizers import DEFAULT
from shardwise.model import ModelConfig
from shardwise.report import StepReport
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes

PROFILES = {"Megatron-LM": "megatron-bridge"}
"""Engine whose configuration is read -> the profile that stands for it in `predict.time`."""


@dataclass(frozen=True)
class Training:
    """One step. report: what it holds and moves; None where nothing prices the layout yet, for the reason `why`."""

    model: ModelConfig
    report: StepReport | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "report": self.report.to_json() if self.report else None,
            "not_estimated": self.why or None,
        }

    def lines(self, cluster: Cluster | None) -> list[Renderable]:
        """Printed tables and texts."""
        if self.report is None:
            return [f"What it will do with {self.model.name} is not priced: {self.why}"]
        from shardwise.predict.memory.capacity import explained, try_room
        from shardwise.predict.tables import timing_lines
        from shardwise.report.tables import memory_table

        moved = [f"  {line}" for line in _moved(self.report)]
        tokens = self.report.workload["seq"] * self.report.workload["batch"]
        return [
            f"What a step of {self.model.name} takes:",
            memory_table(self.report, try_room(cluster, "other", bool(self.model.experts))),
            *([line] if cluster and (line := explained(cluster)) else []),
            *([f"Collectives of rank {self.report.roles[0].ranks[0]} in a step:", *moved] if moved else []),
            *timing_lines(self.report, cluster, tokens),
            *(f"  {note}" for note in self.report.notes),
        ]


@dataclass(frozen=True)
class CacheRoom:
    """Memory of one GPU of a server that is left for the cache. weights: bytes; a_token: bytes of its cache for a
    token; room: bytes that are left for the cache; tokens: that fit there, over the sequences of an engine; None where
    no cluster tells. length: tokens of the longest sequence. sequences: the most of one iteration."""

    model: ModelConfig
    weights: float
    a_token: float
    room: float | None
    tokens: int | None
    length: int | None
    sequences: int | None
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "weight_bytes_per_gpu": self.weights,
            "cache_bytes_per_token_per_gpu": self.a_token,
            "cache_bytes_per_gpu": self.room,
            "cache_tokens": self.tokens,
            "warning": self.warning or None,
            "longest_sequences": self.tokens // self.length if self.tokens is not None and self.length else None,
        }

    def lines(self, cluster: Cluster | None) -> list[Renderable]:
        """Printed lines."""
        results: list[Renderable] = [
            f"What it will do with {self.model.name}, on each GPU:",
            f"  {format_bytes(self.weights)} of weights, {format_bytes(self.a_token)} of cache for a token of a "
            "sequence",
        ]
        if self.room is None or self.tokens is None:
            return [*results, "  how much cache there is room for, --cluster tells"]
        results.append(
            f"  {format_bytes(self.room)} left for the cache, workspace and graphs apart: {self.tokens:,} tokens"
        )
        results += [self.warning] if self.warning else []
        if self.length:
            results.append(f"  at most {self.tokens // self.length:,} sequences of {self.length:,} tokens at a time")
        if self.sequences:
            results.append(
                f"  {self.sequences:,} sequences at a time have {self.tokens // self.sequences:,} tokens each"
            )
        return results


def training(reading: Reading, model: ModelConfig, cluster: Cluster | None) -> Training:
    """Memory, traffic and time of a step, the time where there is a profile of the engine. Raises `UserError` where the
    layout does not suit the model, the batch or the cluster."""
    from shardwise.predict import estimate
    from shardwise.predict.memory.engine_settings import EngineSettings
    from shardwise.predict.traffic.slow_links import tensor_warning
    from shardwise.report.timing_table import binding

    if reading.unpriced:
        return Training(model, None, reading.unpriced)
    assert reading.seq and reading.batch
    workload = Workload(seq=reading.seq, batch=reading.batch, optimizer=reading.optimizer or DEFAULT)
    check(reading.layout, model, workload, cluster.devices if cluster else None)
    try:
        engine = PROFILES.get(reading.engine)
        settings = EngineSettings(modules=reading.recomputed)
        report = estimate(model, reading.layout, workload, cluster, engine=engine, settings=settings)
        parts = report.timing["parts"] if report.timing else {}
        slow = tensor_warning(cluster, reading.layout.tp, parts, "the step") if cluster else None
        report = replace(report, notes=(*([slow] if slow else []), *report.notes))
        if engine is None and report.timing:
            note = f"no time of a step: there is no profile of what {reading.engine} overlaps and fuses"
            bound = (f"as shardwise would run it, {line}" for line in binding(report.timing))
            report = replace(report, time=None, timing=None, notes=(*report.notes, *bound, note))
        return Training(model, report)
    except UserError as error:
        return Training(model, None, str(error))


def serving(reading: Reading, model: ModelConfig, cluster: Cluster | None) -> CacheRoom:
    """Room for the cache. Raises `UserError` where the heads cannot be split so, and where the weights alone do not
    fit."""
    from shardwise.predict.time.serving import ServingLayout, cache_bytes_per_token, weight_bytes
    from shardwise.predict.traffic.slow_links import tensor_warning

    assert reading.served
    served, layout = reading.served, reading.layout
    check(replace(layout, ep=1), model)
    stored = ServingLayout(served.weights, served.cache, layout.tp, layout.pp)
    weights, a_token = float(weight_bytes(model, stored)), float(cache_bytes_per_token(model, stored)) / layout.pp
    length = served.length or model.max_positions
    memory = cluster.memory_per_device if cluster else None
    if memory is None:
        return CacheRoom(model, weights, a_token, None, None, length, served.sequences)
    room = memory * served.memory - weights
    slow = tensor_warning(cluster, layout.tp, {}, "") if cluster else None
    if room <= a_token:
        raise UserError(
            f"{model.name} does not fit: {format_bytes(weights)} of weights on each GPU, of which {served.memory:.0%} "
            f"of {format_bytes(memory)} may be used; split it over more GPUs, or store it in fewer bits"
        )
    return CacheRoom(model, weights, a_token, room, int(room / a_token), length, served.sequences, slow or "")


def _moved(report: StepReport) -> list[str]:
    """The collectives of the first role by phase and axes, a line each."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in report.roles[0].ledger:
        if row.elements > 1:
            result = sums.setdefault((row.phase, row.op, row.axes), [0, 0])
            result[0] += row.count
            result[1] += row.payload_bytes
    return [
        f"{phase}: {count:,} {op.removesuffix('_into')} over {axes}, {format_bytes(payload)} in all"
        for (phase, op, axes), (count, payload) in sums.items()
    ]
