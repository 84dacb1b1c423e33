"""One evaluation of a formula for many candidates: `Lanes` take the place of a formula's integers.

Formulas of `predict.memory` are written for one layout. They compute all at once if their integers are arrays in
disguise: arithmetic is elementwise, and a comparison has one answer for all lanes. Where lanes differ in the answer,
`by_path` evaluates the two groups apart, so that every candidate takes the path of its own numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.layout import UnitPlan
from shardwise.predict.memory.transients import LiveBytes

SHARED = ("schedules", "fused", "windows", "micro_batches")
"""Fields of a plan that are equal in all lanes."""


class Diverged(Exception):
    """Lanes that do not take the same path."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first = first
        """Mask of the lanes of one path."""


def _elementwise(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: Lanes(operation(self.values, other.values if isinstance(other, Lanes) else other))


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: Lanes(operation(other, self.values))


def _compared(operation: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], bool]:
    return lambda self, other: _same(operation(self.values, other.values if isinstance(other, Lanes) else other))


def _same(answers: Any) -> bool:
    """The answer of all lanes. Raises `Diverged` where they differ."""
    if answers.all():
        return True
    if answers.any():
        raise Diverged(answers)
    return False


class Lanes:
    """An integer of each candidate, which computes as one integer does."""

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    __add__, __radd__ = _elementwise(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _elementwise(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _elementwise(operator.mul), _reflected(operator.mul)
    __floordiv__, __rfloordiv__ = _elementwise(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _elementwise(operator.mod), _reflected(operator.mod)
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)
    __eq__, __ne__ = _compared(operator.eq), _compared(operator.ne)  # type: ignore[assignment]

    def __neg__(self) -> Lanes:
        return Lanes(-self.values)

    def __bool__(self) -> bool:
        return _same(self.values != 0)

    def __index__(self) -> int:
        """The integer of all lanes, for what takes no other. Raises `Diverged` where they differ."""
        first = int(self.values[0])
        _same(self.values == first)
        return first

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))


def _larger(a: Any, b: Any) -> Any:
    """The larger number in each lane."""
    if not (isinstance(a, Lanes) or isinstance(b, Lanes)):
        return max(a, b)
    return Lanes(np.maximum(*(each.values if isinstance(each, Lanes) else each for each in (a, b))))


class LiveLanes(LiveBytes):
    """The most bytes at one time of each lane, whichever moment that is."""

    __slots__ = ()

    def allocate(self, nbytes: Any) -> None:
        self.now += nbytes
        self.most = _larger(self.most, self.now)

    def transient(self, nbytes: Any) -> None:
        """As of `LiveBytes`."""
        self.most = _larger(self.most, self.now + nbytes)


def by_path(formula: Callable[..., Sequence[Any]], columns: Sequence[Any]) -> list[Any]:
    """Numbers of `formula` for each row of some columns of integers, an array for each number that it returns."""
    columns = [np.asarray(column) for column in columns]
    rows = len(columns[0])
    paths, results = [np.arange(rows)], list[Any]()
    while paths:
        at = paths.pop()
        try:
            numbers = formula(*(_lanes(column[at]) for column in columns))
        except Diverged as diverged:
            paths += [at[diverged.first], at[~diverged.first]]
            continue
        results = results or [np.empty(rows) for _ in numbers]
        for result, number in zip(results, numbers, strict=True):
            result[at] = number.values if isinstance(number, Lanes) else number
    return results


def _lanes(values: Any) -> Any:
    """Lanes, or the plain integer that all of them are."""
    first = int(values[0])
    return first if (values == first).all() else Lanes(values)


def with_lanes(plan: UnitPlan, keys: Mapping[str, Any]) -> UnitPlan:
    """The plan of another layout of the same micro-batches. keys: those of the layout that may be lanes."""
    layout = copy(plan.layout)
    for key, value in keys.items():
        object.__setattr__(layout, key, value)
    wide = replace(plan, layout=layout)
    vars(wide).update({name: getattr(plan, name) for name in SHARED})
    return wide
