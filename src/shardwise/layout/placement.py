"""Placement of tensors: the box of each parameter that a tensor-parallel rank holds, by the parameter's own cut.

Runtime, planner and checkpoint use the same boxes. Column-parallel splits the output
dim, row-parallel the input dim (Shoeybi et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.layout.axes import KV, TP, Axes
from shardwise.layout.layout import Layout
from shardwise.layout.tensor import split_dim
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Cut, Parameter


@dataclass(frozen=True)
class Placed:
    """One parameter as tp rank `tp_rank` holds it.

    shape: local shape, padding included. dim, start, stop: the rows (dim 0) or columns (dim 1) of the global tensor
    that it holds, padding excluded; dim is None when replicated. replicas: how many tp ranks hold the same values.
    sum_over: axes over which its gradient must be summed beside the data axes.
    """

    parameter: Parameter
    kind: Cut
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    replicas: int
    sum_over: Axes

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def place(parameter: Parameter, layout: Layout, tp_rank: int) -> Placed:
    """Cut one parameter for `tp_rank`.

    A dim that tp does not divide is padded to equal pieces of ceil(n / tp) (vocabulary, feed-forward width); key/value
    heads fewer than tp are replicated over tp / kv_heads neighbouring ranks, so that each holds the one its query
    heads use.
    """
    kind, tp, dim = parameter.cut, layout.tp, split_dim(parameter, layout)
    if dim is None:
        partial = layout.sp or (parameter.partial and layout.inner_ranks > 1)
        kind = "replicated" if tp > 1 else kind
        return Placed(parameter, kind, parameter.shape, None, 0, 0, tp, TP if tp > 1 and partial else ())
    size, pieces, index, replicas = parameter.shape[dim], tp, tp_rank, 1
    if kind == "kv heads" and layout.inner_ranks > parameter.heads:
        replicas = tp // parameter.heads
        pieces, index = parameter.heads, tp_rank // replicas
    width = width_held(size, pieces)
    shape = tuple(width if d == dim else n for d, n in enumerate(parameter.shape))
    start, stop = min(index * width, size), min((index + 1) * width, size)
    return Placed(parameter, kind, shape, dim, start, stop, replicas, KV if replicas > 1 else ())


def kv_heads_held(model: ModelConfig, tp: int) -> int:
    """Key/value heads on each of `tp` ranks: at least one, replicated where there are fewer heads than ranks."""
    return max(1, model.kv_heads // tp)


def width_held(width: int, tp: int) -> int:
    """Rows or columns of a split dim on each rank, padding included."""
    return -(-width // tp)
