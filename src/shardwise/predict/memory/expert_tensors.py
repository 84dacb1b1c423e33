"""A mixture of experts in bytes: what it saves, and what its forward and backward pass allocate and free.

Follows `ops/experts.py` line by line. How many rows come to a rank's experts is a record, or what equal loads would be
(`RankRouting.rows`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.layout.experts import gathers_sequences, slices_tokens
from shardwise.layout.placement import width_held
from shardwise.layout.units import UnitPlan
from shardwise.model.config import Experts
from shardwise.predict.memory.transients import LiveBytes, gather, scatter, weight_gradient
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.predict.memory.sizes import Sizes

INDEX = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class MixtureTensors:
    """The routed part of one block on one rank, for one micro-batch."""

    plan: UnitPlan
    s: Sizes
    e: Experts
    rows: int
    """Tokens that the rank routes, padding included."""
    pairs: int
    """Pairs of a token and an expert that it sends."""
    received: int
    """Rows that come to the experts here."""
    partly: int
    """Bytes of the mask of pairs that are computed; 0 where all are."""

    @classmethod
    def of(cls, plan: UnitPlan, s: Sizes, part: str) -> MixtureTensors:
        e = plan.model.experts
        assert e
        pairs, received = plan.routing.rows(part)
        rows = plan.routing.places
        full = rows * e.active == plan.routing.pairs
        partly = rows * e.active if e.capacity else 0 if full else rows
        return cls(plan, s, e, rows, pairs, received, partly)

    @property
    def ffn(self) -> int:
        """Width of an expert on this rank."""
        return width_held(self.e.ffn, self.plan.layout.expert_tp)

    @property
    def spreads(self) -> bool:
        """Whether experts are on several ranks."""
        return self.plan.layout.ep > 1

    def saved(self) -> dict[str, int]:
        """Everything that is saved beside the input."""
        s, rows = self.s, self.rows * self.e.active
        own = self.received * s.element
        return {
            "chosen experts": rows * INDEX,
            "order of pairs": self.pairs * INDEX + self.received * INDEX * self.spreads + self.partly,
            "rows of experts": own * s.hidden,
            "gate and up of experts": 2 * own * self.ffn,
            "outputs of experts": rows * s.hidden * s.element,
        }

    def kept(self) -> dict[str, int]:
        """What is kept from the gradient of its input until those of its weights."""
        own = self.received * self.s.element
        return {"rows of experts": 2 * own * self.s.hidden, "gradients inside experts": 3 * own * self.ffn}

    # -- as it goes

    def forward(self, live: LiveBytes) -> None:
        """Ends with the output, and what is saved."""
        s, start = self.s, live.now
        hidden, ffn = s.hidden * s.element, self.received * self.ffn * s.element
        own, sent = self.received * hidden, self.pairs * hidden
        whole = self._enter(live)
        scores = self.rows * self.e.count * self.s.statistic
        live.transient(self._converted() + 3 * scores)
        live.allocate(sum(list(self.saved().values())[:2]))
        live.allocate(sent)
        self._to_experts(live, sent, own)
        live.free(whole)
        live.allocate(2 * ffn)
        live.allocate(ffn)
        live.allocate(own)
        live.free(ffn)
        returned = self.rows * self.e.active * hidden
        came = self._to_tokens(live, own, sent)
        live.allocate(returned)
        live.free(own + came)
        live.allocate(self._wide(self.rows * self.e.active))
        live.allocate(self._wide(self.rows))
        live.free(self._wide(self.rows * self.e.active))
        self._leave(live)
        live.free(live.now - start - s.stream * hidden - sum(self.saved().values()))

    def backward(self, live: LiveBytes, apart: bool, adds: bool) -> None:
        """From the gradient of its output, which stays, to that of its input. What was saved goes at the end."""
        s, start = self.s, live.now
        hidden, ffn = s.hidden * s.element, self.received * self.ffn * s.element
        own, sent = self.received * hidden, self.pairs * hidden
        back = self._enter(live)
        if s.element == 2:
            live.transient(self._wide(self.rows * (1 + self.e.active)))
        whole = self._enter(live)
        scores = self.rows * self.e.count * self.s.statistic
        gradient = self._converted() or (self.rows + self.e.count) * self.s.hidden * self.s.element
        live.transient(self._converted() + 5 * scores + gradient)
        live.free(whole)
        live.allocate(self.rows * hidden)
        live.allocate(sent)
        self._to_experts(live, sent, own)
        live.free(back)
        live.allocate(3 * ffn)
        live.transient(ffn)
        live.allocate(ffn)
        live.free(ffn)
        live.allocate(own)
        live.transient(own)
        if not apart and adds:
            live.transient(weight_gradient(self.plan, s, s.hidden, self.ffn))
        live.free(0 if apart else 3 * ffn)
        live.free(0 if apart else own)  # the gradients of the experts' outputs
        came = self._to_tokens(live, own, sent)
        live.allocate(self.rows * self.e.active * hidden)
        live.free(came)
        live.transient(self.rows * hidden)
        live.free(self.rows * self.e.active * hidden + own)
        self._leave(live)
        kept = sum(self.kept().values()) if apart else 0
        live.free(live.now - start - s.stream * hidden - kept)
        live.free(sum(self.saved().values()))

    def _enter(self, live: LiveBytes) -> int:
        """Bytes of the rows, or of their outputs' gradient, where they are no view of what came."""
        if not (gathers_sequences(self.plan.layout) and self.plan.layout.sp):
            return 0
        live.transient(gather(self.plan, self.s))
        whole = self.s.tokens * self.s.hidden * self.s.element
        live.allocate(whole)
        return whole

    def _converted(self) -> int:
        """Rows and the router's weight in fp32, where they are bf16."""
        return (self.rows + self.e.count) * self.s.hidden * 4 if self.s.element == 2 else 0

    def _to_experts(self, live: LiveBytes, sent: int, own: int) -> None:
        """Rows of pairs, which are there, become those of the experts here."""
        if self.spreads:
            live.allocate(own)
            live.free(sent)
            live.allocate(own)
            live.free(own)

    def _to_tokens(self, live: LiveBytes, own: int, sent: int) -> int:
        """Rows of experts, which stay, and those of the pairs beside them, where these are others; returns their
        bytes."""
        if not self.spreads:
            return 0
        live.allocate(own)
        live.allocate(sent)
        live.free(own)
        return sent

    def _wide(self, rows: int) -> int:
        return rows * self.s.hidden * self.s.statistic

    def _leave(self, live: LiveBytes) -> None:
        layout, hidden = self.plan.layout, self.s.hidden * self.s.element
        if self.s.element == 2:
            live.transient(self.rows * hidden)
        if slices_tokens(layout):
            live.transient(2 * self.s.tokens * hidden)
        elif gathers_sequences(layout) and layout.sp:
            live.transient(scatter(self.plan, self.s))
