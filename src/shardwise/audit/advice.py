"""What `plan` would do in place of a recorded layout, by how much, and the settings of the program's engine for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.audit.reading import RankRecording
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop import WRITERS, WriteRequest, write
from shardwise.interop.writing.writer import refusals
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.huggingface import read_fields
from shardwise.planner.plan import Plan, plan
from shardwise.predict.estimate import estimate
from shardwise.report.units import format_time

_WRITERS = {"deepspeed": "deepspeed", "megatron": "megatron", "fsdp": "fsdp2", "dtensor": "fsdp2", "ddp": "ddp"}
"""Engine of recorded calls -> the one whose configuration is written; the first that the program has."""
_GIVEN = ("model", "seq_length")
"""Settings that the request says."""
_SETTINGS = 12
"""Changed settings that are shown."""


@dataclass(frozen=True)
class AdviceRequest:
    """Where a program would run, and on what."""

    cluster: Cluster
    seq: int
    batch: int
    model: ModelConfig | None = None
    """None: the program's, whose configuration the recording may have."""


def advice(request: AdviceRequest, recordings: Sequence[RankRecording], layout: Layout | None) -> Iterator[str]:
    """Lines: the plan beside the recorded layout, and settings. A reason where there is none."""
    config = next((one.model[2] for one in recordings if one.model and one.model[2]), None)
    if request.model is None and config is None:
        yield "none: the program's model is not known: give --model NAME beside --cluster"
        return
    try:
        model = request.model or read_fields(config or {}, "the program's model")
        best = _best(model, request)
    except UserError as error:
        yield f"none: {error}"
        return
    seconds, why = _seconds(best, model, request, layout)
    if best.winner.layout == layout:
        yield f"{layout} is plan's best for {request.cluster}, too"
        return
    yield f"plan's best for {request.cluster}: {_timed(best, layout, seconds)}{why}"
    engines = {call.engine for one in recordings for call in one.calls}
    named = next((writer for engine, writer in _WRITERS.items() if engine in engines), "fsdp2")
    for name in dict.fromkeys((named, "fsdp2") if named == "ddp" else (named,)):
        yield from _with_engine(name, model, request, layout, seconds)


def _best(model: ModelConfig, request: AdviceRequest, **more: Any) -> Plan:
    return plan(model, request.cluster, seq=request.seq, batch=request.batch, top=1, explain=False, **more)


def _seconds(best: Plan, model: ModelConfig, request: AdviceRequest, layout: Layout | None) -> tuple[float | None, str]:
    """(seconds of a step of the recorded layout, why there are none, in words)."""
    if layout is None:
        return None, ""
    if layout.ranks != request.cluster.devices:
        return None, f"; {layout} has {layout.ranks} ranks, so it is not compared"
    try:
        now = estimate(model, layout, cluster=request.cluster, seq=request.seq, batch=request.batch)
    except UserError as error:
        return None, f"; {layout} there: {error}"
    if max(role.peak_bytes for role in now.roles) > best.usable:
        return None, f"; {layout} does not fit there"
    return now.time, ""


def _timed(best: Plan, layout: Layout | None, seconds: float | None) -> str:
    text = f"{best.winner.layout}, {format_time(best.winner.seconds)} per step"
    if seconds is None:
        return text
    micro = f"micro={layout.micro}" if layout else ""  # which no recording shows
    return f"{text}, {seconds / best.winner.seconds:.2f} times as fast as {layout} ({format_time(seconds)}, {micro})"


def _with_engine(
    engine: str, model: ModelConfig, request: AdviceRequest, layout: Layout | None, seconds: float | None
) -> Iterator[str]:
    """The best layout that an engine expresses, what changes in its file, and the command that writes it."""
    writer = WRITERS[engine]
    try:
        inexpressible = refusals(writer, model)
        best = _best(model, request, refuses=lambda margin, layout: inexpressible(layout))
        changed = _settings(engine, best.winner.layout, model, request)
    except UserError as error:
        yield f"with {writer.title}: none: {error}"
        return
    try:
        before = _settings(engine, layout, model, request) if layout else []
    except UserError:
        before = []
    changed = [setting for setting in changed if setting not in before]
    more = f" and {len(changed) - _SETTINGS} more" if len(changed) > _SETTINGS else ""
    said = f": {', '.join(changed[:_SETTINGS])}{more}" if changed else ""
    yield f"with {writer.title}: {_timed(best, layout, seconds)}{said}"
    if request.model is not None:
        yield (
            f"shardwise emit {model.name} --layout {best.winner.layout} --for {engine} --cluster {request.cluster} "
            f"--seq {request.seq} --batch {request.batch}"
        )


def _settings(engine: str, layout: Layout, model: ModelConfig, request: AdviceRequest) -> list[str]:
    """Settings of an engine's file as NAME=VALUE, or the words of its command."""
    file = write(engine, WriteRequest(model, layout, Workload(request.seq, request.batch), cluster=request.cluster))
    if file.file.endswith(".sh"):
        return [" ".join(words.split()) for words in re.findall(r"--[^\\\n]+?(?= --|\\|\n|$)", file.text)]
    text = file.text.partition("SETTINGS = {")[2].partition("}")[0] or file.text
    pairs = re.findall(r'^ *"?([\w.]+)"?: ([^\[{\n]+?),?$', text, re.MULTILINE)
    return [f"{key}={value}" for key, value in pairs if key not in _GIVEN]
