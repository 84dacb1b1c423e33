"""Cases with experts in which rounding decides nothing."""

from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

from torch import Tensor

from harness.reference import Case, reference
from shardwise.decoder.experts import Routing, route
from shardwise.decoder.experts import _within_groups as within_groups
from shardwise.model.config import Experts

GAP, TRIES = 2e-6, 40
"""Least difference of scores in fp32, which rounds at 1e-7, and data to look for it in."""


def settled(case: Case) -> Case:
    """The case, in fp32 on the first data for which no choice of an expert on one device is nearly a tie.

    Rounding, which differs between layouts, must not decide one. bf16 is compared with one device in bf16, which also
    decides some otherwise than fp32.
    """
    if case.precision != "fp32":
        return case
    drawn = (replace(case, data=case.data + 100 * i) for i in range(TRIES))
    return next(each for each in drawn if _least_gap(each) > GAP)


@lru_cache(maxsize=64)
def _least_gap(case: Case) -> float:
    """The smallest difference between scores of a chosen expert, or group, and of one that is not, over all steps."""
    gaps = []

    def watched(logits: Tensor, bias: Tensor | None, e: Experts, chosen: Tensor | None = None) -> Routing:
        scores = logits.sigmoid() if e.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores.detach() if bias is None else scores.detach() + bias
        if e.active_groups < e.groups:
            best = choice.unflatten(-1, (e.groups, -1)).topk(2, -1).values.sum(-1).sort(-1, descending=True).values
            gaps.append((best[:, e.active_groups - 1] - best[:, e.active_groups]).min())
            choice = within_groups(choice, e)
        best = choice.topk(e.active + 1, -1).values
        gaps.append((best[:, -2] - best[:, -1]).min())
        return route(logits, bias, e, chosen)

    with patch("shardwise.decoder.experts.route", watched):
        reference.__wrapped__(case)
    return float(min(gaps))
