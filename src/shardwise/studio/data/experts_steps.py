"""One layer of experts, step by step: a sentence for each step, and a few words for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.report.units import format_bytes, format_share
from shardwise.studio.data.experts_layer import ExpertLayer, ExpertRank

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
    e, first = layer.model.experts, layer.ranks[0]
    assert e
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
    """What tensor-parallel ranks do at the end."""
    if layer.layout.tp == 1:
        return ""
    if len(layer.ranks[0].tokens) < layer.tokens:
        return " The tp ranks gather each other's slices."
    return " The tp ranks add up their partial results: each had a part of every expert's width."


def _largest(active: int) -> str:
    return "the largest one chooses" if active == 1 else f"the {active} largest choose"
