"""The mesh: two named views of a layout's ranks, and the group of ranks along any axes of them.

The dense view is (replica, pp, dp, cp, tp), the expert view (pp, edp, ep, etp): within one stage of a replica's
pipeline both count the same ranks, edp x ep x etp = dp x cp x tp, with etp fastest. Parts of axes have names as well:
ZeRO's `shard` and `replicate` cut a replica's data ranks (dp x cp) into blocks, `hpz` cuts `shard`, and `kv` cuts tp
where key/value heads are replicated.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardwise.layout.axes import (
    DATA,
    DENSE,
    DP,
    EDP,
    EP,
    EP_ACROSS,
    ETP,
    HPZ,
    HPZ_ACROSS,
    KV,
    REPLICA,
    REPLICATE,
    SHARD,
    STAGE,
    TP,
    Axes,
)
from shardwise.layout.experts import expert_places
from shardwise.model.parameters import Model
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout


class _Part(NamedTuple):
    """An axis as a part of dense axes: of their joint index, every `stride`-th of `size` values."""

    of: Axes
    stride: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """The ranks of `layout`; `kv_replicas` (1 when every tp rank has its own key/value heads) comes from the model."""

    layout: Layout
    kv_replicas: int = 1

    @classmethod
    def of(cls, layout: Layout, model: Model) -> Mesh:
        """The mesh of a model."""
        return cls(layout, max(1, layout.inner_ranks // model.kv_heads))

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Dense axis -> the ranks from one place on it to the next, by the layout's `order`; replicas come first."""
        order = [*REPLICA, *self.layout.order.split("-")]
        return {axis: prod(self._sizes[inner] for inner in order[i + 1 :]) for i, axis in enumerate(order)}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Dense axis -> its places. Replicas have equal parts of the data-parallel ranks."""
        sizes = {axis: getattr(self.layout, axis) for axis in DENSE}
        replicas = self.layout.independent
        return {REPLICA[0]: replicas, **sizes, DP[0]: self.layout.dp // replicas}

    @cached_property
    def _data(self) -> Axes:
        return self._in_order(DATA)

    def _in_order(self, axes: Axes) -> Axes:
        """Dense axes in the order of ranks: groups of parts of them then ascend, as torch.distributed sorts groups."""
        return tuple(axis for axis in self.layout.order.split("-") if axis in axes)

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        layout, data = self.layout, self._data
        # Experts are spread over the ranks of a stage; if tp splits them as it splits all else, over its data ranks.
        spread = data if layout.expert_tp > 1 else self._in_order(STAGE)
        places = expert_places(layout)
        return {axis: _Part((axis,), 1, size) for axis, size in self._sizes.items()} | {
            axis: part
            for (axis,), part in {
                SHARD: _Part(data, 1, layout.shard_ranks),
                REPLICATE: _Part(data, layout.shard_ranks, layout.replicate_ranks),
                HPZ: _Part(data, 1, layout.hpz or 1),
                HPZ_ACROSS: _Part(data, layout.hpz or 1, layout.shard_ranks // (layout.hpz or 1)),
                KV: _Part(TP, 1, self.kv_replicas),
                ETP: _Part(TP, 1, layout.expert_tp),
                EP: _Part(spread, 1, layout.ep),
                EP_ACROSS: _Part(spread, places, layout.ep // places),
                EDP: _Part(spread, layout.ep, layout.data_ranks * layout.tp // (layout.ep * layout.expert_tp)),
            }.items()
        }

    def rank(self, **at: int) -> int:
        """The rank at the given pp, dp, cp and tp coordinates; 0 on axes that are not given."""
        return sum(place * self._strides[axis] for axis, place in at.items())

    def size(self, axes: Axes) -> int:
        return prod(self._parts[axis].size for axis in axes)

    def index(self, axes: Axes, rank: int) -> int:
        """The place of `rank` in its group along `axes`."""
        place = 0
        for axis in axes:
            of, stride, size = self._parts[axis]
            place = place * size + self._joint(of, rank) // stride % size
        return place

    def group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """The ranks, `rank` among them, that differ from it only along `axes`, in their order.

        No two of the axes may be parts of each other, as dp and shard are.
        """
        members = [rank]
        for axis in axes:
            part = self._parts[axis]
            members = [self._moved(member, part, place) for member in members for place in range(part.size)]
        return tuple(members)

    def stage(self, place: int) -> tuple[int, ...]:
        return tuple(sorted(self.group(REPLICA + STAGE, self.rank(pp=place))))

    def name(self, axes: Axes) -> str:
        """The name under which a group appears in a ledger; empty for a group of one rank.

        Axes of size one are left out, and a shard group that covers all data ranks is called after these.
        """
        name = ""
        for axis in axes:
            whole = axis in SHARD + REPLICATE and self._parts[axis].size == self.layout.data_ranks
            for part in self._data if whole else (axis,):
                if self._parts[part].size > 1:
                    name += f"_{part}" if name else part
        return name

    def _joint(self, axes: Axes, rank: int) -> int:
        """The index of `rank` over dense axes, the first slowest."""
        joint = 0
        for axis in axes:
            size = self._parts[axis].size
            joint = joint * size + rank // self._strides[axis] % size
        return joint

    def _moved(self, rank: int, part: _Part, place: int) -> int:
        joint = before = self._joint(part.of, rank)
        joint += (place - joint // part.stride % part.size) * part.stride
        for axis in reversed(part.of):
            size = self._parts[axis].size
            rank += (joint % size - before % size) * self._strides[axis]
            joint, before = joint // size, before // size
        return rank
