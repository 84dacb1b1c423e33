"""Styles of a tensor-parallel plan: how a map of a user's module is cut, and what is communicated around it.

A plan is {pattern: style}. Names are ours (column, row, vocab, replicate), or those of `transformers`' published plans
(`base_model_tp_plan`). `*` in a pattern is one step of a module's path, such as the number of a layer.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.errors import UserError, did_you_mean
from shardwise.layout.tensor import EDGES, Edges
from shardwise.model.blueprint import Cut


class MapStyle(NamedTuple):
    """Cut of one map."""

    cut: Cut = "replicated"
    """Of its weight. A bias of column-parallel outputs is cut with them."""
    edges: Edges = Edges()
    partial: bool = False
    """Whether each rank sees the gradients of its weights only for its own heads, or its own part of the outputs."""


_COLUMN, _ROW = EDGES["megatron"]["column"], EDGES["megatron"]["row"]
GATHERED = MapStyle("column", EDGES["gathered"]["column"])
"""Column-parallel, and every rank has all outputs."""
LOOKUP = MapStyle("vocab", EDGES["megatron"]["lookup"])
"""A table, some rows on each rank."""
EXPERTS = MapStyle("expert")
"""A module that stacks the weights of experts: the layout says how these are split and what tokens travel."""
WHOLE = "replicate"
"""Style of a map that every rank has whole."""
SEQUENCE = "sequence_parallel"
"""Style of what every rank has whole and, under sp, uses on its shard of the sequences."""
STYLES: dict[str, MapStyle] = {
    "column": MapStyle("column", _COLUMN),
    "row": MapStyle("row", _ROW),
    "vocab": LOOKUP,
    WHOLE: MapStyle(),
    "colwise": MapStyle("column", _COLUMN),
    "rowwise": MapStyle("row", _ROW),
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": MapStyle("row", Edges("split inputs", "sum")),
    "rowwise_rep": MapStyle("row", Edges("split inputs", "sum")),
    "embedding_rowwise": LOOKUP,
    "replicated_with_grad_allreduce": MapStyle(partial=True),
    SEQUENCE: MapStyle(),
    "experts": EXPERTS,
    "moe_tp_experts": EXPERTS,
    "ep_dispatch_experts": EXPERTS,
}
"""Name in a plan -> style. All from `colwise` to the end but `experts` are those of `transformers`."""
WIDTHS: dict[str, int | None] = {
    "column": 1, "row": 0, "packed_column": 2, "colwise": 1, "rowwise": 0, "packed_colwise": 2, "grouped_gemm": None
}  # fmt: skip
"""Style of stacked weights [experts, outputs, inputs] inside experts -> maps whose outputs tensor parallelism splits, 0
where it splits inputs (`Parameter.packed`), or None where it splits none."""


def style_of(name: str, pattern: str) -> MapStyle:
    """The style that a plan names. Raises `UserError` for one that is unknown or has no form here."""
    if name not in STYLES:
        raise UserError(f"plan: {pattern!r} has style {name!r}, which split does not have; it has {', '.join(STYLES)}")
    return STYLES[name]


def path_of(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def named(plan: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Module -> the name of its style, as `matched` chooses it."""
    paths = [(path_of(pattern), name) for pattern, name in plan.items()]
    found = {each: next((name for path, name in paths if path.fullmatch(each)), "") for each in names}
    return {each: name for each, name in found.items() if name}


def matched(plan: Mapping[str, str], names: Iterable[str], published: bool) -> dict[str, MapStyle]:
    """Module -> its style, for all of `names` that a pattern of the plan matches. The first pattern counts.

    published: whether the plan is a library's, which may name modules that this model does not have. Raises `UserError`
    for an unknown style, and for a pattern of the user's own that matches nothing.
    """
    names = list(names)
    styles: dict[str, MapStyle] = {}
    for pattern, name in plan.items():
        style = style_of(name, pattern)
        path = path_of(pattern)
        hits = [each for each in names if path.fullmatch(each)]
        if not hits and not published:
            raise UserError(f"plan: no map is named {pattern!r}; {did_you_mean(pattern, names, 'there are')}")
        for each in hits:
            styles.setdefault(each, style)
    return styles
