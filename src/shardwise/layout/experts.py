"""Which tokens a rank routes to experts, as a layout has it: in training, and in generation."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import NamedTuple, Self

from shardwise.layout.axes import CP, DATA, EP, EP_ACROSS, STAGE, TP, Axes
from shardwise.layout.context import SequenceCut
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placed, width_held
from shardwise.model.blueprint import Blueprint
from shardwise.ops.expert_share import ExpertShare
from shardwise.records import dataclass

LOADS = "expert loads"
"""Name, in a ledger, of the sum of a step's loads."""


def spreads_experts(layout: Layout) -> bool:
    """Whether a mixture's experts are on several ranks."""
    return layout.ep > 1


def gathers_sequences(layout: Layout) -> bool:
    """Whether every tensor-parallel rank routes all tokens of its group, of which each has a part of the experts'
    width."""
    return layout.expert_tp > 1


def slices_tokens(layout: Layout) -> bool:
    """Whether tensor-parallel ranks, which have the same tokens, route a part of them each."""
    return layout.tp > 1 and layout.expert_tp == 1 and not layout.sp


def load_axes(layout: Layout) -> Axes:
    """Axes along which ranks of a stage route different tokens."""
    return DATA if gathers_sequences(layout) else STAGE


def sequence_axes(layout: Layout) -> Axes:
    """Axes along which ranks route different tokens of the same sequences."""
    return CP if gathers_sequences(layout) else CP + TP


def slice_of(layout: Layout, tokens: int) -> int:
    """Rows of the largest part of tokens that tensor-parallel ranks divide among them."""
    return -(-tokens // layout.tp)


@dataclass(frozen=True)
class RoutedRows:
    """Rows that the mixtures of one rank have exchanged in a step, as recorded."""

    rows: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(part, (pairs sent, rows received) of each micro-batch in order)."""

    @classmethod
    def of(cls, record: Mapping[str, Sequence[Sequence[int]]]) -> Self:
        """From part -> its micro-batches."""
        return cls(tuple((part, tuple((sent, come) for sent, come in each)) for part, each in record.items()))

    def to_json(self) -> dict[str, list[list[int]]]:
        """The record that `of` takes."""
        return {part: [list(micro) for micro in rows] for part, rows in self.rows}

    @cached_property
    def by_part(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Part -> its micro-batches."""
        return dict(self.rows)


@dataclass(frozen=True)
class RankRouting:
    """Tokens that one rank routes to experts in a micro-batch, and rows that it exchanges for them."""

    blueprint: Blueprint
    layout: Layout
    sequence: SequenceCut
    tokens: int
    stream_tokens: int
    tp_rank: int
    cp_rank: int
    active: int
    """Experts that a token goes to."""
    routed: RoutedRows | None
    """As of `UnitPlan`."""

    @cached_property
    def places(self) -> int:
        """Tokens of one micro-batch that this rank routes to experts, padding included."""
        if gathers_sequences(self.layout):
            return self.tokens
        if self.layout.sp:
            return self.stream_tokens
        share = slice_of(self.layout, self.tokens)
        return max(0, min(share, self.tokens - self.tp_rank * share))

    @cached_property
    def pairs(self) -> int:
        """Pairs of a token and an expert of one micro-batch that this rank sends, if no expert is full."""
        return (self.places - self._padding) * self.active

    @property
    def _padding(self) -> int:
        """Padding that it routes: places that fill up the last chunks of a cut sequence."""
        cut, layout = self.sequence, self.layout
        if cut.padded == cut.seq:
            return 0
        whole = [place >= cut.seq for run in cut.places(self.cp_rank) for place in run]
        if gathers_sequences(layout):
            return layout.micro * sum(whole)
        share = slice_of(layout, len(whole) if layout.sp else len(whole) * layout.micro)
        own = slice(self.tp_rank * share, (self.tp_rank + 1) * share)
        return layout.micro * sum(whole[own]) if layout.sp else sum((whole * layout.micro)[own])

    def rows(self, part: str, micro: int | None = None) -> tuple[int, int]:
        """(pairs that a part's mixture sends to experts, rows that come to those here) in one micro-batch; the most of
        any without `micro`."""
        if self.routed is None:
            return self.pairs, self.pairs
        rows = self.routed.by_part[part]
        return (max(sent for sent, _ in rows), max(come for _, come in rows)) if micro is None else rows[micro]

    def memory_key(self, part: str) -> tuple[bool, tuple[int, int]]:
        """Equal for blocks that need the same memory: whether they have experts, and rows that these exchange."""
        return (True, self.rows(part)) if self.blueprint.routes and self.blueprint.routes_in(part) else (False, (0, 0))

    @cached_property
    def uneven(self) -> bool:
        """Whether its micro-batches have exchanged different numbers of rows."""
        return self.routed is not None and any(len(set(rows)) > 1 for _, rows in self.routed.rows)


# -- generation, where all tensor-parallel ranks have the same tokens


def expert_places(layout: Layout) -> int:
    return 1 if layout.expert_tp > 1 else gcd(layout.ep, layout.tp)


def experts_across(layout: Layout) -> int:
    """Ranks with tokens of their own between which experts are spread."""
    return layout.ep // expert_places(layout)


def across_axes(layout: Layout) -> Axes:
    return EP if expert_places(layout) == 1 else EP_ACROSS


class ExpertSpread(NamedTuple):
    """Experts over the ranks of expert parallelism."""

    most: int
    """Experts of the fullest ranks."""
    full: int
    """Ranks with so many; the others have one less."""
    ranks: int

    @property
    def even(self) -> bool:
        return self.full == self.ranks

    @property
    def redundant(self) -> int:
        """Copies of experts that would fill all ranks up, as engines' redundant experts do."""
        return self.ranks - self.full


def expert_spread(layout: Layout, experts: int) -> ExpertSpread:
    """So many experts over the ranks of a layout."""
    most = width_held(experts, layout.ep)
    return ExpertSpread(most, experts - (most - 1) * layout.ep, layout.ep)


def expert_share(layout: Layout, experts: int, tp_rank: int) -> ExpertShare:
    """The share of a rank in a mixture of so many experts; of the fullest where some have one more."""
    places = expert_places(layout)
    copies = 1 if layout.expert_tp > 1 else layout.tp // places
    copy, place = divmod(tp_rank, places) if layout.expert_tp == 1 else (0, 0)
    return ExpertShare(width_held(experts, layout.ep), place, places, copy, copies, layout.ep // places)


def matrices(placed: Placed) -> tuple[int, int, int]:
    """(how many, outputs, inputs) of the matrices that a parameter of two dims is on a rank: one for each expert."""
    if placed.kind != "expert":
        return 1, *placed.shape  # type: ignore[return-value]
    rows, ffn = placed.parameter.shape[0] // placed.parameter.heads, placed.shape[1]
    count = placed.shape[0] // rows
    return (count, rows, ffn) if placed.name.endswith(".down") else (count, ffn, rows)
