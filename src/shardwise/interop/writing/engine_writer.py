"""The driver of all writers: a layout as the rows of an engine's file say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwise.interop.expressions import Names, evaluate, sentence
from shardwise.interop.reading.settings import SERVED, ServerSettings
from shardwise.interop.spec import EngineSpec
from shardwise.interop.writing.canonical import DEFAULTS
from shardwise.interop.writing.commands import command, flag_words, nodes_for, torchrun
from shardwise.interop.writing.formats import tables, with_comments
from shardwise.interop.writing.request import WriteRequest

_WRITTEN = {*DEFAULTS, *SERVED, "seq", "batch", "optimizer"}
"""Rows that say themselves what is written."""


def write_as(spec: EngineSpec, request: WriteRequest, comments: list[str]) -> tuple[str, list[str]]:
    """(Text, its comments: `comments` and the engine's own). Raises `UserError` where ranks do not fill nodes."""
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
    if kind != "sh":
        return tables(kind, values, comments), comments
    head = [sentence(word, names) for word in spec.command]
    end = [sentence(word, names) for word in spec.end]
    words = [*(torchrun(request) if spec.launcher else ()), *head, *flag_words(values, spec.flags), *end]
    return with_comments(evaluate(spec.before, names) + command(words), comments), comments


def _names(spec: EngineSpec, request: WriteRequest) -> Names:
    """The layout's keys and properties, the step's, the server's, and the request's."""
    layout, work, served = request.layout, request.workload, request.served or ServerSettings()
    nodes, _ = nodes_for(layout, request.cluster)
    return Names(
        layout, **vars(served), **vars(work), **spec.functions, layout=layout, work=work, model=request.model,
        nodes=nodes, steps=work.micro_batches(layout) if work.batch else 0, source=request.source or request.model.name,
        unnamed=request.source in ("", request.model.name) and "/" not in request.model.name, stored=request.stored,
        version=request.version, engine=spec.name,
    )  # fmt: skip
