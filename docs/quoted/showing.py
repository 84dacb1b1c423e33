"""Which function computes which claim, and what it says in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.validation.claims import Claim, claims

Inputs = Mapping[str, Any]
Values = dict[str, Any]
Compute = Callable[[Inputs], Values]
"""The claim's inputs -> computed values; what the claim expects has the same name there."""

Samples = list[tuple[dict[str, float], float]]
"""A formula's values: the letters of the formula, and what a function of shardwise gives for them."""


@dataclass(frozen=True)
class Shown:
    """A claim with what shardwise computes for it. text: the values in words. by: names of public functions and
    classes, `shardwise.` left out, or commands."""

    claim: Claim
    values: Values
    text: str
    by: tuple[str, ...]


@dataclass(frozen=True)
class _Showing:
    compute: Compute
    text: str
    by: tuple[str, ...]


_TOPICS: dict[tuple[int, str], dict[str, _Showing]] = {}


def topic(place: int, title: str) -> Callable[..., Callable[[Compute], Compute]]:
    """A decorator for the functions of one topic: `shows(id, *by, text=...)`, the text formatted with the values.

    place: where the topic stands among the others.
    """
    members = _TOPICS.setdefault((place, title), {})

    def shows(name: str, *by: str, text: str) -> Callable[[Compute], Compute]:
        def register(compute: Compute) -> Compute:
            members[name] = _Showing(compute, text, by)
            return compute

        return register

    return shows


def topics() -> dict[str, list[str]]:
    """Topic -> the ids of its claims, in the order in which they are explained."""
    return {title: list(_TOPICS[place, title]) for place, title in sorted(_TOPICS)}


def missing() -> list[str]:
    """Ids of claims that nothing computes."""
    known = {name for members in _TOPICS.values() for name in members}
    return [name for name in claims() if name not in known]


def computed_by(name: str) -> tuple[str, ...]:
    """`Shown.by` without computing anything. Raises `KeyError` for an id that is not known."""
    return _found(name).by


def show(name: str) -> Shown:
    """Compute one claim. Raises `KeyError` for an id that is not known."""
    found = _found(name)
    claim = claims()[name]
    values = found.compute(claim.inputs)
    return Shown(claim, values, found.text.format_map(values), found.by)


def _found(name: str) -> _Showing:
    return {id: showing for members in _TOPICS.values() for id, showing in members.items()}[name]
