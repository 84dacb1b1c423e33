"""From the products of queries and keys to scores: scale, soft cap, and which keys a query sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardwise.decoder.attention import CoreAttention


class ScoreRule(NamedTuple):
    """From products q kᵀ to the scores of a core of attention."""

    scale: float
    softcap: float
    """c of c tanh(s / c); 0 for none."""
    window: int
    """Keys that a query sees at most; 0 for no bound."""

    @classmethod
    def of(cls, core: CoreAttention) -> ScoreRule:
        return cls(core.scale, core.softcap or 0.0, core.window)

    def cap(self, scores: Tensor) -> Tensor:
        """The capped scores, in place."""
        return scores.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else scores

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether a query at a position sees the key at another. queries, keys: positions, which broadcast."""
        seen = keys <= queries
        return seen & (queries - keys < self.window) if self.window else seen
