"""Where every tensor lies: the tensor-parallel table and the box of each parameter that a tp rank holds.

The table is (module suffix -> column | row | vocab); everything that it does not name is replicated. The runtime swaps
modules by it, the planner counts by it, a checkpoint cuts by it. Column-parallel splits the output dim, row-parallel
the input dim (Shoeybi et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardwise.layout.layout import Layout
from shardwise.layout.mesh import KV, TP, Axes
from shardwise.model import ModelConfig
from shardwise.model.parameters import Parameter

Kind = Literal["column", "kv", "row", "vocab", "replicated"]

TENSOR_PARALLEL: tuple[tuple[str, Kind], ...] = (
    ("attention.qkv.q", "column"),
    ("attention.qkv.k", "kv"),
    ("attention.qkv.v", "kv"),
    ("attention.out", "row"),
    ("mlp.gate_up.gate", "column"),
    ("mlp.gate_up.up", "column"),
    ("mlp.up.up", "column"),
    ("mlp.down", "row"),
    ("embedding.tokens", "vocab"),
    ("head.out", "vocab"),
)
"""Module name without its `blocks.<i>.` prefix -> how its weight is split. `kv` is column by key/value head."""

_KINDS = dict(TENSOR_PARALLEL)

USED_BY_SHARDED_HEADS = ("attention.q_norm", "attention.k_norm")
"""Replicated weights whose gradient each tp rank sees only for its own heads."""


@dataclass(frozen=True)
class Placed:
    """One parameter as tp rank `tp_rank` holds it.

    shape: local shape, padding included. dim, start, stop: the rows (dim 0) or columns (dim 1) of the global tensor
    that it holds, padding excluded; dim is None when replicated. replicas: how many tp ranks hold the same values.
    sum_over: axes over which its gradient must be summed beside the data axes.
    """

    parameter: Parameter
    kind: Kind
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


def kind_of(name: str) -> Kind:
    """The table's entry for a parameter: by module; a bias follows its weight, but a row-parallel one is replicated."""
    module, _, leaf = name.rpartition(".")
    if module.startswith("blocks."):
        module = module.split(".", 2)[2]
    kind = _KINDS.get(module, "replicated")
    if leaf == "bias" and kind == "row":
        return "replicated"
    return kind


def place(parameter: Parameter, model: ModelConfig, layout: Layout, tp_rank: int) -> Placed:
    """Cut one parameter for `tp_rank`.

    A dim that tp does not divide is padded to equal pieces of ceil(n / tp) (vocabulary, feed-forward width); key/value
    heads fewer than tp are replicated over tp / kv_heads neighbouring ranks, so that each holds the one its query
    heads use.
    """
    kind, tp = kind_of(parameter.name), layout.tp
    if tp == 1 or kind == "replicated":
        partial = layout.sp or any(name in parameter.name for name in USED_BY_SHARDED_HEADS)
        kind = "replicated" if tp > 1 else kind
        return Placed(parameter, kind, parameter.shape, None, 0, 0, tp, TP if tp > 1 and partial else ())
    dim = 1 if kind == "row" else 0
    size, pieces, index, replicas = parameter.shape[dim], tp, tp_rank, 1
    if kind == "kv" and tp > model.kv_heads:
        replicas = tp // model.kv_heads
        pieces, index = model.kv_heads, tp_rank // replicas
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
