"""A torchrun line that starts this project's own training: it expresses every layout that runs here."""

from __future__ import annotations

import shlex
from dataclasses import fields

from shardwise.interop.writing.commands import command, flag_words, nodes_of, torchrun, with_comments
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout, check_runnable


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The command. Raises `UserError` for a layout that does not run here."""
    work = request.workload
    check_runnable(request.layout, request.model, work)
    flags = {
        "layout": request.layout,
        "seq": work.seq,
        "batch": work.batch,
        "isolate_documents": work.isolate_documents,
        "optimizer": work.optimizer,
    }
    nodes, _ = nodes_of(request)
    comments = ["text and run directory are the user's: give --data and --out to this script"]
    if nodes > 1:
        comments.append("run it on every node, with HEAD_ADDRESS set to the first node's address and --out shared")
    model = shlex.quote(request.source or request.model.name)
    return command([*torchrun(request), f'-m shardwise train {model} "$@"', *flag_words(flags)]), comments


WRITER = EngineWriter(
    name="torchrun",
    title="torchrun",
    keys={field.name: "--layout" for field in fields(Layout)},
    left={},
    limits=(),
    write=write,
    comment=with_comments,
    file="train.sh",
    profile="shardwise",
    loads_model=True,
)
