"""Placement of tensors: the box of each parameter that a tensor-parallel rank holds, by the parameter's own cut.

Runtime, planner and checkpoint use the same boxes. Column-parallel splits the output
dim, row-parallel the input dim (Shoeybi et al. 2019).
"""

import math
from itertools import accumulate

from shardwise.layout.axes import KV, TP, Axes
from shardwise.layout.layout import Layout
from shardwise.layout.tensor import split_dim
from shardwise.model import ModelConfig
from shardwise.model.adapters import stored
from shardwise.model.blueprint import Cut, Parameter
from shardwise.ops.cache_shape import CacheShape
from shardwise.records import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim."""


@dataclass(frozen=True)
class Placed:
    """One parameter as a rank holds it."""

    parameter: Parameter
    kind: Cut
    shape: tuple[int, ...]
    """Local shape, padding included."""
    box: Box
    """(start, stop) of each dim of the global tensor that the rank holds, padding excluded."""
    dims: tuple[int, ...]
    """Dims that are split; none where every rank holds the whole tensor."""
    replicas: int
    """Tensor-parallel ranks that hold the same values."""
    sum_over: Axes
    """Axes over which its gradient must be summed beside the data axes."""
    boxes: tuple[Box, ...] = ()
    """Boxes whose elements follow each other in the local tensor, where one box does not hold them: outputs of packed
    maps. `box` then holds them all, and others. There is no padding then."""
    module_shape: tuple[int, ...] = ()
    """Local shape in its module; empty where it is `shape`."""

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, parameter: Parameter) -> "Placed":
        """Another parameter of the same shape and cut."""
        return Placed(
            stored(parameter), self.kind, self.shape, self.box, self.dims, self.replicas, self.sum_over, self.boxes,
            self.module_shape,
        )  # fmt: skip

    @property
    def pieces(self) -> tuple[tuple[int, tuple[int, ...], Box], ...]:
        """(start, local shape, box) of the boxes that follow each other in the local tensor."""
        if not self.boxes:
            return ((0, self.shape, self.box),)
        shapes = [tuple(stop - start for start, stop in box) for box in self.boxes]
        starts = accumulate(map(math.prod, shapes), initial=0)
        return tuple(zip(starts, shapes, self.boxes, strict=False))

    @property
    def view(self) -> tuple[int, ...]:
        return self.module_shape or self.shape


def place(parameter: Parameter, layout: Layout, tp_rank: int, ep_rank: int = 0) -> Placed:
    """Cut one parameter for a rank. ep_rank: its place among those that have different experts.

    A dim that tp does not divide is padded to equal pieces of ceil(n / tp) (vocabulary, feed-forward width); key/value
    heads fewer than tp are replicated over tp / kv_heads neighbouring ranks, so that each holds the one its query
    heads use. A weight in fewer bits is cut as the bytes that it is stored in.
    """
    parameter = stored(parameter)
    if parameter.cut == "expert":
        return _place_experts(parameter, layout, tp_rank, ep_rank)
    kind, tp, dim = parameter.cut, layout.tp, split_dim(parameter, layout)
    whole = tuple((0, size) for size in parameter.shape)
    if dim is None:
        partial = layout.sp or (parameter.partial and layout.inner_ranks > 1)
        kind = "replicated" if tp > 1 else kind
        over = TP if tp > 1 and partial else ()
        return Placed(parameter, kind, parameter.shape, whole, (), tp, over, (), parameter.module_shape)
    size, pieces, index, replicas = parameter.shape[dim], tp, tp_rank, 1
    if kind == "kv heads" and layout.inner_ranks > parameter.heads:
        replicas = tp // parameter.heads
        pieces, index = parameter.heads, tp_rank // replicas
    width = width_held(size, pieces)
    shape = tuple(width if d == dim else n for d, n in enumerate(parameter.shape))
    box = tuple(interval(n, pieces, index) if d == dim else whole[d] for d, n in enumerate(parameter.shape))
    return Placed(parameter, kind, shape, box, (dim,), replicas, KV if replicas > 1 else ())


def _place_experts(parameter: Parameter, layout: Layout, tp_rank: int, ep_rank: int) -> Placed:
    """Stacked experts: some of them, which are rows, and a part of their width, which is columns, or rows of each map
    that is packed in them."""
    rows, columns = parameter.shape
    parts = (layout.ep, 1) if parameter.packed else (layout.ep, layout.expert_tp)
    held = width_held(parameter.heads, layout.ep) * (rows // parameter.heads)
    box = (min(ep_rank * held, rows), min((ep_rank + 1) * held, rows)), interval(columns, parts[1], tp_rank % parts[1])
    shape = held, width_held(columns, parts[1])
    boxes: tuple[Box, ...] = ()
    if parameter.packed and layout.expert_tp > 1:
        each = rows // (parameter.heads * parameter.packed)
        start, stop = interval(each, layout.expert_tp, tp_rank % layout.expert_tp)
        boxes = tuple(((first + start, first + stop), box[1]) for first in range(*box[0], each))
        shape = shape[0] // layout.expert_tp, columns
    split = layout.ep > 1 or bool(boxes), parts[1] > 1
    dims = tuple(d for d in (0, 1) if split[d])
    return Placed(parameter, "expert", shape, box, dims, 1, (), boxes, _stacked(parameter, shape, layout.ep))


def _stacked(parameter: Parameter, shape: tuple[int, int], ep: int) -> tuple[int, ...]:
    if len(parameter.module_shape) != 3:
        return ()
    experts = width_held(parameter.heads, ep)
    return experts, shape[0] // experts, shape[1]


def interval(size: int, pieces: int, index: int) -> tuple[int, int]:
    """(start, stop) of one of equal pieces of a dim, padding excluded."""
    width = width_held(size, pieces)
    return min(index * width, size), min((index + 1) * width, size)


def kv_heads_held(model: ModelConfig, tp: int) -> int:
    """Key/value heads on each of `tp` ranks: at least one, replicated where there are fewer heads than ranks."""
    return max(1, model.kv_heads // tp)


def cache_shape(model: ModelConfig, tp: int) -> CacheShape:
    """A token in a block's cache on one of `tp` ranks. Latent attention keeps its normed latent and the keys' shared
    part, which every rank needs for its heads, and attends to these as one head for all queries."""
    if latent := model.latent_attention:
        return CacheShape(1, 1, latent.cached, latent.kv_rank)
    return CacheShape(2, kv_heads_held(model, tp), model.head_dim, model.head_dim)


def width_held(width: int, tp: int) -> int:
    """Rows or columns of a split dim on each rank, padding included."""
    return -(-width // tp)
