"""Stacked bars with their names, totals, legend and scale, as one figure of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwise.report.figures import Bar, axis_svg, bar_svg, byte_ticks, legend, scale, used_kinds
from shardwise.report.page.markup import Markup, element
from shardwise.report.units import format_bytes

Describe = Callable[[float], str]


def byte_figure(groups: Sequence[Sequence[Bar]], binary: bool, capacity: int | None = None) -> Markup:
    """A figure of memory bars; `capacity` bytes is a dashed line, and totals beyond it stand out."""
    limit = scale([bar for group in groups for bar in group], capacity)

    def describe(value: float) -> str:
        return format_bytes(value, binary)

    return bar_figure(groups, limit, describe, byte_ticks(limit, binary), capacity)


def bar_figure(
    groups: Sequence[Sequence[Bar]],
    limit: float,
    describe: Describe,
    marks: Sequence[float],
    capacity: float | None = None,
) -> Markup:
    """Bars on one scale from 0 to `limit`, groups apart, with a legend; a label shared by a group is shown once."""
    bars = [bar for group in groups for bar in group]
    rows = [row for group in groups for row in _bar_group(group, limit, describe, marks, capacity)]
    corner = element("span", class_="corner")
    scale_row = (corner, element("div", axis_svg(limit, describe, marks)), element("span"))
    parts = [legend(used_kinds(bars)), element("div", *rows[:-1], *scale_row, class_="bars")]
    if any(bar.length > limit for bar in bars):
        text = f"Bars beyond {describe(limit)} are cut; their totals are beside them."
        parts.append(element("p", text, class_="note"))
    return element("figure", *parts)


def _bar_group(
    bars: Sequence[Bar], limit: float, describe: Describe, marks: Sequence[float], capacity: float | None
) -> Iterator[Markup]:
    shared = len({bar.label for bar in bars}) == 1
    for i, bar in enumerate(bars):
        name = element("span", bar.label, class_="again" if shared and i else None)
        yield element("div", name, element("small", bar.detail), class_="name")
        yield element("div", bar_svg(bar, limit, describe, marks, capacity))
        over = capacity is not None and bar.total > capacity
        yield element("div", describe(bar.total), class_="total bad" if over else "total")
    yield element("div", class_="apart")
