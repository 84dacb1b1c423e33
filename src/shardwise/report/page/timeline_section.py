"""The section that draws the timeline of a step: what a rank computed, what was under way meanwhile, what that cost."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from shardwise.report.exposure import (
    COMMUNICATION,
    COMPUTE,
    WAITING,
    Exposure,
    Intervals,
    TimeSpan,
    exposure,
    overlap,
    spans,
    union,
)
from shardwise.report.figures import BAR_HEIGHT, BAR_TOP, ROW, area, axis_svg, legend, percent, ticks
from shardwise.report.page.document import Section, TableCell, details, table
from shardwise.report.page.markup import Markup, element, join
from shardwise.report.page.palette import KINDS
from shardwise.report.step_report import Role, StepReport
from shardwise.report.units import byte_note, format_bytes, format_ranks, format_share, format_time

MOST_ROLES = 4
"""Roles whose timeline a page shows; a trace has all of them."""

MOST_PIECES = 500
"""Rectangles in a row; a row of more spans is drawn in so many equal cells, each as most of its time is."""

_NAMES = {"hidden": "under way behind computation", "waited": "nothing computed meanwhile"}
"""What the legend calls the kinds that mean something else in other figures."""


def timeline_section(report: StepReport, binary: bool = False) -> Section:
    """The timeline of the lowest rank of each role that has one, with its shares of the step.

    Raises `UserError` when a timeline is damaged.
    """
    told = [role for role in report.roles if role.timeline]
    lead = (
        "One step of a rank. A collective lasts from its issue to its completion, slower ranks included; it costs the "
        "step what is exposed: the time in which nothing is computed meanwhile."
    )
    if not told:
        return Section("Timeline", element("p", "No timeline was recorded.", class_="empty"), lead)
    parts = [_timeline(role, binary) for role in told[:MOST_ROLES]]
    others = [details(format_ranks((min(r.ranks),)), p) for r, p in zip(told[1:], parts[1:], strict=False)]
    head = element("h3", f"Rank {min(told[0].ranks)}")
    rest = len(told) - len(parts)
    note = element("p", f"{rest} more are in the report.", class_="note") if rest else None
    return Section("Timeline", join([head, parts[0], *others, note]), lead)


def _timeline(role: Role, binary: bool) -> Markup:
    timeline = spans(role)
    figures = exposure(timeline)
    behind = details("Collectives by operation", _traffic_table(role, figures, binary))
    return join([_figure(timeline, figures), _share_table(role, timeline, figures), behind])


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a row, in nanoseconds. text: what it says when it is pointed at."""

    kind: str
    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class _Row:
    """A row of the drawing. total: nanoseconds that the text at its end stands for."""

    label: str
    detail: str
    pieces: tuple[_Piece, ...]
    total: int


def _figure(timeline: tuple[TimeSpan, ...], figures: Exposure) -> Markup:
    rows = [row for row in _rows(timeline, figures) if row.pieces]
    seconds = figures.step / 1e9 or 1.0
    marks = ticks(seconds, 10.0 ** math.floor(math.log10(seconds)))
    cells = [cell for row in rows for cell in _row_cells(row, figures, [mark / seconds for mark in marks])]
    axis = (element("span", class_="corner"), element("div", axis_svg(seconds, format_time, marks)), element("span"))
    used = {piece.kind for row in rows for piece in row.pieces}
    names = {kind: _NAMES.get(kind, look.label) for kind, look in KINDS.items() if kind in used}
    return element("figure", legend(names), element("div", *cells, *axis, class_="bars"))


def _rows(timeline: tuple[TimeSpan, ...], figures: Exposure) -> Iterator[_Row]:
    computing = [span for span in timeline if span.stream == COMPUTE]
    compute = union((span.start, span.stop) for span in computing)
    pieces = tuple(_Piece(_compute_kind(span), span.start, span.stop, _says(span)) for span in computing)
    yield _Row("computed", "", pieces, figures.compute)
    for kind in figures.kinds:
        mine = [span for span in timeline if span.stream == COMMUNICATION and span.kind == (kind.op, kind.axes)]
        yield _Row(kind.op, kind.axes, tuple(_under_way(mine, compute)), kind.time)
    waiting = (span for span in timeline if span.stream == WAITING)
    pieces = tuple(_Piece("waited", span.start, span.stop, _says(span)) for span in waiting)
    yield _Row("stood still", "", pieces, figures.waiting)


def _compute_kind(span: TimeSpan) -> str:
    first = span.name.partition(" ")[0]
    if first.startswith("optimizer"):
        return "update"
    return first if first in ("forward", "backward", "recompute") else "rest"


def _says(span: TimeSpan) -> str:
    return f"{span.name}: {format_time((span.stop - span.start) / 1e9)}"


