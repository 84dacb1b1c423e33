"""One layer of experts over the ranks of a layout: the experts of each rank, the rows that it sends and receives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import DATA, EP
from shardwise.layout.experts import RoutedRows
from shardwise.layout.legality import valid_ep, valid_tp
from shardwise.layout.placement import place
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.config import Experts
from shardwise.model.operations import LinearOp
from shardwise.model.parameters import blueprint
from shardwise.predict.traffic.experts import expert_rows
from shardwise.predict.traffic.ring_volume import ring_share
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_share
from shardwise.studio.data.experts_router import DrawnRouting, Ints, counts, taken


@dataclass(frozen=True)
class ExpertRank:
    """A rank's part of a layer of experts. A row is a token on its way to one of its experts."""

    plan: UnitPlan
    rank: int
    group: tuple[int, ...]
    """Ranks that have the other experts; the rank itself is one of them."""
    place: int
    """Its place among them."""
    experts: range
    columns: range
    """Part of each expert's width."""
    tokens: range
    """Tokens of its data rank's sequence that it routes."""
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
        return int(self.loads.sum())

    @property
    def leaving(self) -> int:
        return int(self.sends.sum() - self.sends[self.place])

    @property
    def coming(self) -> int:
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

    @property
    def experts(self) -> Experts:
        assert self.model.experts
        return self.model.experts

    @cached_property
    def ranks(self) -> tuple[ExpertRank, ...]:
        mesh, workload = Mesh.of(self.layout, self.model), Workload(seq=self.tokens, batch=self.layout.dp)
        plans = [
            unit_plan(self.model, self.layout, workload, rank=rank, backend="nccl") for rank in range(self.layout.ranks)
        ]
        held = self.experts.count // self.layout.ep
        tokens = [self._routed(plan) for plan in plans]
        chosen = [self._experts_of(mesh.index(DATA, rank), own) for rank, own in enumerate(tokens)]
        results = []
        for rank, plan in enumerate(plans):
            group, experts = mesh.group(EP, rank), range(plan.ep_rank * held, (plan.ep_rank + 1) * held)
            arrived = [chosen[other][chosen[other] // held == plan.ep_rank] for other in group]
            routes = chosen[rank] // held
            stacked = next(p for p in self._part.parameters if p.cut == "expert")
            results.append(
                ExpertRank(
                    plan,
                    rank,
                    group,
                    plan.ep_rank,
                    experts,
                    range(*place(stacked, self.layout, plan.tp_rank, plan.ep_rank).box[1]),
                    tokens[rank],
                    routes,
                    np.bincount(routes, minlength=len(group)),
                    np.array([len(rows) for rows in arrived]),
                    np.bincount(np.concatenate(arrived) - experts.start, minlength=held),
                )
            )
        return tuple(results)

    def _routed(self, plan: UnitPlan) -> range:
        """Tokens that a rank routes: all of its sequence, or a part of the tokens that its tp ranks have in common."""
        start = 0 if plan.routing.places == self.tokens else plan.tp_rank * plan.routing.places
        return range(start, start + plan.routing.places)

    def _experts_of(self, sequence: int, tokens: range) -> Ints:
        """Expert of each row of some tokens, those that are dropped left out."""
        part = np.s_[sequence, tokens.start : tokens.stop]
        return self.chosen[part][self.takes[part]]

    @property
    def chosen(self) -> Ints:
        """Experts of each token: [data ranks, tokens, k]."""
        return self.routing.chosen.reshape(self.layout.data_ranks, self.tokens, -1)

    @cached_property
    def takes(self) -> NDArray[np.bool_]:
        """Whether an expert takes a token: [data ranks, tokens, k]."""
        return taken(self.chosen, replace(self.experts, capacity=self.capacity))

    @cached_property
    def chosen_loads(self) -> Ints:
        """Rows that chose each expert, dropped ones included: [E]."""
        return counts(self.chosen, self.experts).sum(0)

    @cached_property
    def taken_loads(self) -> Ints:
        """Rows that each expert takes: [E]."""
        return np.bincount(self.chosen[self.takes], minlength=self.experts.count)

    @property
    def dropped(self) -> float:
        """Share of all rows that are dropped."""
        return 1 - float(self.taken_loads.sum() / self.chosen_loads.sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.model.hidden * DTYPE_BYTES[self.layout.dtype]

    def payloads(self, one: ExpertRank) -> tuple[int, int]:
        """Bytes of a rank's all-to-alls of rows to experts and back, forward, as the ledger has them: rows for its own
        experts are counted, too."""
        part, dtype = f"blocks.{self.model.layers - 1}", self.layout.dtype
        plan = replace(one.plan, routed=RoutedRows.of({part: [(len(one.routes), one.rows)]}))
        there, back = (
            elements * DTYPE_BYTES[dtype]
            for (phase, op, axes, _, wire, elements), _ in expert_rows(plan, part, 1, 0)
            if (phase, op, axes, wire) == ("forward", "all_to_all", EP, dtype)
        )
        return there, back

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
        return whole * len(self.ranks[0].columns) // self.experts.ffn

    def slowest(self, one: ExpertRank) -> int:
        """Rows of the busiest rank among those that a rank waits for: the ranks that it exchanges rows with."""
        return max(self.ranks[other].rows for other in one.group)

    def waits(self, one: ExpertRank) -> float:
        """Share of the time of the experts in which a rank waits."""
        return 1 - one.rows / self.slowest(one)

    @property
    def mean(self) -> float:
        return sum(one.rows for one in self.ranks) / len(self.ranks)

    @property
    def imbalance(self) -> float:
        return max(one.rows for one in self.ranks) / self.mean

    @property
    def waiting(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(one.rows for one in self.ranks) / sum(map(self.slowest, self.ranks))


ACTS = ("hold", "route", "sort", "dispatch", "compute", "return", "combine")
"""Acts of a layer, in their order."""
_TERMS = 4
"""Terms of a sum that are written."""


class ExpertStep(NamedTuple):
    """One step of a layer."""

    act: str
    sentence: str
    words: list[str]
    """Of each rank."""


def steps(layer: ExpertLayer) -> list[ExpertStep]:
    """All steps of a layer, as `ACTS` orders them."""
    sentences = _sentences(layer)
    words = _words(layer)
    return [ExpertStep(act, sentences[act], [words[act](one) for one in layer.ranks]) for act in ACTS]


def followed(layer: ExpertLayer) -> list[tuple[int, float]]:
    """(expert, weight) of the first token of the first sequence, the best first."""
    chosen, weights = layer.routing.chosen[0], layer.routing.weights[0]
    return [(int(expert), float(weight)) for expert, weight in zip(chosen, weights, strict=True)]


def _sentences(layer: ExpertLayer) -> dict[str, str]:
    e, first = layer.experts, layer.ranks[0]
    rows = sorted(one.rows for one in layer.ranks)
    sizes = f"{format_bytes(layer.row_bytes)}, {layer.model.hidden:,} numbers"
    leaving = sum(one.leaving for one in layer.ranks) / sum(int(one.sends.sum()) for one in layer.ranks)
    alone = layer.layout.ep == 1
    return {
        "hold": f"Attention is done. Each rank has {len(first.tokens)} tokens{_whose(layer)}, and its experts.",
        "route": f"The router gives each token {e.count} scores; {_largest(e.active)} its experts. "
        f"A token is now {e.active} row{'s' * (e.active > 1)}.",
        "sort": "Rows are sorted by expert."
        if alone
        else f"Rows are sorted by expert. Ranks tell each other how many will come: {e.count} counts from each rank.",
        "dispatch": "Every expert is here, so nothing travels."
        if alone
        else f"All-to-all: each row travels to the rank of its expert ({sizes}). {format_share(leaving)} of all rows "
        "leave their rank.",
        "compute": f"Experts multiply their rows. The busiest rank has {rows[-1]:,}, the least busy {rows[0]:,}: "
        f"ranks wait {format_share(layer.waiting)} of the time, until the busiest one is done.",
        "return": "The results are here already."
        if alone
        else f"The same all-to-all backwards: each result returns to the rank of its token ({sizes}).",
        "combine": f"Each token is the weighted sum of its rows. Token 0 of rank 0 = {_sum(layer)}.{_after(layer)}",
    }


def _words(layer: ExpertLayer) -> dict[str, Callable[[ExpertRank], str]]:
    nbytes = layer.row_bytes
    return {
        "hold": lambda one: f"{len(one.tokens)} tokens; {_experts(one)}",
        "route": lambda one: f"{len(one.routes)} rows",
        "sort": lambda one: f"{one.leaving} rows leave, {len(one.routes) - one.leaving} stay",
        "dispatch": lambda one: (
            f"sends {format_bytes(one.leaving * nbytes)}, receives {format_bytes(one.coming * nbytes)}"
        ),
        "compute": lambda one: (
            f"{one.rows:,} rows; {f'waits {format_share(layer.waits(one))}' if layer.waits(one) else 'the others wait'}"
        ),
        "return": lambda one: (
            f"sends {format_bytes(one.coming * nbytes)}, receives {format_bytes(one.leaving * nbytes)}"
        ),
        "combine": lambda one: f"{len(one.tokens)} tokens again",
    }


def _sum(layer: ExpertLayer) -> str:
    """The first token as a sum of its experts' outputs, as far as there is room."""
    terms = [f"{weight:.2f} × expert {expert}" for expert, weight in followed(layer)]  # noqa: RUF001
    return " + ".join(terms if len(terms) <= _TERMS else [*terms[: _TERMS - 1], f"{len(terms) - _TERMS + 1} more"])


def _experts(one: ExpertRank) -> str:
    first, last = one.experts[0], one.experts[-1]
    return f"expert {first}" if first == last else f"experts {first} to {last}"


def _whose(layer: ExpertLayer) -> str:
    """How tensor-parallel ranks divide the tokens."""
    if layer.layout.tp == 1:
        return ""
    if len(layer.ranks[0].tokens) < layer.tokens:
        return f", its slice of the {layer.tokens} that its {layer.layout.tp} tp ranks have in common"
    return f", as its {layer.layout.tp} tp ranks have in common"


def _after(layer: ExpertLayer) -> str:
    if layer.layout.tp == 1:
        return ""
    if len(layer.ranks[0].tokens) < layer.tokens:
        return " The tp ranks gather each other's slices."
    return " The tp ranks add up their partial results: each had a part of every expert's width."


def _largest(active: int) -> str:
    return "the largest one chooses" if active == 1 else f"the {active} largest choose"


DEGREES = (2, 4, 8, 16, 32, 64)


def routed_bytes(model: ModelConfig, ep: int, dtype: str) -> float:
    """Bytes that all ranks send for a token, forward, with experts over `ep` ranks and an even load: its rows to their
    experts and back."""
    assert model.experts
    elements = 2 * model.experts.active * model.hidden
    return float(elements * ring_share("all_to_all", ep) * DTYPE_BYTES[dtype])


def summed_bytes(model: ModelConfig, tp: int, dtype: str) -> float:
    """Bytes that all ranks send for a token, forward, with every expert cut over `tp` ranks: the sum of their partial
    results."""
    return float(tp * model.hidden * ring_share("all_reduce", tp) * DTYPE_BYTES[dtype])


def compared(model: ModelConfig, dtype: str) -> list[tuple[int, float | None, float | None]]:
    """(degree, bytes of `routed_bytes`, of `summed_bytes`), with None where the model cannot be cut so."""
    return [
        (
            n,
            routed_bytes(model, n, dtype) if n in valid_ep(model, n) else None,
            summed_bytes(model, n, dtype) if n in valid_tp(model) else None,
        )
        for n in DEGREES
    ]


def example(model: ModelConfig) -> int:
    """Ranks of the example in words: at most 16, over which experts can be spread, and into which they can be cut."""
    return max(n for n in DEGREES if n <= 16 and n in valid_ep(model, n) and n in valid_tp(model))
