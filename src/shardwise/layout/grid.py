"""The rank grid: which ranks form the group of each mesh axis.

One array of ranks, shaped by the degrees in the layout's `order`, answers every question about groups. ZeRO's `shard`
and `replicate` axes cut the data ranks (dp x cp, dp slowest) of that grid into blocks; `kv` cuts the tp axis where
key/value heads are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from shardwise.layout.layout import AXES, Layout
from shardwise.model import ModelConfig


@dataclass(frozen=True)
class Grid:
    """The grid of `layout`; `kv_replicas` (1 when every tp rank has its own key/value heads) comes from the model."""

    layout: Layout
    kv_replicas: int = 1

    @classmethod
    def of(cls, layout: Layout, model: ModelConfig) -> Grid:
        return cls(layout, max(1, layout.tp // model.kv_heads))

    @cached_property
    def _strides(self) -> dict[str, int]:
        order = self.layout.order.split("-")
        sizes = [getattr(self.layout, axis) for axis in order]
        return {axis: prod(sizes[i + 1 :]) for i, axis in enumerate(order)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis, the derived ones (data, shard, replicate, kv) included."""
        at = {axis: rank // self._strides[axis] % getattr(self.layout, axis) for axis in AXES}
        at["data"] = at["dp"] * self.layout.cp + at["cp"]
        at["shard"] = at["data"] % self.layout.shard_ranks
        at["replicate"] = at["data"] // self.layout.shard_ranks
        at["kv"] = at["tp"] % self.kv_replicas
        return at

    def rank(self, **at: int) -> int:
        """The rank at the given pp, dp, cp and tp coordinates."""
        return sum(at[axis] * self._strides[axis] for axis in AXES)

    def group(self, axes: str, rank: int) -> tuple[int, ...]:
        """The ranks, `rank` among them, that differ from it only along `axes` (names joined by "_").

        Known axes: dp, cp, tp, pp, data (dp x cp), shard, replicate, kv, and compositions such as shard_tp. The order
        within the group is the order of the axes, the first slowest.
        """
        mine = self.coordinates(rank)
        spans = [self._span(axis, mine) for axis in axes.split("_")]
        members = []
        for choice in product(*spans):
            at = {axis: mine[axis] for axis in AXES}
            for part in choice:
                at.update(part)
            members.append(self.rank(**at))
        return tuple(members)

    def _span(self, axis: str, mine: dict[str, int]) -> list[dict[str, int]]:
        layout = self.layout
        if axis in AXES:
            return [{axis: i} for i in range(getattr(layout, axis))]
        if axis == "kv":
            first = mine["tp"] - mine["kv"]
            return [{"tp": first + i} for i in range(self.kv_replicas)]
        data = {
            "data": range(layout.data_ranks),
            "shard": range(mine["replicate"] * layout.shard_ranks, (mine["replicate"] + 1) * layout.shard_ranks),
            "replicate": range(mine["shard"], layout.data_ranks, layout.shard_ranks),
        }[axis]
        return [{"dp": i // layout.cp, "cp": i % layout.cp} for i in data]

    def size(self, axes: str) -> int:
        sizes = {
            "data": self.layout.data_ranks,
            "shard": self.layout.shard_ranks,
            "replicate": self.layout.replicate_ranks,
            "kv": self.kv_replicas,
        }
        return prod(sizes[axis] if axis in sizes else getattr(self.layout, axis) for axis in axes.split("_"))

    def axes_name(self, axes: str) -> str:
        """The name under which a group appears in a ledger.

        The data ranks are called dp, or dp_cp when cp is in play; a shard group that covers them all is called the
        same; axes of size one are left out.
        """
        data = "dp" if self.layout.cp == 1 else ("dp_cp" if self.layout.dp > 1 else "cp")
        names = []
        for axis in axes.split("_"):
            if self.size(axis) > 1:
                whole = axis == "data" or (axis in ("shard", "replicate") and self.size(axis) == self.layout.data_ranks)
                names.append(data if whole else axis)
        return "_".join(names)
