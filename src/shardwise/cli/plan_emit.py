"""`plan --emit`: the best layout that an engine can express, as its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise import interop
from shardwise.cli.models import config_of_trace
from shardwise.cluster import Cluster
from shardwise.errors import UserError, os_errors
from shardwise.layout import Layout, Workload
from shardwise.layout.keys import defaults
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, hub_name
from shardwise.model.hub import full_id
from shardwise.model.parameters import Model
from shardwise.predict.memory.capacity import room_of
from shardwise.predict.time.profiles import ENGINES
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.report.terminal import Verbatim
from shardwise.report.units import format_bytes

if TYPE_CHECKING:
    from shardwise.interop import EngineFile, EngineSpec, WriteRequest
    from shardwise.planner.disaggregated import Disaggregated


def check_emit(args: Any) -> None:
    """Raise `UserError` for --emit with what has no layout, for an unknown engine, one of the other kind, or a model
    that the engine does not load by name."""
    if args.emit is None:
        if args.out is not None and (args.serve or args.find):
            raise UserError("--out writes a training plan, or the file of --emit: leave it out")
        return
    from shardwise.interop.writing.writer import writer_for

    writer = writer_for(args.emit)
    if writer.serves != args.serve:
        instead = "add --serve" if writer.serves else "leave out --serve"
        raise UserError(f"--emit {args.emit}: {writer.title} {'serves' if writer.serves else 'trains'}; {instead}")
    check_name(args, writer)


def check_name(args: Any, writer: EngineSpec) -> None:
    """Raise `UserError` where an engine loads MODEL by a name, and the sizes are not that model's."""
    if writer.loads_model and (args.set or (args.model and not source_of(args.model))):
        how = "which --set changes" if args.set else "and this one is changed"
        raise UserError(f"{writer.title} loads the model by its name, {how}: give a folder with it")


def profile_of(args: Any) -> str | None:
    """The profile that prices a plan: of --engine, which may name an engine that `emit` writes for, else of --emit;
    None for the usual one."""
    if args.engine is None and not args.emit:
        return None
    if args.engine is None:
        return interop.WRITERS[args.emit or ""].profile
    written = args.engine in interop.WRITERS and args.engine not in ENGINES
    return interop.WRITERS[args.engine].profile if written else str(args.engine)


def profile_for(args: Any, model: Model) -> str | None:
    """`profile_of`, or that of unknown software where an engine that `emit` writes for runs the model's experts, and
    the version that its profile was measured with did not."""
    name = profile_of(args)
    if not name or not model.experts:
        return name
    written = {interop.WRITERS[one].profile for one in (args.emit, args.engine) if one in interop.WRITERS}
    return "unknown" if args.emit and name in written and not engine_of(name).features.experts else name


def written_model(args: Any, model: Model) -> Model:
    """What a file describes: the configuration of a traced class."""
    return (config_of_trace(args.model) if args.model else None) or model


def refusals(args: Any, model: Model, cluster: Cluster, workload: Workload) -> Callable[[bool, Layout], str] | None:
    """Why the engine of --emit does not run a layout, for the search: what it cannot express, or the memory that it
    needs, of a device's room with its margin or without; None where nothing is to be written. Raises `UserError` for an
    engine that does not take the model at all."""
    if not args.emit:
        return None
    from shardwise.cli.show.explain_table import CODE_KEYS, counted_as
    from shardwise.interop.writing.writer import forced_layout, writer_for
    from shardwise.interop.writing.writer import refusals as inexpressible
    from shardwise.planner.exact import ExactMemory

    writer, model = writer_for(args.emit), written_model(args, model)
    why_not_expressed = inexpressible(writer, model)
    room = room_of(cluster, writer.profile, bool(model.experts), args.reserve)

    @cache
    def memory(engine: str) -> ExactMemory:
        return ExactMemory(model, workload, cluster, engine=engine)

    @cache
    def why_not(margin: bool, layout: Layout) -> str:
        if reason := why_not_expressed(layout):
            return reason
        written, usable = forced_layout(writer, layout, model, searched=False), room.safe if margin else room.usable
        read = replace(written, **defaults(*(key for key in writer.left if key not in CODE_KEYS)))
        held = memory(counted_as(writer.title, read) or "").total(read, usable)
        if held <= usable:
            return ""
        return f"{writer.title} needs {format_bytes(held)} per device, and {format_bytes(usable)} may be used"

    return why_not


