"""Shell scripts: a torchrun line, flags, and comments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.writing.request import WriteRequest
from shardwise.layout import Layout

NODE = 8
"""Ranks per node where no cluster says it."""
PORT = 29500
"""torchrun's usual port."""


def nodes_for(layout: Layout, cluster: Cluster | None) -> tuple[int, int]:
    """(nodes, ranks per node) of a layout. Raises `UserError` where ranks do not fill nodes."""
    ranks = layout.ranks
    node = cluster.devices_per_node if cluster else NODE
    if cluster and ranks > cluster.devices:
        raise UserError(f"layout {layout} needs {ranks} ranks, but {cluster} has fewer")
    if ranks <= node:
        return 1, ranks
    if ranks % node:
        raise UserError(f"{ranks} ranks do not fill nodes of {node}: say with --cluster what a node has")
    return ranks // node, node


def torchrun(request: WriteRequest) -> list[str]:
    """torchrun's words, before the program. Every node runs the same line; HEAD_ADDRESS is the first node's."""
    nodes, ranks = nodes_for(request.layout, request.cluster)
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node {ranks}"]
    return [
        "torchrun", f"--nnodes {nodes}", f"--nproc-per-node {ranks}", "--rdzv-backend c10d", "--rdzv-id shardwise",
        f'--rdzv-endpoint "$HEAD_ADDRESS:{PORT}"',
    ]  # fmt: skip


def flag_words(flags: Mapping[str, Any], dashes: bool = True) -> list[str]:
    """Each flag as it is typed: True stands alone, None and False are left out. dashes: in place of underscores."""
    shown = dashed if dashes else "--{}".format
    return [
        shown(name) if value is True else f"{shown(name)} {_quoted(f'{value}')}"
        for name, value in flags.items()
        if value is not None and value is not False
    ]


def _quoted(text: str) -> str:
    # A variable has its quotes.
    return text if text.startswith('"$') else shlex.quote(text)


def command(words: Sequence[str]) -> str:
    """One command, a flag per line."""
    return " \\\n    ".join(words) + "\n"
