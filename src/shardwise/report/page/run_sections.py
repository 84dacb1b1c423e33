"""Sections about a run as a whole: its summary, what was run, its losses, what its figures leave out.

Loss events are dictionaries with `step` and `loss`, `validation_loss` or both, as in a run's events.jsonl; others are
passed over. A chart always has a table beside it that holds the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.report.compare import PEAK_TOLERANCE, ReportComparison
from shardwise.report.figures import (
    legend,
)
from shardwise.report.page.document import Section, check, details, table
from shardwise.report.page.line_chart import Series, line_chart
from shardwise.report.page.markup import Markup, element, join
from shardwise.report.step_report import StepReport
from shardwise.report.units import (
    format_count,
    format_share,
    format_time,
)

MOST_LOSS_ROWS = 120
"""Rows of the loss table; a longer run shows evenly spaced steps, and all steps with a validation loss."""


@dataclass(frozen=True)
class Card:
    """One figure of the summary. good: True and False colour it, None leaves it plain."""

    label: str
    value: str
    detail: str = ""
    good: bool | None = None


def summary_section(cards: Iterable[Card]) -> Section:
    """The figures that a reader wants first, without a heading."""
    return Section("", element("dl", *map(_card, cards), class_="cards"))


def _card(card: Card) -> Markup:
    value = card.value if card.good is None else check(card.good, card.value).text
    lines = [element("dt", card.label), element("dd", value), element("dd", card.detail, class_="detail")]
    return element("div", *lines, class_="card")


def comparison_cards(comparison: ReportComparison) -> tuple[Card, ...]:
    """Whether ledger, exact classes and peak agree; and how the settings differ, if they do."""
    a, b = comparison.labels
    rows, error = len(comparison.rows), comparison.peak_error
    equal = sum(row.equal for row in comparison.rows)
    ranks = {pair.role: len(pair.ranks) for pair in comparison.pairs}
    calls = sum(row.count_b * ranks[row.role] for row in comparison.rows)
    peak = format_share(error) if math.isfinite(error) else "no common rank"
    same = "equal" if comparison.exact_classes_equal else "not equal"
    classes = "parameters, gradients, optimizer, saved, communication"
    cards = (
        Card(
            "Ledger rows equal", f"{equal} of {rows}", f"{calls:,} calls a step over all ranks", comparison.equal_ledger
        ),
        Card("Bytes by class", same, classes, comparison.exact_classes_equal),
        Card("Largest peak error", peak, f"{a} against {b}; {PEAK_TOLERANCE:.0%} is allowed", error <= PEAK_TOLERANCE),
    )
    if not comparison.differences:
        return cards
    return (*cards, Card("Settings that differ", str(len(comparison.differences)), "; ".join(comparison.differences)))


def loss_card(events: Iterable[Mapping[str, Any]], unigram_entropy: float) -> Card:
    """The last validation loss against the unigram entropy of the validation text, both in nats a token."""
    losses = [y for _, y in _points(events, "validation_loss")]
    if not losses:
        return Card("Validation loss", "not measured")
    detail = f"unigram entropy of the validation text: {unigram_entropy:.3f}"
    return Card("Validation loss", f"{losses[-1]:.3f}", detail, losses[-1] < unigram_entropy)


def run_section(report: StepReport, facts: Mapping[str, str] | None = None) -> Section:
    """What was run: model, layout, workload, cluster, and further facts in the order given."""
    sizes = {
        k: v for k, v in report.model.items() if k != "name" and isinstance(v, (int, str)) and v not in (0, "", False)
    }
    chips = [element("code", part, class_="chip") for part in report.layout.split(",") if part]
    ranks = sum(len(role.ranks) for role in report.roles)
    entries: dict[str, object] = {
        "Model": join([element("strong", report.model.get("name", "unnamed")), element("br"), _settings(sizes)]),
        "Layout": join([*chips, f"on {ranks} rank{'s' * (ranks != 1)}"]),
        "Workload": _settings(report.workload),
        "Cluster": report.cluster or "this machine",
        **(facts or {}),
    }
    if report.time is not None:
        entries["Time of one step"] = f"{format_time(report.time)} ({report.source})"
    items = [element(tag, text) for name, text in entries.items() for tag, text in (("dt", name), ("dd", text))]
    return Section("What was run", element("dl", *items, class_="facts"))


def _settings(values: Mapping[str, Any]) -> Markup:
    return join(element("code", f"{k} {_value(v)}", class_="chip") for k, v in values.items() if v is not None)


def _value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"


def loss_section(events: Sequence[Mapping[str, Any]], unigram_entropy: float | None = None) -> Section:
    """Training and validation loss over steps, in nats a token, with the unigram entropy as a line to get below."""
    train, validation = _points(events, "loss"), _points(events, "validation_loss")
    series = [Series("train", train), Series("validation", validation)]
    shown = [s for s in series if s.points]
    reference = ("unigram entropy", unigram_entropy) if unigram_entropy is not None else None
    spoken = "Loss over steps. " + "; ".join(
        f"{s.kind}: {s.points[0][1]:.3f} at step {s.points[0][0]:g}, {s.points[-1][1]:.3f} at step {s.points[-1][0]:g}"
        for s in shown
    )
    chart = element("div", line_chart(shown, reference, spoken, "step", "{:.4g}".format), class_="plot")
    lead = "Nats a token."
    if reference:
        lead += " Below the unigram entropy a model knows more than how often each token occurs."
    figure = element("figure", legend([s.kind for s in shown]), chart)
    return Section("Loss", join([figure, _loss_table(train, validation)]), lead)


def _points(events: Iterable[Mapping[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((float(e["step"]), float(e[name])) for e in events if "step" in e and e.get(name) is not None)


def _loss_table(train: Sequence[tuple[float, float]], validation: Sequence[tuple[float, float]]) -> Markup:
    trained, validated = dict(train), dict(validation)
    steps = sorted(trained | validated)
    stride = max(1, math.ceil(len(steps) / MOST_LOSS_ROWS))
    chosen = sorted({*steps[::stride], *steps[-1:], *validated})
    rows = [(f"{step:g}", _loss(trained.get(step)), _loss(validated.get(step))) for step in chosen]
    some = f", {len(rows)} of {len(steps)} steps" if len(rows) < len(steps) else ""
    return details(
        f"Table of the losses{some}", table("Loss by step", ("step", "training", "validation"), rows, (1, 2))
    )


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def notes_section(*reports: StepReport) -> Section:
    """What the reports' figures leave out, each sentence once."""
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    body = element("ul", *(element("li", note) for note in notes)) if notes else element("p", "Nothing is left out.")
    return Section("What the figures leave out", body)


def parameters_fact(count: int) -> str:
    """A parameter count as a fact of `run_section`: "8.03B (8,030,261,248)"."""
    return f"{format_count(count)} ({count:,})"
