"""Line plots as SVG text, in a grid of panels, for the documentation. No dependency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
COLORS = ("#1f4e79", "#c0392b", "#1e8449", "#b9770e", "#7d3c98", "#444444")
WIDTH, HEIGHT = 420, 260
"""Of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 40
"""Margins of a panel."""
LEGEND = 28
"""Height of the legend above all panels."""


@dataclass(frozen=True)
class Panel:
    """One plot: name of a line -> its points."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]


def grid(panels: Sequence[Sequence[Panel]]) -> str:
    """Rows of panels with one legend. A line of one name has one color; panels of a column have one x axis, and all
    have one y axis."""
    names = list(dict.fromkeys(name for row in panels for panel in row for name in panel.lines))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    width, height = WIDTH * max(map(len, panels)), LEGEND + HEIGHT * len(panels)
    y_span = _span([y for row in panels for panel in row for line in panel.lines.values() for _, y in line])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(colors),
    ]
    for r, row in enumerate(panels):
        for c, panel in enumerate(row):
            column = [other[c] for other in panels if c < len(other)]
            x_span = _span([x for one in column for line in one.lines.values() for x, _ in line], zero=True)
            parts.append(f'<g transform="translate({c * WIDTH} {LEGEND + r * HEIGHT})">')
            parts += [*_panel(panel, x_span, y_span, colors), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend(colors: Mapping[str, str]) -> list[str]:
    parts, x = [], LEFT
    for name, color in colors.items():
        parts.append(f'<path d="M{x} 16h18" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 23}" y="20">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts


def _panel(
    panel: Panel, x_span: tuple[float, float], y_span: tuple[float, float], colors: Mapping[str, str]
) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + (x - x_span[0]) / (x_span[1] - x_span[0]) * (right - LEFT)

    def y_of(y: float) -> float:
        return bottom - (y - y_span[0]) / (y_span[1] - y_span[0]) * (bottom - TOP)

    middle = (LEFT + right) / 2
    parts = [
        f'<text x="{middle:.0f}" y="{TOP - 10}" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>'
    ]
    for x in ticks(*x_span):
        parts.append(f'<path d="M{x_of(x):.1f} {TOP}V{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x_of(x):.1f}" y="{bottom + 14}" text-anchor="middle">{x:,g}</text>')
    for y in ticks(*y_span):
        parts.append(f'<path d="M{LEFT} {y_of(y):.1f}H{right}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>')
    half = (TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{half:.0f}" text-anchor="middle" transform="rotate(-90 14 {half:.0f})">'
        f"{escape(panel.y_label)}</text>"
    )
    for name, points in panel.lines.items():
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="1.6"/>')
    return parts


def _span(values: Sequence[float], zero: bool = False) -> tuple[float, float]:
    """The range of an axis, never empty."""
    low, high = (0.0 if zero else min(values, default=0.0)), max(values, default=1.0)
    return low, high if high > low else low + 1.0


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers inside a range."""
    rough = (high - low) / about
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * unit for unit in (1, 2, 5, 10) if size * unit >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
