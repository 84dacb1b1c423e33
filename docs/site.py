"""Hooks of the documentation site (mkdocs.yml): pages made from the README and from the commands' parsers."""

from __future__ import annotations

import argparse
import html
import io
import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from shardwise.cli.commands import COMMANDS
from shardwise.cli.declare import parser_of
from shardwise.cli.examples import EXAMPLES, broken
from shardwise.layout.keys import CHOICES, KEYS
from shardwise.studio.site import write_site

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from screenshots import FIGURE_WIDTH, FIGURES  # noqa: E402 - of this folder, which is not mkdocs'

COLUMNS = 88
"""Of usages."""
STUDIO = os.environ.get("SHARDWISE_SITE", "")
"""Folder of the studio in the site; without it, which is quicker, figures are pictures."""
_FIGURE = re.compile(r"!\[([^\]]*)\]\((?:\.\./)?screenshots/([\w-]+)-light\.png\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    made = {
        "index.md": home(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "llms.txt": re.sub(r"\]\(docs/(\w+)\.md\)", r"](\1.html)", (ROOT / "llms.txt").read_text()),
        "reference/cli.md": cli(),
        "reference/layout.md": layout_keys(),
    }
    made |= {f"lessons/{path.stem}.md": lesson(path) for path in sorted((ROOT / "lessons").glob("*.py"))}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The studio's figures in place of their pictures, of the same size."""
    return _FIGURE.sub(lambda match: _figure(match, "../" * page.url.count("/")), markdown) if STUDIO else markdown


def on_post_build(config: Any) -> None:
    """The studio itself, with an answer for each figure."""
    if STUDIO:
        write_site(Path(config.site_dir) / STUDIO, also=FIGURES.values())


def _figure(match: re.Match[str], up: str) -> str:
    text, name = match.groups()
    if name not in FIGURES:
        return match.group()
    picture = (ROOT / "docs" / "screenshots" / f"{name}-light.png").read_bytes()
    _, height = struct.unpack(">II", picture[16:24])
    whole = re.sub(r"_only=[^&]*&?", "", FIGURES[name]).rstrip("?&")
    size = f"calc({height}px + 0.6 * max(0px, {FIGURE_WIDTH}px - 100vw))"  # text on a phone has more lines
    figure, view = (html.escape(f"{up}{STUDIO}/index.html#{state}") for state in (FIGURES[name], whole))
    style = f"border: 0; width: 100%; height: {size}"
    frame = f'<iframe src="{figure}" title="{html.escape(text)}" loading="lazy" style="{style}"></iframe>'
    return f'{frame}\n<small><a href="{view}">Change it in the studio</a></small>'


def home() -> str:
    """The README as the site's first page: its links start in docs/, and pictures follow the page's palette."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"<picture>\n.*?\n  <img alt=\"(.*?)\" src=\"docs/(.*?)-light.png\".*?>\n</picture>", _picture, text)
    text = re.sub(r"<!--.*?-->\n", "", text).replace("](CHANGELOG.md)", "](changelog.md)")
    return f"{text}\n[Open the studio]({STUDIO}/index.html)\n" if STUDIO else text


def _picture(match: re.Match[str]) -> str:
    alt, name = match.groups()
    both = (f"![{alt}]({name}-{tone}.png#only-{tone}){{ width=49% }}" for tone in ("light", "dark"))
    return "\n".join(both)


def lesson(path: Path) -> str:
    """A notebook in jupytext's percent format as a page."""
    text = path.read_text()
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    pages: list[str] = []
    names: dict[str, Any] | None = (
        None if re.search(r"import torch|\btrain\(", text) else {}
    )  # those take too long here
    for kind, _, body in (cell.partition("\n") for cell in cells):
        if "[markdown]" in kind:
            pages.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip())
        else:
            pages.append(f"```python\n{body.strip()}\n```")
            pages += _printed(body, names)
    return (
        "\n\n".join(pages).replace("](../docs/", "](../")
        + f"\n\n`python lessons/{path.name}` runs it; `make lessons` makes notebooks.\n"
    )


def _printed(cell: str, names: dict[str, Any] | None) -> Iterator[str]:
    """What a cell prints, after the cells before it left `names`: a drawing as it is, all else as text."""
    if names is None:
        return
    with redirect_stdout(io.StringIO()) as out:
        exec(cell, names)
    printed = out.getvalue().strip()
    if printed:
        yield printed if printed.startswith("<svg") else f"```text\n{printed}\n```"


def layout_keys() -> str:
    """A row for every key of the layout text."""
    lines = ["# Layout keys", "", "A layout is a text such as `dp=2,tp=2,zero=3,sp`. Keys may come in any order.", ""]
    lines += ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key in KEYS.values():
        values = " ".join(f"`{value}`" for value in CHOICES.get(key.name, ()))
        default = "off" if key.kind == "flag" else f"`{key.default}`" if key.default not in ((), "") else ""
        lines.append(f"| `{key.name}` | {default} | {values} | {_sentence(key.help)} |")
    return "\n".join(lines) + "\n"


def cli() -> str:
    """A section for every command and action, with usage and options."""
    os.environ["COLUMNS"] = str(COLUMNS)
    lines = ["# Command line", "", "Exit codes: 0 success, 1 a dead rank or a defect, 2 a mistake in what was asked, "
             "128 + n for signal n. Every command has `--json`."]  # fmt: skip
    for name in COMMANDS:
        examples = "\n".join(map(broken, EXAMPLES[name])).replace("\n  ", "\n").strip()
        lines += ["", f"## {name}", "", *_section(parser_of(name), COMMANDS[name])]
        lines += ["", "Examples:", "", "```text", examples, "```"]
    return "\n".join(lines) + "\n"


def _section(parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    yield from (_sentence(parser.description or summary), "", "```text", parser.format_usage().strip(), "```")
    rows = [row for action in parser._actions for row in _row(action)]
    if rows:
        yield from ("", "| argument | meaning |", "|---|---|", *rows)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, added in action.choices.items():
                yield from ("", f"### {parser.prog.removeprefix('shardwise ')} {name}", "", *_section(added, ""))


def _row(action: argparse.Action) -> Iterator[str]:
    """A row of the table, unless every command has the option or it is a list of actions."""
    if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)) or action.help == argparse.SUPPRESS:
        return
    if not {"--json", "--traceback"}.isdisjoint(action.option_strings):
        return
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        name = value or action.dest
    else:
        takes_value = action.nargs != 0
        name = ", ".join(action.option_strings) + (f" {value or action.dest.upper()}" if takes_value else "")
    text = (action.help or "").replace("%%", "%")
    yield f"| `{name.replace('|', chr(92) + '|')}` | {_sentence(text).replace('|', chr(92) + '|')} |"


def _sentence(text: str) -> str:
    """Text in one line, with what would be HTML as itself."""
    return " ".join(text.split()).replace("<", "&lt;").replace("[", chr(92) + "[")
