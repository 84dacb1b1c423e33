"""`write`: a layout as an engine's configuration."""

import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from shardwise.errors import LayoutError, UserError, did_you_mean
from shardwise.interop.expressions import Names, evaluate, sentence
from shardwise.interop.reading.settings import SERVED, ServerSettings
from shardwise.interop.spec import EngineSpec, Limit, specs
from shardwise.interop.writing.canonical import DEFAULTS, canonical
from shardwise.interop.writing.formats import (
    command,
    commented,
    flag_words,
    job_words,
    program,
    tables,
    torchrun,
    with_comments,
)
from shardwise.interop.writing.request import EngineFile, WriteRequest, nodes_for
from shardwise.layout import Layout, check
from shardwise.layout.keys import SEARCHED
from shardwise.layout.legality import check_served
from shardwise.layout.modules import check_described, check_module_layout
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.options import runs_text

WRITERS: dict[str, EngineSpec] = {name: one for name, one in specs().items() if one.file}
"""Name -> engine that layouts are written for."""
_WRITTEN = {*DEFAULTS, *SERVED, "seq", "batch", "optimizer"}
"""Rows that say themselves what is written."""


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
    if request.version and request.version not in writer.versions:
        known = ", ".join(filter(None, writer.versions))
        hint = f"known are {known}" if known else "its files are the same for all that are known: leave it out"
        raise UserError(f"no version {request.version!r} of {writer.title}; {hint}")
    request = replace(request, version=(request.version or writer.versions[0]))
    _check_kind(writer, request)
    if reason := writer.objection(request.model):
        raise UserError(f"{writer.title} cannot express {request.model.name}: {reason}")
    _check_layout(request.layout, request)
    given = canonical(request.layout, request.model)
    request = replace(request, layout=forced_layout(writer, given, request.model))
    _check_layout(request.layout, request)
    _check_limits(writer, request)
    version = f" {request.version}" if request.version else ""
    head = f"{writer.title}{version}: {request.model.name}, layout {request.layout}, {request.layout.ranks} ranks"
    forced = [f"{key}={_value(request.layout, key)} in place of {_value(given, key)}: {writer.title} has no other"
              for key in DEFAULTS if getattr(request.layout, key) != getattr(given, key)]  # fmt: skip
    text, every = _text(writer, request, [head, *request.notes, *forced, *writer.left_to_code(request.layout)])
    return EngineFile(
        engine,
        request.version,
        request.layout,
        writer.files.get(request.version, writer.file),
        text,
        tuple(every[1:]),
    )


def command_of(file: EngineFile) -> tuple[list[str], list[str]]:
    """(Command of a job that runs an engine's file, variables that it needs as NAME=VALUE)."""
    if file.file.endswith(".sh"):
        return job_words(file.text)
    return shlex.split(sentence(WRITERS[file.engine].job, {"file": file.file})), []


def _check_layout(layout: Layout, request: WriteRequest) -> None:
    if isinstance(request.model, Blueprint):
        check_module_layout(layout)
        check_described(request.model, layout, request.workload.micro_batches(layout))
    elif request.served is not None:
        check_served(layout, request.model)
    else:
        check(layout, request.model, request.workload if request.workload.batch else None)


def forced_layout(writer: EngineSpec, layout: Layout, model: Model, searched: bool = True) -> Layout:
    """The layout with the engine's values of keys that it forces. searched: of keys that plans search, too."""
    keys = set(writer.forced) - (set() if searched else set(SEARCHED))
    limits = [limit for limit in writer.bounds if limit.key in keys]
    return canonical(nearest(limits, layout, model) or layout, model)


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


def why_not_written(writer: EngineSpec, layout: Layout, model: Model) -> str:
    """What of a layout or its model an engine cannot express, and why; empty where it expresses all."""
    if reason := writer.objection(model):
        return f"not {model.name}: {reason}"
    limit = first_broken(writer.bounds, canonical(layout, model), model)
    return f"not {_said(limit, layout)}: {limit.why}" if limit else ""


