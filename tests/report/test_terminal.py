"""Text and tables at the width of a terminal: layouts break between keys, columns that do not fit are named."""

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import wrap

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
