"""Parameters on one of the ranks that tensor parallelism cuts a model over, by what is done with them."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.layout import Layout
from shardwise.layout.axes import KV, TP
from shardwise.layout.placement import place
from shardwise.model.parameters import Model, blueprint


class HeldElements(NamedTuple):
    """Parameters on one tensor-parallel rank, as if no other axis cut them."""

    dense: Num
    """Of all blocks, but for experts and what is narrow."""
    narrow: Num
    """Bytes of frozen matrices of all blocks in narrower types."""
    experts: Num
    root: Num
    end: Num
    """Under a pipeline, of the larger one of entry and exit."""
    shared: Num
    """Of a table that both of these have."""
    partial: Num
    """Of all blocks, those whose gradients are sums over the tensor-parallel ranks."""
    repeated: Num
    """The same over those of them that have one key/value head."""
    holders: Num
    """How many these are."""


def held_elements(model: Model, tp: Num, trained: bool = True, sp: bool = False) -> HeldElements:
    """Parameters on each of `tp` ranks. trained: without frozen ones; sp: under sequence parallelism."""
    degrees = np.asarray(tp, dtype=int)
    found = {degree: _held(model, degree, trained, sp and degree > 1) for degree in set(degrees.ravel().tolist())}
    rows = np.zeros((max(found) + 1, len(HeldElements._fields)))
    rows[list(found)] = list(found.values())
    return HeldElements(*np.moveaxis(rows[degrees], -1, 0))


@lru_cache(maxsize=512)
def _held(model: Model, tp: int, trained: bool, sp: bool) -> HeldElements:
    whole, layout = blueprint(model).piped, Layout(tp=tp, sp=sp)
    if whole.trace and sp:  # what it adds is in the description (`unit_plan`)
        whole, layout = whole.on_shards, Layout(tp=tp)
    held, shared, sums, holders = Counter[str](), 0, Counter[Any](), 1
    for part in whole.parts:
        for parameter in (p for p in part.parameters if not (trained and p.frozen)):
            placed = place(parameter, layout, 0)
            numel = placed.numel * part.count
            kind = "narrow" if parameter.dtype else "experts" if parameter.cut == "expert" else part.kind
            held[kind] += numel
            shared += numel * (parameter.name in whole.shared)
            sums[placed.sum_over if part.kind == "block" else ()] += numel
            holders = placed.replicas if placed.sum_over == KV else holders
    root, end = held["root"] + held["entry"] + held["exit"], max(held["entry"], held["exit"] + shared)
    return HeldElements(held["block"], held["narrow"], held["experts"], root, end, shared, sums[TP], sums[KV], holders)