def refusals(writer: EngineSpec, model: Model) -> Callable[[Layout], str]:
    """What an engine cannot express of a layout, for a search. Raises `UserError` for a model that it does not take."""
    if reason := writer.objection(model):
        raise UserError(f"{writer.title} cannot express {model.name}: {reason}")
    return cache(lambda layout: why_not_written(writer, forced_layout(writer, layout, model, searched=False), model))


def _said(limit: Limit, layout: Layout) -> str:
    value = _value(layout, limit.key)
    return limit.key if value is True else f"{limit.key}={value}"


def _value(layout: Layout, key: str) -> Any:
    value = getattr(layout, key)
    return runs_text(value) or "even" if isinstance(value, tuple) else value


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


def _text(spec: EngineSpec, request: WriteRequest, comments: list[str]) -> tuple[str, list[str]]:
    """(Text, its comments: `comments` and the engine's own)."""
    names = _names(spec, request)
    values: dict[str, Any] = {}
    written = names["written"] = SimpleNamespace()
    for row in spec.options.values():
        if row.versions and request.version not in row.versions:
            continue
        names |= {"word": row.said, "words": row.words, "usual": DEFAULTS.get(row.name)}
        if not row.write and (not row.option or row.name not in _WRITTEN):
            continue
        value = evaluate(row.write, names) if row.write else row.said(names[row.name])
        setattr(written, row.name, value)
        if row.option:
            values[row.option] = value
        else:
            names[row.name] = value
    own = [sentence(one.say, names) for one in spec.remarks["comments"] if evaluate(one.when, names)]
    comments = [*comments, *own]
    kind = spec.files.get(request.version, spec.file).rpartition(".")[2]
    if kind == "py":
        return commented(comments) + program(spec.program_text(names), values), comments
    if kind != "sh":
        return tables(kind, values, comments), comments
    head = [sentence(word, names) for word in spec.command]
    end = [sentence(word, names) for word in spec.end]
    words = [*(torchrun(request) if spec.launcher else ()), *head, *flag_words(values, spec.flags), *end]
    return with_comments(evaluate(spec.before, names) + command(words), comments), comments


def _names(spec: EngineSpec, request: WriteRequest) -> Names:
    """The layout's keys and properties, the step's, the server's, and the request's."""
    layout, work, served = request.layout, request.workload, request.served or ServerSettings()
    module = request.model if isinstance(request.model, Blueprint) else None
    classes = sorted({part.module for part in module.of_kind("block")}) if module else []
    nodes, _ = nodes_for(layout, request.cluster)
    nodes = 1 if request.launched else nodes
    return Names(
        layout, **vars(served), **vars(work), **spec.functions, layout=layout, work=work, model=request.model,
        nodes=nodes, steps=work.micro_batches(layout) if work.batch else 0, source=request.source or request.model.name,
        unnamed=request.source in ("", request.model.name) and "/" not in request.model.name, stored=request.stored,
        stored_cache=request.stored_cache,
        version=request.version, module=module,
        blocks=",".join(classes), engine=spec.name, file=spec.file, launch=" ".join(torchrun(request)),
    )  # fmt: skip


def first_broken(limits: Iterable[Limit], layout: Layout, model: Model) -> Limit | None:
    """The first limit that a layout of a model breaks; None when it keeps all."""
    bounds = (limit for limit in limits if model.experts or not limit.experts)
    return next((limit for limit in bounds if limit.broken(layout, model)), None)


def nearest(limits: Collection[Limit], layout: Layout, model: Model) -> Layout | None:
    """The layout with every broken limit repaired; None where the repairs contradict each other."""
    for _ in range(2 * len(limits) + 1):
        limit = first_broken(limits, layout, model)
        if limit is None:
            return layout
        try:
            layout = replace(layout, **limit.repair(layout))
        except LayoutError:
            return None
    return None
