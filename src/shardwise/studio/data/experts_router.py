"""A router with drawn scores, for the Experts view: it chooses as `decoder/experts.py` does, without torch.

Scores are counter-based random numbers, so that a token's scores are the same on every machine and for any number of
ranks.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.data.sampler import GOLDEN, splitmix64
from shardwise.model.config import Experts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOADS = ("balanced", "skewed")
"""balanced: the logits of each expert are shifted until all are chosen about equally often. skewed: the first experts
are more popular than the last."""
SKEW = 1.6
"""Shift of the first expert's logits over the last one's under a skewed load; between them it falls evenly."""
_SHIFTS = 16
_RATE = 0.6
"""Shift of an expert's logits for the logarithm of its load over the mean."""
_EVEN = 1.02
"""Load of the busiest expert over the mean at which the shifts end; one token more is allowed."""


class DrawnRouting(NamedTuple):
    """Experts of T tokens, k each."""

    chosen: Ints
    """[T, k], the best first."""
    weights: Floats
    """Factors of the outputs of the chosen experts: [T, k]."""


@lru_cache(maxsize=8)
def draw(tokens: int, e: Experts, load: str) -> DrawnRouting:
    """Experts of `tokens` tokens under one of `LOADS`."""
    logits = _noise(tokens, e.count)
    if load == "skewed":
        return route(logits + np.linspace(SKEW / 2, -SKEW / 2, e.count), e)
    return route(logits + _even(logits, e), e)


def route(logits: Floats, e: Experts) -> DrawnRouting:
    """Experts of each token from the router's logits [T, E]."""
    if e.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        scores = shifted / shifted.sum(-1, keepdims=True)
    best = _largest(_within_groups(scores, e), e.active)
    weights = np.take_along_axis(scores, best, -1)
    if e.normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    return DrawnRouting(best, weights * e.scale)


def counts(chosen: Ints, e: Experts) -> Ints:
    """Tokens of each sequence that chose each expert: [B, E] of chosen [B, S, k]."""
    return np.stack([np.bincount(rows.ravel(), minlength=e.count) for rows in chosen])


def taken(chosen: Ints, e: Experts) -> NDArray[np.bool_]:
    """Whether an expert takes a token: [B, S, k] of chosen [B, S, k]. Each takes the first of a sequence, up to its
    capacity."""
    flat = chosen.reshape(len(chosen), -1)
    order = np.argsort(flat, axis=1, kind="stable")
    loads = counts(chosen, e)
    starts = np.take_along_axis(loads.cumsum(1) - loads, np.take_along_axis(flat, order, 1), 1)
    takes = np.empty(flat.shape, dtype=bool)
    np.put_along_axis(takes, order, np.arange(flat.shape[1]) - starts < e.most(chosen.shape[1]), 1)
    return takes.reshape(chosen.shape)


def _within_groups(scores: Floats, e: Experts) -> Floats:
    """Scores [T, E], with those outside of the best groups at minus infinity."""
    if e.active_groups == e.groups:
        return scores
    grouped = scores.reshape(len(scores), e.groups, -1)
    best = -np.sort(-grouped, axis=-1)[..., : 1 if e.group_score == "max" else 2].sum(-1)
    mask = np.zeros_like(best, dtype=bool)
    np.put_along_axis(mask, _largest(best, e.active_groups), True, axis=-1)
    return np.where(mask[..., None], grouped, -np.inf).reshape(scores.shape)


def _largest(values: Floats, count: int) -> Ints:
    places = np.argpartition(-values, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(values, places, -1), axis=-1, kind="stable")
    return np.take_along_axis(places, order, -1)


def _even(logits: Floats, e: Experts) -> Floats:
    """Shifts of the logits [E] under which the loads are about equal: again and again up for an expert below the mean
    load, down for one above."""
    shift = np.zeros(e.count)
    best, least = shift, len(logits) * e.active
    for _ in range(_SHIFTS):
        loads = counts(route(logits + shift, e).chosen[None], e)[0]
        if loads.max() < least:
            best, least = shift, loads.max()
        if least <= _EVEN * loads.mean() + 1:
            break
        shift = shift - _RATE * np.log((loads + 1) / (loads.mean() + 1))
    return best


def _noise(rows: int, columns: int) -> Floats:
    """About standard normal numbers [rows, columns], each from four 16-bit parts of a hash of its place."""
    parts = splitmix64(np.arange(rows * columns, dtype=np.uint64) * GOLDEN).view(np.uint16).reshape(rows, columns, 4)
    mean, variance = 4 * 65535 / 2, 4 * (65536.0**2 - 1) / 12
    return (parts.astype(np.float64).sum(-1) - mean) / np.sqrt(variance)
