"""Colors of the studio: custom properties for both schemes, kinds for the canvas."""

from __future__ import annotations

import json

from shardwise.report.palette import KINDS, THEMES

RANKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
RANKS_DARK = ("#56a8e0", "#f08445", "#2fbd94", "#dd93bb", "#efb13a", "#8fd0f5", "#b296d6", "#a9a9a9")
"""Okabe and Ito's colours again, for things that are counted, such as algorithms. A letter or dash goes along."""


def theme_css() -> str:
    """--page, --ink, ... for light and dark: by the system's choice, or by data-theme on the root."""
    light, dark = (_scheme(theme) for theme in ("light", "dark"))
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme: dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}"
    )


def palette_json() -> str:
    """Data of the canvas: kind -> label, letter, colours, and whether its letter is white on light pages."""
    kinds = {
        name: {"label": k.label, "letter": k.letter, "hatch": k.hatch, "white": k.white_letter}
        | {"light": k.light, "dark": k.dark}
        for name, k in KINDS.items()
    }
    return json.dumps({"kinds": kinds, "light": RANKS, "dark": RANKS_DARK})


def _scheme(theme: str) -> str:
    kinds = ";".join(f"--k-{name}:{getattr(kind, theme)}" for name, kind in KINDS.items())
    return ";".join(f"--{name}:{value}" for name, value in THEMES[theme].items()) + ";" + kinds
