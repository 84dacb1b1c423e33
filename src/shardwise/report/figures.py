"""SVG building blocks: stacked bars with their legend and scale.

Inside a page the figures stretch with their container while their text keeps its size: positions along x are
percentages. Classes and colours come from `palette.py`; a page that embeds a figure brings `figure_css()` and
`hatches()` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.report.page.markup import Markup, element, number
from shardwise.report.page.palette import KINDS, classes_of
from shardwise.report.step_report import Bytes

ROW, BAR_TOP, BAR_HEIGHT = 38, 7, 24
"""Height of a bar's row, and where the bar lies in it, in pixels."""

CUT = 4.0
"""Bars are cut, visibly, at this multiple of a capacity, so that what fits remains readable beside what does not."""


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar. kind: a key of `palette.KINDS`. value: its length in the chart's unit."""

    kind: str
    value: float


@dataclass(frozen=True)
class Bar:
    """One stacked bar: its name, a second line of smaller text, its segments from left to right.

    total: what is written beside it; the segments' sum, unless they are not all there at the same time.
    """

    label: str
    detail: str
    segments: tuple[BarSegment, ...]
    total: float = -1.0

    def __post_init__(self) -> None:
        if self.total < 0:
            object.__setattr__(self, "total", self.length)

    @property
    def length(self) -> float:
        return sum(segment.value for segment in self.segments)


def memory_bar(label: str, detail: str, held: Bytes) -> Bar:
    """A bar of the classes of bytes, the most of each; beside it the peak, which may be less than their sum."""
    return Bar(label, detail, tuple(BarSegment(name, getattr(held, name)) for name in classes_of([held])), held.total)


def ticks(limit: float, unit: float = 1.0, about: int = 5) -> list[float]:
    """Round positions from 0 to `limit`: 1, 2 or 5 times a power of ten, counted in `unit`s."""
    if limit <= 0:
        return [0.0]
    rough = limit / unit / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = unit * power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [step * i for i in range(int(limit / step * 1.000001) + 1)]


def byte_ticks(limit: float, binary: bool = False) -> list[float]:
    """`ticks` at round numbers of kB, MB, GB, ... or of KiB, MiB, GiB, ..."""
    base = 1024.0 if binary else 1000.0
    return ticks(limit, base ** max(0, int(math.log(max(limit, 1), base))))


def tick_label(text: str) -> str:
    """A scale's label without zeros behind the point: "20.0 MB" is "20 MB"."""
    head, _, unit = text.partition(" ")
    return f"{head.rstrip('0').rstrip('.') if '.' in head else head} {unit}".rstrip()


def hatches() -> Markup:
    """The pattern definitions that bars refer to; once a document."""
    patterns = [
        element(
            "pattern",
            element("path", d=kind.hatch, class_="hatch"),
            id=f"hatch-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name, kind in KINDS.items()
        if kind.hatch
    ]
    return element("defs", *patterns)


def swatch(kind: str) -> Markup:
    """A legend's sample of one kind, 22 by 16 pixels."""
    look = KINDS[kind]
    if not look.letter:
        line = element("line", x1=0, x2=22, y1=8, y2=8, class_=f"curve l-{kind}")
        dot = element("circle", cx=11, cy=8, r=3.5, class_=f"dot k-{kind}") if look.dotted else None
        return element("svg", line, dot, width=22, height=16, aria_hidden="true")
    return element("svg", *area(kind, "0", "22", 0, 16, "11"), width=22, height=16, aria_hidden="true")


def legend(kinds: Mapping[str, str] | Sequence[str]) -> Markup:
    """An HTML list of samples with their names; a mapping gives names of its own."""
    names = kinds if isinstance(kinds, Mapping) else {kind: KINDS[kind].label for kind in kinds}
    items = [element("li", swatch(kind), " ", name) for kind, name in names.items()]
    return element("ul", *items, class_="legend")


def bar_svg(
    bar: Bar, limit: float, describe: Callable[[float], str], marks: Sequence[float], capacity: float | None = None
) -> Markup:
    """One stretching bar on a scale from 0 to `limit`, over grid lines at `marks` and a dashed line at `capacity`."""
    parts: list[Markup] = [_rule(mark / limit, "gridline") for mark in marks]
    parts += _segments(bar, limit, describe)
    if bar.length > limit:
        parts.append(_torn_edge())
    if capacity is not None and capacity <= limit:
        parts += [_rule(capacity / limit, kind) for kind in ("under", "limit")]
    label = f"{bar.label} {bar.detail}: {describe(bar.total)}"
    return element("svg", *parts, class_="bar", width="100%", height=ROW, role="img", aria_label=label)


def axis_svg(limit: float, describe: Callable[[float], str], marks: Sequence[float]) -> Markup:
    """The stretching scale below the bars. Every second label gives way on narrow screens."""
    labels = []
    for i, mark in enumerate(marks):
        share = mark / limit
        anchor = "start" if share < 0.02 else "end" if share > 0.96 else "middle"
        name = "muted sparse" if i % 2 else "muted"
        labels.append(
            element("text", tick_label(describe(mark)), x=percent(share), y=13, text_anchor=anchor, class_=name)
        )
    return element("svg", *labels, class_="axis", width="100%", height=18, aria_hidden="true")


def scale(bars: Sequence[Bar], capacity: float | None) -> float:
    """The right end of a chart's scale: the longest bar, or `CUT` capacities when a bar is longer than that."""
    longest = max((bar.length for bar in bars), default=0.0)
    if capacity is None:
        return longest * 1.02 or 1.0
    return min(max(longest, capacity) * 1.02, CUT * capacity) or 1.0


def percent(share: float) -> str:
    """An SVG length: 0.25 is 25%."""
    return number(100.0 * share) + "%"


def _rule(share: float, kind: str) -> Markup:
    return element("line", x1=percent(share), x2=percent(share), y1=0, y2="100%", class_=kind)


def area(kind: str, x: str, width: str, y: float, height: float, letter_at: str | None) -> Iterator[Markup]:
    """A coloured, hatched rectangle, with its letter where there is room."""
    box = {"x": x, "width": width, "y": y, "height": height}
    yield element("rect", **box, class_=f"seg k-{kind}")
    if KINDS[kind].hatch:
        yield element("rect", **box, fill=f"url(#hatch-{kind})")
    if letter_at is not None:
        yield element(
            "text",
            KINDS[kind].letter,
            x=letter_at,
            y=y + height / 2 + 4,
            text_anchor="middle",
            class_=f"letter on-{kind}",
        )


def _segments(bar: Bar, limit: float, describe: Callable[[float], str]) -> list[Markup]:
    parts, at = [], 0.0
    for segment in bar.segments:
        share = min(segment.value / limit, 1.0 - at)
        if share <= 0:
            continue
        letter = percent(at + share / 2) if share > 0.05 else None
        text = element("title", f"{KINDS[segment.kind].label}: {describe(segment.value)}")
        parts.append(element("g", text, *area(segment.kind, percent(at), percent(share), BAR_TOP, BAR_HEIGHT, letter)))
        at += share
    return parts


def _torn_edge() -> Markup:
    """A zigzag at the right end: the bar goes on."""
    edge = element("path", d="M-8,5 l6,5 l-6,5 l6,5 l-6,5 l6,5 l-3,3 H8 V5 Z", class_="torn")
    return element("svg", edge, x="100%", overflow="visible")


def used_kinds(bars: Sequence[Bar]) -> list[str]:
    """The kinds that some bar shows, in the palette's order."""
    used = {segment.kind for bar in bars for segment in bar.segments if segment.value > 0}
    return [kind for kind in KINDS if kind in used]