def _under_way(mine: list[TimeSpan], compute: Intervals) -> Iterator[_Piece]:
    """Where some of the collectives were under way, cut where computation begins and ends."""
    drawn = 0
    for span in sorted(mine, key=lambda span: (span.start, span.stop)):
        at = max(span.start, drawn)
        first, last = bisect_right(compute, at, key=itemgetter(1)), bisect_left(compute, span.stop, key=itemgetter(0))
        for start, stop in overlap(compute[first:last], [(at, span.stop)]):
            if at < start:
                yield _Piece("waited", at, start, _says(span))
            yield _Piece("hidden", start, stop, _says(span))
            at = stop
        if at < span.stop:
            yield _Piece("waited", at, span.stop, _says(span))
        drawn = max(drawn, span.stop)


def _row_cells(row: _Row, figures: Exposure, grid: list[float]) -> Iterator[Markup]:
    yield element("div", element("span", row.label), element("small", row.detail), class_="name")
    pieces = _coarse(row.pieces, figures.step) if len(row.pieces) > MOST_PIECES else row.pieces
    lines = [element("line", x1=percent(at), x2=percent(at), y1=0, y2="100%", class_="gridline") for at in grid]
    drawn = [_rectangle(piece, figures.step) for piece in pieces if piece.start < piece.stop]
    share = format_share(figures.share(row.total))
    label = f"{row.label} {row.detail}: {share} of the step"
    svg = element("svg", *lines, *drawn, class_="bar", width="100%", height=ROW, role="img", aria_label=label)
    yield element("div", svg)
    yield element("div", share, class_="total")


def _rectangle(piece: _Piece, step: int) -> Markup:
    """With outline, hatch and letter as far as there is room for them."""
    start, share = piece.start / step, (piece.stop - piece.start) / step
    title = element("title", piece.text)
    if share < 0.004:
        box = {"x": percent(start), "width": percent(share), "y": BAR_TOP, "height": BAR_HEIGHT}
        return element("rect", title, **box, class_=f"k-{piece.kind}")
    letter = percent(start + share / 2) if share > 0.02 else None
    return element("g", title, *area(piece.kind, percent(start), percent(share), BAR_TOP, BAR_HEIGHT, letter))


def _coarse(pieces: Iterable[_Piece], step: int) -> tuple[_Piece, ...]:
    """The same row in `MOST_PIECES` equal cells, each of the kind that fills most of it, equal neighbours joined."""
    edges = [step * i // MOST_PIECES for i in range(MOST_PIECES + 1)]
    held: list[dict[str, int]] = [{} for _ in range(MOST_PIECES)]
    for piece in pieces:
        cell = min(piece.start * MOST_PIECES // step, MOST_PIECES - 1)
        while cell < MOST_PIECES and edges[cell] < piece.stop:
            shared = min(piece.stop, edges[cell + 1]) - max(piece.start, edges[cell])
            held[cell][piece.kind] = held[cell].get(piece.kind, 0) + shared
            cell += 1
    joined: list[_Piece] = []
    for i, cell_kinds in enumerate(held):
        kind = max(cell_kinds, key=cell_kinds.__getitem__, default="")
        if not kind or 2 * sum(cell_kinds.values()) < edges[i + 1] - edges[i]:
            continue
        if joined and joined[-1].kind == kind and joined[-1].stop == edges[i]:
            joined[-1] = _Piece(kind, joined[-1].start, edges[i + 1], KINDS[kind].label)
        else:
            joined.append(_Piece(kind, edges[i], edges[i + 1], KINDS[kind].label))
    return tuple(joined)


def _share_table(role: Role, timeline: tuple[TimeSpan, ...], figures: Exposure) -> Markup:
    """What the step's time went to: the rows add up to it."""
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for span in timeline:
        if span.stream == COMPUTE:
            by_kind.setdefault(_compute_kind(span), []).append((span.start, span.stop))
    times = {KINDS[kind].label: sum(b - a for a, b in union(by_kind[kind])) for kind in KINDS if kind in by_kind}
    times |= {"communication, exposed": figures.exposed, "neither": figures.idle}
    rows: list[tuple[object, ...]] = [_share_row(name, time, figures) for name, time in times.items()]
    rows.append((TableCell("one step", "strong"), *_share_row("", figures.step, figures)[1:]))
    rows.append(_share_row("communication, behind computation", figures.hidden, figures))
    return table(f"Time of one step of {role.role}", ("what", "time", "share of the step"), rows, (1, 2))


def _share_row(name: str, time: int, figures: Exposure) -> tuple[object, ...]:
    return name, format_time(time / 1e9), format_share(figures.share(time))


def _traffic_table(role: Role, figures: Exposure, binary: bool) -> Markup:
    heads = ("operation", "axes", "calls", f"payload ({byte_note(binary)})", "time", "hidden", "exposed", "of the step")
    rows = []
    for kind in figures.kinds:
        times = (format_time(time / 1e9) for time in (kind.time, kind.hidden, kind.exposed))
        sizes = (f"{kind.calls:,}", format_bytes(kind.bytes, binary))
        share = format_share(figures.share(kind.exposed))
        rows.append((element("code", kind.op), kind.axes, *sizes, *times, share))
    return table(f"Collectives of {role.role} by operation", heads, rows, range(2, 8))
