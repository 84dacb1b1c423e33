"""HTML and SVG that cannot be broken by what they show: text is escaped unless it was built here."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"br", "col", "hr", "link", "meta"})

# XML allows no control characters but tab and newlines, and UTF-8 no lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """`value` as text that is safe between tags and inside quoted attributes; a `Markup` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", number(value)), quote=True))


def number(value: object) -> str:
    """Text of a value; floats with at most three decimals, so that coordinates stay short."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is class, `stroke_width` is stroke-width; None and False leave an attribute out."""
    names = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    inside = "".join(
        f" {name}" if value is True else f' {name}="{escape(value)}"'
        for name, value in names
        if value is not None and value is not False
    )
    if tag in VOID:
        return Markup(f"<{tag}{inside}>")
    return Markup(f"<{tag}{inside}>{join(children)}</{tag}>")


def join(children: Iterable[object]) -> Markup:
    """Children one after the other; None is nothing."""
    return Markup("".join(escape(child) for child in children if child is not None))
