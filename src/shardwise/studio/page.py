"""The one HTML document: served with its modules beside it, or written with everything inside."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from shardwise.errors import UserError
from shardwise.report.files import write_whole
from shardwise.report.palette import KINDS, THEMES, Kind
from shardwise.studio.columns import encode
from shardwise.studio.data.registry import TRAVELS, VIEWS, answer, parts

RANKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
RANKS_DARK = ("#56a8e0", "#f08445", "#2fbd94", "#dd93bb", "#efb13a", "#8fd0f5", "#b296d6", "#a9a9a9")
"""Okabe and Ito's colours again, for things that are counted, such as algorithms. A letter or dash goes along."""


STRATEGIES = {
    "a": Kind("A computes, or holds", "", "#0072b2", "#56a8e0"),
    "a-borrowed": Kind("A has borrowed", "", "#a9cfe6", "#2f5f80", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "a-moving": Kind("A moves data", "", "#5ba3d0", "#3f83b5", "M0,0 L8,8 M0,8 L8,0"),
    "b": Kind("B computes, or holds", "", "#d55e00", "#f08445"),
    "b-borrowed": Kind("B has borrowed", "", "#f3c6a3", "#85472a", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "b-moving": Kind("B moves data", "", "#e39155", "#c0662f", "M0,0 L8,8 M0,8 L8,0"),
}
"""Two strategies: a hue is a strategy, a fill what is held, borrowed or moving. Ranks are numbers."""
_KINDS = KINDS | STRATEGIES


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
        for name, k in _KINDS.items()
    }
    return json.dumps({"kinds": kinds, "light": RANKS, "dark": RANKS_DARK})


def _scheme(theme: str) -> str:
    kinds = ";".join(f"--k-{name}:{getattr(kind, theme)}" for name, kind in _KINDS.items())
    return ";".join(f"--{name}:{value}" for name, value in THEMES[theme].items()) + ";" + kinds


STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='7' height='7' "
    "rx='1.5' fill='%230072b2'/%3E%3Crect x='9' width='7' height='7' rx='1.5' fill='%23e69f00'/%3E%3Crect y='9' "
    "width='7' height='7' rx='1.5' fill='%23009e73'/%3E%3Crect x='9' y='9' width='7' height='7' rx='1.5' "
    "fill='%23cc79a7'/%3E%3C/svg%3E"
)


@cache
def files() -> dict[str, bytes]:
    """Path below static/ -> contents: all that can be asked for, so that no path leads out."""
    contents = {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in TYPES
    }
    return contents | {"theme.css": theme_css().encode()}


def document() -> tuple[str, str]:
    """(the served page, its Content-Security-Policy): nothing from elsewhere, no script but its own."""
    modules = {_name(path): f"/static/{path}" for path in files() if path.endswith(".js")}
    imports = json.dumps({"imports": modules})
    style = "".join(f'<link rel="stylesheet" href="/static/{path}">' for path in _styles())
    text = _html(style, imports, "", '<script type="module" src="/static/app.js"></script>')
    digest = base64.b64encode(hashlib.sha256(imports.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def exported(*views: str, runs: Path = Path("runs")) -> str:
    """One file with everything inside, which shows `views`: collectives, or pipelines?ranks=8&micro=16.

    Raises `UserError` for an unknown view or state, and for two states of one view.
    """
    states = [parse_view(view) for view in views]
    answers: dict[str, Any] = {}
    for name, given in states:
        words = {key: value for key, value in given.items() if not key.startswith("_")}
        for part in parts(name):
            if part in answers:
                raise UserError(f"one file shows one state of {name}: write another file for the other")
            answers[part] = json.loads(encode(answer(part, words, runs)))
    return on_disk({"views": [{"view": name, "given": given} for name, given in states], "answers": answers})


def on_disk(embedded: Mapping[str, Any], scripts: str = "") -> str:
    """The page with its modules inside. embedded: what it shows. scripts: other sources of scripts in its policy."""
    modules = {
        _name(path): "data:text/javascript;base64," + base64.b64encode(content).decode()
        for path, content in files().items()
        if path.endswith(".js")
    }
    style = "".join(f"<style>{files()[path].decode()}</style>" for path in _styles())
    policy = f"default-src 'none'; script-src 'unsafe-inline' data:{scripts}; style-src 'unsafe-inline'; img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    state = f'<script type="application/json" id="embedded">{_inside(json.dumps(embedded))}</script>'
    start = '<script type="module">import "studio/app";</script>'
    return _html(head + style, json.dumps({"imports": modules}), state, start)


def write_export(path: Path, *views: str, runs: Path = Path("runs")) -> None:
    """Write `exported`, whole or not at all. Raises `UserError` when the file cannot be written."""
    write_whole(path, exported(*views, runs=runs))


def parse_view(text: str) -> tuple[str, Mapping[str, str]]:
    """(view, its words) of a view's text, as the page has it behind the #."""
    name, _, words = text.strip().removeprefix("#").partition("?")
    return name or next(iter(VIEWS)), dict(parse_qsl(words, keep_blank_values=True))


def _styles() -> list[str]:
    return ["theme.css", *(path for path in files() if path.endswith(".css") and path != "theme.css")]


def _name(path: str) -> str:
    return "studio/" + path.removesuffix(".js")


def _inside(text: str) -> str:
    """JSON that cannot end the script element around it."""
    return text.replace("<", "\\u003c")


def _html(head: str, imports: str, state: str, start: str) -> str:
    about = [
        {"name": v, "title": title, "parts": parts(v), "travels": TRAVELS.get(v, ())} for v, title in VIEWS.items()
    ]
    views = _inside(json.dumps(about))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>shardwise studio</title>'
        f'<link rel="icon" href="{_ICON}">{head}<script type="importmap">{imports}</script>'
        f'<script type="application/json" id="palette">{_inside(palette_json())}</script>'
        f'<script type="application/json" id="views">{views}</script>{state}{start}</head>'
        "<body><noscript>The page needs JavaScript.</noscript></body></html>\n"
    )
