"""Text and tables at the width of a terminal: layouts break between keys, columns that do not fit are named."""

import io
import os
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import fitted, wrap

LAYOUT = "tp=2,pp=8,cp=4,zero=1,sp,schedule=interleaved,virtual=10,recompute=selective"
COLUMNS = (Column("layout", left=True, wraps=True), Column("step"), Column("range", drop=2), Column("MFU", drop=1))
ROWS = [(LAYOUT, "1 min 31 s", "1 min 25 s to 1 min 38 s", "57.0%"), ("tp=8", "2 s", "1 s to 3 s", "1.0%")]


def printed(thing, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(thing)
    return capture.get().splitlines()


def test_lines_end_between_words_and_between_keys():
    text = f"tp=1: 13,406 layouts are slower; at best {LAYOUT}"
    assert wrap(text, 200) == text
    lines = wrap(text, 40).split("\n")
    assert max(map(len, lines)) <= 40 and "".join(lines).replace(" ", "") == text.replace(" ", "")
    keys = {key for line in lines for key in line.split()[-1].split(",") if "=" in key}
    assert keys <= set(LAYOUT.split(",")) and all("13,406" in " ".join(lines) for _ in lines)


def test_an_indented_line_continues_further_in():
    assert wrap("  one two three\nfour five six", 9).split("\n") == ["  one two", "    three", "four five", "six"]


def test_a_line_of_progress_is_as_wide_as_its_terminal(monkeypatch):
    """In a pipe it is whole, and a path always."""
    path = "/a/folder/of/a/run/whose/name/is/long"
    text = f"the text is prepared already: {path}"
    assert fitted(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "20")
    assert fitted(text, io.StringIO()).split("\n") == ["the text is prepared", "  already:", f"  {path}"]
    monkeypatch.delenv("COLUMNS")
    control, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 30))
    with open(terminal, "w") as stream, open(control):
        assert fitted(text, stream).startswith("the text is prepared already:\n")


@given(st.integers(60, 200))
def test_no_width_cuts_a_cell_and_what_is_left_out_is_named(width):
    lines = printed(FittedTable(COLUMNS, list(ROWS)), width)
    text = "\n".join(lines)
    assert max(map(len, map(str.rstrip, lines))) <= width and "…" not in text
    assert "".join(line.split()[0] for line in lines[2:] if line.split()[0].endswith((",", "ive"))).startswith(
        "tp=2,pp=8"
    )
    shown = lines[0].split()
    note = [line for line in lines if line.startswith("not shown")]
    assert "layout" in shown and "step" in shown
    for name, cell in (("range", "1 min 25 s to"), ("MFU", "57.0%")):
        assert (name in shown) == (cell in text) != any(name in line for line in note)


def test_columns_leave_in_their_order_and_stay_where_there_is_room():
    headers = {width: printed(FittedTable(COLUMNS, list(ROWS)), width)[0].split() for width in (140, 60, 44)}
    assert headers == {140: ["layout", "step", "range", "MFU"], 60: ["layout", "step", "MFU"], 44: ["layout", "step"]}


NUMBERS = (
    Column("name", left=True), Column("held by each rank", "bytes"), Column("step", "seconds", drop=2),
    Column("of the whole", "share", drop=1), Column("against it", "change"), Column("calls"),
)  # fmt: skip
UNITS = [("one", 1_500_000_000, 0.25, 0.5, -0.1, 1234), ("two", 2.0, None, 1.0, 0.2, 5)]


def test_numbers_are_printed_in_the_unit_of_their_column():
    text = printed(FittedTable(NUMBERS, list(UNITS)), 100)
    assert text[2].split() == ["one", "1.50", "GB", "250", "ms", "50.0%", "-10.0%", "1,234"]
    assert text[3].split() == ["two", "2", "B", "100%", "+20.0%", "5"]


@given(st.integers(20, 120))
def test_headings_break_first_then_columns_leave_by_rank_and_no_number_is_cut(width):
    lines = printed(FittedTable(NUMBERS, list(UNITS)), width)
    text = " ".join(" ".join(lines).split())
    assert max(len(line.rstrip()) for line in lines) <= width and "…" not in text
    cells = {"1.50 GB": "held by", "250 ms": "step", "50.0%": "of the", "-10.0%": "against", "1,234": "calls"}
    hidden = [heading for cell, heading in cells.items() if cell not in text.partition("not shown")[0]]
    assert hidden == [heading for heading in cells.values() if heading in text.partition("not shown")[2]]
    order = ["step", "of the", "calls", "against", "held by"]
    assert sorted(hidden, key=order.index) == order[: len(hidden)]


def test_a_short_row_and_a_long_title_are_whole():
    table = FittedTable(NUMBERS[:2], title="a title that is much longer than its table")
    table.add_row("alone")
    assert printed(table, 60)[0] == table.title and "alone" in "".join(printed(table, 60))


def test_pandas_and_notebooks_have_the_numbers():
    pandas = pytest.importorskip("pandas")
    table = FittedTable(NUMBERS, list(UNITS))
    frame = table.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and list(frame["calls"]) == [1234, 5]
    assert list(frame["held by each rank"]) == [1_500_000_000, 2.0] and "1.50 GB" in table._repr_html_()
