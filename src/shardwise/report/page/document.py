"""One self-contained HTML file: sections, one below the other, with no script and nothing fetched from anywhere.

The `*_sections.py` files build the sections; this one gives the page around them and the tables inside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.report.figures import hatches
from shardwise.report.files import write_whole
from shardwise.report.page.markup import Markup, element, escape, join
from shardwise.report.page.palette import figure_css, page_css
from shardwise.report.page.style import PAGE_CSS


@dataclass(frozen=True)
class Section:
    """A titled part of a page. lead: one sentence below the title. A section without a title has no heading."""

    title: str
    body: Markup
    lead: str = ""


@dataclass(frozen=True)
class TableCell:
    """A table cell with a look: "good" and "bad" colour it, "strong" stresses it, "number" aligns it right."""

    text: object
    look: str = ""


def html_report(title: str, *sections: Section, subtitle: str = "") -> str:
    """The text of the page. Everything but `Markup` is escaped."""
    named = [(f"{i}-{_slug(section.title)}", section) for i, section in enumerate(sections, 1)]
    links = [element("li", element("a", s.title, href=f"#{name}")) for name, s in named if s.title]
    parts = [
        element("header", element("h1", title), element("p", subtitle) if subtitle else None),
        element("nav", element("ol", *links), aria_label="Sections") if len(links) > 1 else None,
        element("main", *(_section(name, section) for name, section in named)),
        element("footer", element("p", "Made by shardwise. All figures were computed when this page was written.")),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(page_css() + figure_css() + PAGE_CSS)),
    )
    definitions = element("svg", hatches(), width=0, height=0, class_="defs", aria_hidden="true")
    body = element("body", definitions, element("div", *parts, class_="page"))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def write_html(path: Path, title: str, sections: Iterable[Section], subtitle: str = "") -> None:
    """Write the page, whole or not at all. Raises `UserError` when the file cannot be written."""
    write_whole(path, html_report(title, *sections, subtitle=subtitle))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls inside its own box when the page is narrow.

    caption: read out, not shown. rows: cells are text or `TableCell`; the first is the row's heading, shown once where
    several rows in turn have the same. numbers: indices of columns that align right.
    """
    right = frozenset(numbers)
    head = element(
        "tr", *(element("th", h, scope="col", class_="n" if i in right else None) for i, h in enumerate(heads))
    )
    body = list(_rows(rows, right))
    whole = element(
        "table", element("caption", caption, class_="unseen"), element("thead", head), element("tbody", *body)
    )
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def details(summary: str, *content: Markup) -> Markup:
    """Content that opens on a click."""
    return element("details", element("summary", summary), *content)


def check(good: bool, text: object = "") -> TableCell:
    """✓ or ✗, coloured, with a text and with words for a screen reader."""
    words = element("span", "yes " if good else "no ", class_="unseen")
    sign = element("span", "✓" if good else "✗", aria_hidden="true", class_="good" if good else "bad")
    return TableCell(join([words, sign, f" {text}" if text != "" else None]), "good" if good else "bad")


def _rows(rows: Iterable[Sequence[object]], right: frozenset[int]) -> Iterator[Markup]:
    last: object = None
    for row in rows:
        heading = _cell("th", row[0], "again" if row[0] == last else "", scope="row")
        cells = (_cell("td", cell, "n" if i in right else "") for i, cell in enumerate(row[1:], 1))
        yield element("tr", heading, *cells, class_="apart" if last is not None and row[0] != last else None)
        last = row[0]


def _cell(tag: str, cell: object, look: str, scope: str | None = None) -> Markup:
    content, own = (cell.text, cell.look) if isinstance(cell, TableCell) else (cell, "")
    return element(tag, content, scope=scope, class_=f"{own} {look}".strip() or None)


def _section(name: str, section: Section) -> Markup:
    if not section.title:
        return element("section", section.body, class_="bare")
    lead = element("p", section.lead, class_="lead") if section.lead else None
    return element("section", element("h2", section.title, id=name), lead, section.body, aria_labelledby=name)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", escape(title).lower()).strip("-")[:40]
