"""Results that print as the tables of the command line, in a terminal and in a notebook."""

import io
from abc import abstractmethod
from collections.abc import Iterable

from shardwise.report.terminal import Renderable, wrap

_WIDTH = 100
"""Characters of a line where there is no terminal."""
_HTML = (
    '<pre style="font-family: Menlo, DejaVu Sans Mono, Consolas, monospace; line-height: 1.2; white-space: pre; '
    'overflow-x: auto">{code}</pre>'
)


class Printable:
    """Base of such results."""

    __slots__ = ()

    @abstractmethod
    def tables(self) -> Iterable[Renderable]:
        """Texts and tables, the conclusion first."""

    @abstractmethod
    def conclusion(self) -> str:
        """The result in one sentence."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.conclusion()}>"

    def __str__(self) -> str:
        import shutil

        return as_text(self.tables(), shutil.get_terminal_size((_WIDTH, 1)).columns)

    def _repr_html_(self) -> str:
        return as_html(self.tables())


def as_text(things: Iterable[Renderable], width: int) -> str:
    """Texts and tables in lines of at most `width` characters, without colors."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, color_system=None)
    for thing in things:
        console.print(wrap(thing, width) if isinstance(thing, str) else thing)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(things: Iterable[Renderable]) -> str:
    """The same as HTML, with colors."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False, record=True)
    for thing in things:
        console.print(wrap(thing, _WIDTH) if isinstance(thing, str) else thing)
    return console.export_html(code_format=_HTML, inline_styles=True)