def source_of(model: str | ModelConfig) -> str:
    """MODEL as an engine loads it: a path as it is typed; of the catalog, the hub's name where that is known; "" of a
    configuration that has been changed."""
    if not isinstance(model, str):
        model = model.name if catalog().get(model.name) == model else ""
    if (name := model.strip().lower()) in catalog():
        return hub_name(name)
    return model if os.path.exists(model) else full_id(model)  # noqa: PTH110 (no error for a name that is too long)


def best_file(engine: str, requests: Sequence[WriteRequest]) -> tuple[EngineFile, str]:
    """The file of the first request that the engine expresses and, if it serves, has memory for; and why it does not
    write the very first, "" where it does. Raises `UserError` with that reason where none is written."""
    reason = ""
    for request in requests:
        try:
            return interop.write(engine, _within_cache(engine, request)), reason
        except UserError as error:
            reason = reason or str(error)
    raise UserError(f"none of the {len(requests)} best layouts can be written (more with --top): {reason}")


def _within_cache(engine: str, request: WriteRequest) -> WriteRequest:
    """A server with as many sequences as the engine has a cache for, all of the greatest length, which is fewer where
    another engine's memory was planned. Raises `UserError` where not one fits."""
    from shardwise.cli.show.explain_table import serving

    title, served = interop.WRITERS[engine].title, request.served
    if served is None:
        return request
    assert served.sequences and served.length and isinstance(request.model, ModelConfig)
    tokens = serving(interop.Reading(title, request.layout, served=served), request.model, request.cluster).tokens
    most = served.sequences if tokens is None else tokens // served.length
    if most >= served.sequences:
        return request
    note = f"{most} sequences at a time in place of {served.sequences}: {title}'s cache has room for {tokens:,} tokens"
    return replace(request, served=replace(served, sequences=most), notes=(*request.notes, note))


def emitted(args: Any, requests: Sequence[WriteRequest]) -> tuple[dict[str, Any], Iterator[str]]:
    """({"emitted": ...} for --json, lines), both empty without --emit. Writes --out."""
    if args.emit is None:
        return {}, iter(())
    named = [replace(request, source=source_of(args.model or "")) for request in requests]
    return _emitted(args.out, *best_file(args.emit, named))


def _emitted(out: str | None, file: EngineFile, reason: str) -> tuple[dict[str, Any], Iterator[str]]:
    if out:
        with os_errors(f"write {out}"):
            Path(out).write_text(file.text, encoding="utf-8")
    return {"emitted": file.to_json() | {"out": out, "why_not_the_best": reason or None}}, _lines(out, file, reason)


def emitted_apart(
    args: Any, pair: Disaggregated | None, requests: Sequence[WriteRequest]
) -> tuple[dict[str, Any], Iterator[str]]:
    """`emitted` for --disaggregated: the script that starts all instances. requests: of a server. Raises `UserError`
    where no two instances fit."""
    from shardwise.interop.writing.disaggregated import write_apart

    if pair is None:
        raise UserError("--disaggregated: no two instances fit together; leave it out")
    request = replace(requests[0], source=source_of(args.model or ""))
    file = write_apart(args.emit, request, pair.prefill, pair.decode, pair.batch)
    return _emitted(args.out, file, "")


def _lines(out: str | None, file: EngineFile, reason: str) -> Iterator[str]:
    yield ""
    if reason:
        yield f"the best layout cannot be written: {reason}"
        yield f"written in its place: {file.layout}"
    if not out:
        yield f"{file.file}:"
        yield Verbatim(file.text)
        return
    yield f"{out}: {file.layout} for {file.layout.ranks} ranks"
    yield from (f"  {line}" for line in file.comments)
