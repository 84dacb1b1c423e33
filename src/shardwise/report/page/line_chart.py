"""Line charts as SVG that stretches with its container while its text keeps its size.

The lines are drawn in a stretched inner picture, with strokes that do not stretch; texts and dots lie outside it, at
percentages. A page that embeds one brings `palette.figure_css()` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.report.figures import percent, ticks
from shardwise.report.page.markup import Markup, element, number
from shardwise.report.page.palette import KINDS


@dataclass(frozen=True)
class Series:
    """One line of a chart. kind: a key of `palette.KINDS`. points: (x, y); those that are not finite are left out."""

    kind: str
    points: tuple[tuple[float, float], ...]


def line_chart(
    series: Sequence[Series],
    reference: tuple[str, float] | None,
    label: str,
    x_name: str,
    describe: Callable[[float], str],
) -> Markup:
    """A stretching chart of lines over a common x, with an optional named horizontal reference line.

    label: what a screen reader says of the whole. x_name: what x counts ("step"). describe: text of a y value.
    """
    shown = [Series(s.kind, tuple(p for p in s.points if all(map(math.isfinite, p)))) for s in series]
    points = [point for s in shown for point in s.points]
    if not points:
        return element("p", "No finite value was recorded.", class_="empty")
    levels = [y for _, y in points] + ([reference[1]] if reference else [])
    frame = _Frame.around([x for x, _ in points], levels)
    parts = [*_grid(frame, x_name, describe)]
    if reference:
        parts += _reference(frame, *reference, describe)
    curves = [
        element("path", d=_path(s.points, frame), class_=f"curve l-{s.kind}", **_FIXED) for s in shown if s.points
    ]
    parts.append(element("svg", *curves, viewBox="0 0 1000 1000", preserveAspectRatio="none", **_PLOT))
    parts += [mark for s in shown for mark in _markers(s, frame, x_name, describe)]
    return element("svg", *parts, class_="lines", width="100%", height=_HEIGHT + 42, role="img", aria_label=label)


def thin(points: Sequence[tuple[float, float]], most: int = 600) -> tuple[tuple[float, float], ...]:
    """At most about `most` points of a line: the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    size = math.ceil(len(points) / (most / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return tuple(kept)


@dataclass(frozen=True)
class _Frame:
    """The data's box: what part of it the chart shows."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
        low, high = min(ys), max(ys)
        margin = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
        right = max(xs) if max(xs) > min(xs) else min(xs) + 1.0
        return cls(min(xs), right, low - margin, high + margin)

    def x(self, value: float) -> float:
        return (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return (self.high - value) / (self.high - self.low)


_HEIGHT = 260
_PLOT = {"width": "100%", "height": _HEIGHT}
_FIXED = {"vector_effect": "non-scaling-stroke"}


def _round_between(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    step = ticks(high - low, about=about)[1]
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(frame: _Frame, x_name: str, describe: Callable[[float], str]) -> Iterator[Markup]:
    for level in _round_between(frame.low, frame.high, 6):
        y = frame.y(level) * _HEIGHT
        yield element("line", x1=0, x2="100%", y1=y, y2=y, class_="gridline")
        yield element("text", describe(level), x=-10, y=y + 4, text_anchor="end", class_="muted")
    for i, mark in enumerate(_round_between(frame.left, frame.right, 6)):
        at = percent(frame.x(mark))
        name = "muted sparse" if i % 2 else "muted"
        yield element("text", f"{mark:,.6g}", x=at, y=_HEIGHT + 18, text_anchor="middle", class_=name)
    yield element("text", x_name, x="50%", y=_HEIGHT + 36, text_anchor="middle", class_="muted")


def _reference(frame: _Frame, name: str, level: float, describe: Callable[[float], str]) -> list[Markup]:
    y = frame.y(level) * _HEIGHT
    text = element("text", f"{name} {describe(level)}", x="100%", y=y - 6, text_anchor="end", class_="ink halo")
    return [element("line", x1=0, x2="100%", y1=y, y2=y, class_="reference"), text]


def _path(points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    spots = [f"{number(1000 * frame.x(x))},{number(1000 * frame.y(y))}" for x, y in thin(points)]
    return "M" + " L".join(spots)


def _markers(series: Series, frame: _Frame, x_name: str, describe: Callable[[float], str]) -> Iterator[Markup]:
    """Dots of a series that asks for them, and of a line of a single point; each says its value when pointed at."""
    visible = KINDS[series.kind].dotted or len(series.points) == 1
    for x, y in thin(series.points, 200):
        name = element("title", f"{x_name} {x:,.6g}, {KINDS[series.kind].label} {describe(y)}")
        kind = f"dot k-{series.kind}" if visible else "target"
        at = {"cx": percent(frame.x(x)), "cy": frame.y(y) * _HEIGHT}
        yield element("circle", name, **at, r=3.5 if visible else 6, class_=kind)
