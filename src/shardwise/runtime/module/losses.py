"""Losses of a model by its class of transformers: from a micro-batch's rows to (sum, what it is summed over).

Sums are divided by the number over all ranks, however many a rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.job.losses import LossConfig
from shardwise.runtime.tensor.loss import IGNORED


class LossRows(NamedTuple):
    """A micro-batch of B rows of S tokens."""

    ids: Tensor
    """[B, S]."""
    targets: Tensor
    """[B, S]: the next tokens, `IGNORED` where they do not count."""
    positions: Tensor | None = None
    """[B, S]: where they restart, another document begins, which does not see the one before; None to count up."""
    reference: Tensor | None = None
    """[B] of preference pairs: log p(chosen) - log p(rejected) of the reference, fp64."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of a text without values, made when it is called. packed: whether they have several documents."""

    seq: int
    packed: bool = False
    rows: int = 2
    preferred: bool = False
    """Whether they are pairs of preferences."""

    def __call__(self) -> LossRows:
        ids = torch.zeros(self.rows, self.seq, dtype=torch.int64)
        reference = torch.zeros(self.rows, dtype=torch.float64) if self.preferred else None
        return LossRows(ids, ids, ids if self.packed else None, reference)


Loss = Callable[[Any, LossRows], tuple[Tensor, Tensor | int]]


def loss_of(config: LossConfig, teacher: nn.Module | None = None) -> Loss:
    """The loss of a configuration. teacher: of a distillation, whole on every rank."""
    if config.kind == "dpo":
        return partial(preference_loss, beta=config.beta)
    if config.kind == "distill" and teacher is not None:
        return partial(distillation_loss, teacher=teacher, temperature=config.temperature)
    return token_loss


def _logits(run: Any, rows: LossRows) -> Tensor:
    """[B, S, vocabulary], in fp32 at least."""
    more = {} if rows.positions is None else {"position_ids": rows.positions}
    logits: Tensor = run(input_ids=rows.ids, use_cache=False, **more).logits
    return logits.float() if logits.dtype.itemsize < 4 else logits


def token_loss(run: Any, rows: LossRows) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the tokens that count, and their number. rows: a pair (ids, targets) will do, too."""
    rows = LossRows(*rows)
    logits = _logits(run, rows).flatten(0, 1)
    loss = F.cross_entropy(logits, rows.targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, (rows.targets != IGNORED).sum()


def margins(run: Any, rows: LossRows) -> Tensor:
    """log p(chosen) - log p(rejected) of every pair [B], which has one half of a row per answer: a sequence alone."""
    halves = LossRows(*(x.unflatten(1, (2, -1)).flatten(0, 1) for x in (rows.ids, rows.targets)))
    logits = _logits(run, halves).transpose(1, 2)
    losses = F.cross_entropy(logits, halves.targets, reduction="none", ignore_index=IGNORED).sum(1)
    return losses[1::2] - losses[::2]


def preference_loss(run: Any, rows: LossRows, beta: float) -> tuple[Tensor, int]:
    """-log sigmoid of beta times by how much more than the reference the model prefers the chosen answers, summed over
    the pairs, and their number."""
    made = margins(run, rows)
    before = torch.zeros_like(made) if rows.reference is None else rows.reference.to(made.dtype)
    return F.softplus(-beta * (made - before)).sum(), len(made)


def distillation_loss(run: Any, rows: LossRows, teacher: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """temperature² KL(teacher || model) of both distributions at that temperature, summed over the tokens that count,
    and their number."""
    counts = rows.targets != IGNORED
    logits = _logits(run, rows)[counts] / temperature
    with torch.no_grad():
        goal = _logits(teacher, rows)[counts].to(logits.dtype) / temperature
    log_p, log_q = torch.log_softmax(goal, -1), torch.log_softmax(logits, -1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True) * temperature**2, counts.sum()
