"""One layer of experts over the ranks of a layout: the experts of each rank, the rows that it sends and receives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DATA, EP, ETP, TP
from shardwise.layout.placement import width_held
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.operations import LinearOp
from shardwise.model.parameters import blueprint
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.studio.data.experts_router import DrawnRouting, Ints, counts, taken


@dataclass(frozen=True)
class ExpertRank:
    """A rank's part of a layer of experts. A row is a token on its way to one of its experts."""

    rank: int
    group: tuple[int, ...]
    """Ranks that have the other experts; the rank itself is one of them."""
    place: int
    """Its place among them."""
    experts: range
    columns: range
    """Part of each expert's width."""
    sequence: int
    tokens: range
    """Tokens of the sequence that it routes."""
    routes: Ints
    """Place in the group of each row's expert, in the order of tokens: [rows]."""
    sends: Ints
    """Rows for each rank of the group."""
    receives: Ints
    """Rows from each rank of the group."""
    loads: Ints
    """Rows of each of its experts."""

    @property
    def rows(self) -> int:
        """Rows of all its experts."""
        return int(self.loads.sum())

    @property
    def leaving(self) -> int:
        """Rows that it sends to other ranks."""
        return int(self.sends.sum() - self.sends[self.place])

    @property
    def coming(self) -> int:
        """Rows that other ranks send to it."""
        return int(self.receives.sum() - self.receives[self.place])


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts of a model under a layout, with the routing of its tokens."""

    model: ModelConfig
    layout: Layout
    routing: DrawnRouting
    tokens: int
    """Tokens of each sequence; each data rank has one sequence."""
    capacity: float = 0.0
    """As of `Experts`: rows beyond it are dropped before they travel."""

    @cached_property
    def ranks(self) -> tuple[ExpertRank, ...]:
        """All ranks of a stage."""
        mesh, chosen = Mesh.of(self.layout, self.model), self.chosen
        assert self.model.experts
        held = self.model.experts.count // self.layout.ep
        own: list[tuple[int, range, Ints]] = []
        for rank in range(self.layout.ranks):
            sequence, tokens = mesh.index(DATA, rank), self._routed(mesh, rank)
            part = np.s_[sequence, tokens.start : tokens.stop]
            own.append((sequence, tokens, chosen[part][self.takes[part]]))
        results = []
        for rank, (sequence, tokens, experts) in enumerate(own):
            group, place = mesh.group(EP, rank), mesh.index(EP, rank)
            first = place * held
            rows = [own[other][2] // held for other in group]
            loads = np.concatenate([own[other][2] for other in group])
            results.append(
                ExpertRank(
                    rank,
                    group,
                    place,
                    range(first, first + held),
                    self._columns(mesh, rank),
                    sequence,
                    tokens,
                    experts // held,
                    np.bincount(experts // held, minlength=len(group)),
                    np.array([np.count_nonzero(places == place) for places in rows]),
                    np.bincount(loads, minlength=held * len(group))[first : first + held],
                )
            )
        return tuple(results)

    def _routed(self, mesh: Mesh, rank: int) -> range:
        """Tokens that a rank routes: all of its sequence, or, where tp does not split experts, a slice."""
        parts = self.layout.tp if mesh.size(ETP) == 1 else 1
        size, index = self.tokens // parts, mesh.index(TP, rank) % parts
        return range(index * size, (index + 1) * size)

    def _columns(self, mesh: Mesh, rank: int) -> range:
        assert self.model.experts
        width = width_held(self.model.experts.ffn, mesh.size(ETP))
        start = mesh.index(ETP, rank) * width
        return range(start, min(start + width, self.model.experts.ffn))

    @property
    def chosen(self) -> Ints:
        """Experts of each token: [data ranks, tokens, k]."""
        return self.routing.chosen.reshape(self.layout.data_ranks, self.tokens, -1)

    @cached_property
    def takes(self) -> NDArray[np.bool_]:
        """Whether an expert takes a token: [data ranks, tokens, k]."""
        assert self.model.experts
        return taken(self.chosen, replace(self.model.experts, capacity=self.capacity))

    @cached_property
    def chosen_loads(self) -> Ints:
        """Rows that chose each expert, dropped ones included: [E]."""
        assert self.model.experts
        return counts(self.chosen, self.model.experts).sum(0)

    @cached_property
    def taken_loads(self) -> Ints:
        """Rows that each expert takes: [E]."""
        assert self.model.experts
        return np.bincount(self.chosen[self.takes], minlength=self.model.experts.count)

    @property
    def dropped(self) -> float:
        """Share of all rows that are dropped."""
        return 1 - float(self.taken_loads.sum() / self.chosen_loads.sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.model.hidden * DTYPE_BYTES[self.layout.dtype]

    @cached_property
    def row_flops(self) -> int:
        """Forward FLOPs of one row on a rank."""
        routed = (o for o in self._part.operations if isinstance(o, LinearOp) and o.rows == "routed")
        return self._of_columns(sum(o.flops_per_token(1) // o.active for o in routed))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the experts of a rank."""
        routed = sum(p.numel for p in self._part.parameters if p.cut == "expert")
        return self._of_columns(routed // self.layout.ep) * DTYPE_BYTES[self.layout.dtype]

    @property
    def _part(self) -> Part:
        """The last block: every model with experts has some there."""
        return blueprint(self.model).part(f"blocks.{self.model.layers - 1}")

    def _of_columns(self, whole: int) -> int:
        """The part of `whole` that falls to a rank's columns of its experts."""
        assert self.model.experts
        return whole * len(self.ranks[0].columns) // self.model.experts.ffn

    def slowest(self, one: ExpertRank) -> int:
        """Rows of the busiest rank among those that a rank waits for: the ranks that it exchanges rows with."""
        return max(self.ranks[other].rows for other in one.group)

    def waits(self, one: ExpertRank) -> float:
        """Share of the time of the experts in which a rank waits."""
        return 1 - one.rows / self.slowest(one)

    @property
    def mean(self) -> float:
        """Rows of a rank on average."""
        return sum(one.rows for one in self.ranks) / len(self.ranks)

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean."""
        return max(one.rows for one in self.ranks) / self.mean

    @property
    def waiting(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(one.rows for one in self.ranks) / sum(map(self.slowest, self.ranks))
