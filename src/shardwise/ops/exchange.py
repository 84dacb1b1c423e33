"""`TokenExchange`: the way of tokens to their experts and back, where all of both are on one device.

Subclasses put ranks in between. Rows are tokens as [T, hidden]: those that this rank routes. Pairs are (token, expert)
of all that experts take.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Communication in progress."""

    def wait(self) -> None: ...


class _Complete:
    def wait(self) -> None:
        """No-op."""


COMPLETE = _Complete()


class TokenExchange:
    """All experts and all tokens here: nothing is communicated. seq: tokens of a sequence."""

    def __init__(self, seq: int, auxiliary: float = 0.0) -> None:
        self.seq = seq
        self.auxiliary = auxiliary
        """Share of one sequence in the step's auxiliary losses."""

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream [B, S, hidden] as the rows that this rank routes."""
        return x.flatten(0, 1)

    def enter_backward(self, grad: Tensor, like: Tensor) -> tuple[Tensor, Pending]:
        """The gradient of the stream, of the shape of `like`, from that of the rows."""
        return grad.view_as(like), COMPLETE

    def leave(self, rows: Tensor, like: Tensor) -> Tensor:
        """What the rows have become, as a part of the residual stream, of the shape of `like`."""
        return rows.view_as(like)

    def leave_backward(self, grad: Tensor) -> Tensor:
        return grad.flatten(0, 1)

    @property
    def padded(self) -> bool:
        return False

    def kept(self, order: Tensor, takes: Tensor) -> Tensor:
        """Pairs that are computed, of all pairs in order. takes: bool for each of them."""
        return order[takes]

    def places(self, batch: int) -> Tensor:
        """Place of each row among the tokens of `batch` whole sequences, int64 [T]; -1 for padding."""
        return torch.arange(batch * self.seq)

    def everywhere(self, chosen: Tensor, batch: int) -> Tensor:
        """Experts chosen by all tokens of this rank's sequences, without padding, [batch seq, k], from those of its
        rows, [T, k]."""
        return chosen

    def sum_loads(self, loads: Tensor, scope: str) -> Tensor:
        """Choices of each expert [B, E] in whole sequences from those of this rank's rows; "global": in all of them
        together, [1, E]."""
        return loads.sum(0, keepdim=True) if scope == "global" else loads

    @property
    def sequences(self) -> int:
        """Sequences that are routed at the same time on all ranks together, over those that are here."""
        return 1

    def counts(self, sent: Tensor, pairs: int | None = None) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        """From the pairs of this rank for each expert, [E]: how many go to each rank; and from each rank how many come
        for each expert here. pairs: their sum, where no layout tells it to a step without values."""
        per_expert = sent.tolist()
        return [sum(per_expert)], [per_expert]

    def to_experts(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows, sorted by expert, for the experts' ranks; returns what comes here, rank by rank."""
        return rows

    def to_tokens(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows
