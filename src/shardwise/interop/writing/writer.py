"""`write`: a layout as an engine's configuration."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import LayoutError, UserError, did_you_mean
from shardwise.interop.spec import EngineSpec, writers
from shardwise.interop.writing.canonical import canonical
from shardwise.interop.writing.engine_writer import write_as
from shardwise.interop.writing.limits import Limit, first_broken, nearest
from shardwise.interop.writing.request import EngineFile, WriteRequest
from shardwise.layout import Layout, check
from shardwise.layout.legality import check_served
from shardwise.model import ModelConfig

WRITERS: dict[str, EngineSpec] = writers()
"""Name -> engine that layouts are written for."""


def writer_for(name: str) -> EngineSpec:
    """The engine of that name. Raises `UserError` with the nearest name."""
    if name not in WRITERS:
        raise UserError(f"no engine {name!r}; {did_you_mean(name, WRITERS, 'there are')}")
    return WRITERS[name]


def write(engine: str, request: WriteRequest) -> EngineFile:
    """The configuration of an engine for a layout.

    Raises `UserError` for an engine or a version that there is not, for training with a server's numbers and the
    reverse, for a layout that the model does not allow, and for what the engine cannot express, with the nearest layout
    that it can. A key of which it has one value gets that, with a comment.
    """
    writer = writer_for(engine)
    request = replace(request, version=_version(writer, request.version))
    _check_kind(writer, request)
    _check_layout(request.layout, request)
    if reason := writer.objection(request.model):
        raise UserError(f"{writer.title} cannot express {request.model.name}: {reason}")
    given = canonical(request.layout, request.model)
    request = replace(request, layout=canonical(replace(given, **writer.fixed), request.model))
    _check_limits(writer, request)
    version = f" {request.version}" if request.version else ""
    head = f"{writer.title}{version}: {request.model.name}, layout {request.layout}, {request.layout.ranks} ranks"
    forced = [f"{key}={getattr(request.layout, key)} in place of {getattr(given, key)}: {writer.title} has no other"
              for key in writer.fixed if getattr(request.layout, key) != getattr(given, key)]  # fmt: skip
    text, every = write_as(writer, request, [head, *request.notes, *forced, *writer.left_to_code(request.layout)])
    return EngineFile(
        engine,
        request.version,
        request.layout,
        writer.files.get(request.version, writer.file),
        text,
        tuple(every[1:]),
    )


def _check_layout(layout: Layout, request: WriteRequest) -> None:
    if request.served is not None:
        check_served(layout, request.model)
    else:
        check(layout, request.model, request.workload if request.workload.batch else None)


def nearest_layout(engine: str, request: WriteRequest) -> Layout | None:
    """The layout nearest to the request's that an engine expresses and the model allows; None where repairs of its
    keys lead to none."""
    layout = nearest(writer_for(engine).bounds, canonical(request.layout, request.model), request.model)
    if layout is None:
        return None
    try:
        _check_layout(layout, request)
    except UserError:
        return None
    return canonical(layout, request.model)


def why_not_written(writer: EngineSpec, layout: Layout, model: ModelConfig) -> str:
    """What of a layout or its model an engine cannot express, and why; empty where it expresses all."""
    if reason := writer.objection(model):
        return f"not {model.name}: {reason}"
    limit = first_broken(writer.bounds, canonical(layout, model), model)
    return f"not {_said(limit, layout)}: {limit.why}" if limit else ""


def _said(limit: Limit, layout: Layout) -> str:
    value = getattr(layout, limit.key)
    return limit.key if value is True else f"{limit.key}={value}"


def _version(writer: EngineSpec, version: str) -> str:
    if version and version not in writer.versions:
        known = ", ".join(filter(None, writer.versions))
        hint = f"known are {known}" if known else "its files are the same for all that are known: leave it out"
        raise UserError(f"no version {version!r} of {writer.title}; {hint}")
    return version or writer.versions[0]


def _check_kind(writer: EngineSpec, request: WriteRequest) -> None:
    if writer.serves and request.workload.batch:
        raise UserError(
            f"{writer.title} serves: give --prompt, --output and --concurrency in place of --seq and --batch"
        )
    if not writer.serves and request.served is not None:
        raise UserError(
            f"{writer.title} trains: give --seq and --batch in place of --prompt, --output and --concurrency"
        )
    if not writer.serves and not request.workload.batch:
        raise UserError(f"{writer.title} trains and needs --seq and --batch")
    if request.workload.optimizer not in writer.optimizers:
        known = ", ".join(writer.optimizers)
        raise UserError(f"{writer.title} cannot express optimizer={request.workload.optimizer}; it has {known}")


def _check_limits(writer: EngineSpec, request: WriteRequest) -> None:
    limit = first_broken(writer.bounds, request.layout, request.model)
    if limit is None:
        return
    other = nearest_layout(writer.name, request)
    hint = f"nearest that it can: {other}" if other else "change that key: no layout near it suits model and batch"
    raise LayoutError(f"{writer.title} cannot express {_said(limit, request.layout)}: {limit.why}; {hint}")
