"""Terminal tables: every figure shown, verdicts right, names never read as markup."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import shardwise
from harness.cases import from_table
from harness.report_strategies import ledger_rows, reports
from shardwise import Layout, Workload, estimate, plan, plan_serving
from shardwise.errors import UserError
from shardwise.report import Bytes, LedgerRow, Role, StepReport, compare
from shardwise.report.files import check_place, write_whole
from shardwise.report.grouping import compared_ledgers, group_compared, group_ledger
from shardwise.report.printing import Printable
from shardwise.report.room import DeviceRoom
from shardwise.report.tables import comparison_tables, ledger_table, memory_table, zero_table
from shardwise.report.units import (
    format_apart,
    format_bytes,
    format_count,
    format_ranks,
    format_share,
    format_spans,
    format_time,
)

HELD = Bytes(9_000_000, 4_000_000, 18_000_000, 41_000_000, 6_000_000, 22_000_000)
LEDGER = (
    *(LedgerRow("forward", "all_gather_into", "shard", f"blocks.{i}", "bfloat16", 786_944, 2) for i in range(80)),
    LedgerRow("loss", "all_reduce", "dp_cp", "tokens", "int64", 1, 1),
)


def report(source="predicted", held=HELD, ledger=LEDGER, transport=()):
    role = Role("all", (0, 1), held, ledger, transport)
    return StepReport(source, {"name": "m"}, "dp=2,zero=3", {}, "2xCPU", (role,))


def shown(renderable, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def line_with(text, *parts):
    (line,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return line


def test_the_cache_is_shown_where_there_is_one():
    held = replace(HELD, cache=7_000_000)
    for found in (memory_table(report(held=held)), comparison_tables(compare(report(held=held), report()))):
        line_with(shown(found), "keys and values", "7.00 MB")
    for found in (memory_table(report()), comparison_tables(compare(report(), report("measured")))):
        assert "keys and values" not in shown(found)
    assert held.total == HELD.total + 7_000_000


def test_memory_shows_every_class_and_the_peak():
    text = shown(memory_table(report()))
    for figure in ("9.00 MB", "4.00 MB", "18.0 MB", "41.0 MB", "6.00 MB", "22.0 MB", "100 MB", "41.0%", "GB = 1e9"):
        assert figure in text
    bars = {name: line_with(text, name).count("█") for name in ("saved", "optimizer", "parameters")}
    assert bars["saved"] > bars["optimizer"] > bars["parameters"] > 0


def test_a_long_name_of_ranks_costs_no_number_its_place():
    of_many = report(held=HELD)
    stages = f"stages {', '.join(map(str, range(0, 94, 2)))}"
    text = shown(memory_table(replace(of_many, roles=(replace(of_many.roles[0], role=stages),))))
    assert line_with(text, "peak", "100 MB") and "41.0%" in text and "not shown" not in text


def test_memory_says_whether_it_fits():
    assert "✓ fits" in shown(memory_table(report(), DeviceRoom(100_000_000)))
    assert "! at risk" in shown(memory_table(report(), DeviceRoom(100_000_000, margin=0.02)))
    assert "✗ does not fit" in shown(memory_table(report(), DeviceRoom(99_999_999)))


def test_eighty_blocks_are_one_line_of_the_ledger():
    line = line_with(shown(ledger_table(report())), "blocks.0-79 \u00d780")
    assert "786,944 bf16" in line and f"{786_944 * 2 * 2 * 80 / 1e6:.0f} MB" in line
    assert "161" in line_with(shown(ledger_table(report())), "all ")


def test_equal_reports_are_ticked_and_fit_eighty_columns():
    text = shown(comparison_tables(compare(report(), report("measured"))))
    assert "81 of 81 rows equal" in text and "✗" not in text and text.count("✓") == 11
    assert "predicted" in text and "measured" in text


def test_what_differs_is_crossed():
    ledger = (replace(LEDGER[0], count=5), *LEDGER[1:])
    text = shown(comparison_tables(compare(report(), report("measured", replace(HELD, saved=HELD.saved // 2), ledger))))
    assert "80 of 81 rows equal" in text
    assert "✗" in line_with(text, "saved activations") and "✗" in line_with(text, "blocks.0 ", "786,944")
    assert "✓" in line_with(text, "blocks.1-79 \u00d779") and "+20.5 MB" in line_with(text, "saved activations")
    assert text.splitlines()[-1].count("✗") == 3


def test_missing_ranks_and_other_settings_are_named():
    fewer = replace(report("measured"), layout="dp=1", roles=(replace(report().roles[0], ranks=(0,)),))
    text = shown(comparison_tables(compare(report(), fewer)))
    assert "lacks rank 1" in text and "layout: dp=2,zero=3 / dp=1" in text


def test_zero_table_has_stages_as_rows_and_gpus_as_columns():
    cells = {stage: {8: 1e9 * (100 - 30 * stage), 64: 1e9 * (90 - 30 * stage)} for stage in range(4)}
    text = shown(zero_table(cells, "seven billion", capacity=40 * 10**9))
    assert "8 GPUs" in text and "64 GPUs" in text
    assert line_with(text, "100 GB").count("✗") == 2
    assert line_with(text, "2 ", "40.0 GB", "30.0 GB").count("✓") == 2


def test_names_are_not_markup():
    odd = replace(LEDGER[-1], unit="[bold]x[/bold]", axes="[link]")
    text = shown(comparison_tables(compare(report(ledger=(odd,)), report("measured", ledger=(odd,)))), 120)
    assert "[bold]x[/bold]" in text and "[link]" in text


@settings(max_examples=25)
@given(reports(), reports(), st.integers(40, 160))
def test_any_reports_can_be_shown(a, b, width):
    for table in (memory_table(a), ledger_table(a), comparison_tables(compare(a, b))):
        assert shown(table, width) is not None


def test_a_timeline_shows_where_the_step_went():
    moves = (
        {"name": "f", "stream": "compute", "start_s": 0.0, "duration_s": 0.08},
        {"name": "g", "stream": "communication", "start_s": 0.05, "duration_s": 0.04},
    )
    timed = report("measured")
    timed = replace(timed, roles=(replace(timed.roles[0], timeline=moves),))
    text = shown(comparison_tables(compare(report(), timed)))
    line = line_with(text, "measured", "90.0 ms")
    assert line.split()[1:] == ["0", "90.0", "ms", "88.9%", "44.4%", "33.3%", "11.1%", "0%"]
    assert "from its timeline" not in shown(comparison_tables(compare(report(), report("measured"))))
    (found,) = compare(report(), timed).to_json()["exposures"]
    assert (found["side"], found["rank"], found["exposed_s"]) == ("b", 0, 0.01)


# -- Files that are there whole or not at all


def test_what_was_there_is_replaced(tmp_path):
    for text in ("first", "second"):
        write_whole(tmp_path / "a", text)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": text}


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write report .*folder: Is a directory"):
        write_whole(tmp_path / "folder", "text", "report")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_place_is_known_before_there_is_anything_to_write(tmp_path):
    (tmp_path / "a").write_text("first")
    check_place(tmp_path / "a")
    check_place(tmp_path / "b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "first"}
    with pytest.raises(UserError, match="cannot write table /proc/a: No such file"):
        check_place(Path("/proc/a"), "table")


@pytest.mark.parametrize("path", [".", "/", ""])
def test_a_folder_is_no_file(path):
    with pytest.raises(UserError, match="it is a folder; name a file"):
        write_whole(Path(path), "text")


# -- Text and tables at the width of a terminal: layouts break between keys, columns that do not fit are named


ROW = LedgerRow("forward", "all_gather_into", "shard", "blocks.0", "bfloat16", 1000, 2)


def labels(rows):
    return [group.label for group in group_ledger(rows)]


def test_eighty_blocks_are_one_line():
    assert labels([replace(ROW, unit=f"blocks.{i}") for i in range(80)]) == ["blocks.0-79 \u00d780"]


def test_a_block_that_differs_stands_alone():
    rows = [replace(ROW, unit=f"blocks.{i}", count=9 if i == 3 else 2) for i in range(6)]
    assert labels(rows) == ["blocks.0-2,4-5 \u00d75", "blocks.3"]


def test_descending_blocks_and_inner_numbers():
    assert labels([replace(ROW, unit=f"blocks.{i}.mlp") for i in (2, 1, 0)]) == ["blocks.0-2.mlp \u00d73"]
    assert labels([replace(ROW, unit=u) for u in ("w1", "w2")]) == ["w1", "w2"]


@given(st.lists(ledger_rows))
def test_groups_hold_every_row_once_and_are_alike(rows):
    groups = group_ledger(rows)
    assert sorted(row for group in groups for row in group.rows) == sorted(rows)
    for group in groups:
        assert len({replace(row, unit="") for row in group.rows}) == 1
        assert group.units == len({row.unit for row in group.rows})


@given(reports(), reports())
def test_compared_groups_hold_every_row_of_every_rank(a, b):
    comparison = compare(a, b)
    views = list(compared_ledgers(comparison))
    ranks = [rank for ranks, _ in views for rank in ranks]
    assert sorted(ranks) == sorted(rank for pair in comparison.pairs for rank in pair.ranks)
    rows_of = {pair.role: [r for r in comparison.rows if r.role == pair.role] for pair in comparison.pairs}
    for ranks, rows in views:
        for pair in comparison.pairs:
            if set(pair.ranks) & set(ranks):
                assert [(r.key, r.equal) for r in rows_of[pair.role]] == [(r.key, r.equal) for r in rows]
        assert sum(len(group.rows) for group in group_compared(rows)) == len(rows)


# -- Results print as the tables of the command line, and render so in notebooks


STEP: dict[str, Any] = {"seq": 4096, "batch": 16}


@pytest.fixture(scope="module")
def results() -> dict[str, Printable]:
    predicted = [estimate("llama-3-8b", layout, cluster="8xH100", **STEP) for layout in ("dp=8,zero=2", "dp=4,tp=2")]
    best = plan("llama-3-8b", "8xH100", fix={"pp": 1, "cp": 1}, top=3, **STEP)
    served = plan_serving("llama-3-8b", "2xH100", Workload(prompt=512, output=128, concurrency=8))
    return {"estimate": predicted[0], "plan": best, "compare": compare(*predicted), "serving plan": served}


@pytest.mark.parametrize("name", ["estimate", "plan", "compare", "serving plan"])
def test_a_result_prints_its_tables(name: str, results: dict[str, Printable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = results[name]
    text = str(result)
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) > 10 and "\x1b" not in text
    assert re.fullmatch(rf"<{type(result).__name__}: .+>", repr(result)) and result.conclusion() in repr(result)
    assert result.conclusion() in " ".join(text.split())[:500]
    html, _, drawn = result._repr_html_().partition("</pre>")
    assert html.startswith("<pre") and (drawn.startswith("<svg") or name not in ("plan", "estimate"))
    assert not drawn or len(list(ElementTree.fromstring(drawn).iter())) > 6
    monkeypatch.setenv("COLUMNS", "100")
    plain = re.sub(r"<.*?>", "", html).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")
    assert [line.rstrip() for line in plain.splitlines()] == str(result).splitlines()


@pytest.mark.parametrize("name", ["estimate", "plan", "serving plan"])
def test_a_result_has_rows_of_numbers(name: str, results: dict[str, Printable]) -> None:
    rows = results[name].records()
    assert rows and all(row.keys() == rows[0].keys() for row in rows)
    assert any(isinstance(value, (int, float)) and value > 0 for value in rows[0].values())
    pandas = pytest.importorskip("pandas")
    assert isinstance(results[name].to_dataframe(), pandas.DataFrame) and len(results[name].to_dataframe()) == len(rows)


def test_names_and_numbers_in_place_of_objects() -> None:
    whole = estimate("llama-3-8b", "dp=8,zero=2", Workload(4096, 16), "8xH100")
    assert estimate("llama-3-8b", "dp=8,zero=2", cluster="8xH100", seq=4096, batch=16) == whole
    assert estimate("llama-3-8b", {"dp": 8, "zero": 2}, "8xH100", seq="4k", batch="16") == whole
    assert estimate("llama-3-8b", Layout(dp=8, zero=2), "8xH100", Workload(4096, 16)) == whole
    for call in (
        lambda: estimate("llama-3-8b", "dp=8", Workload(64, 8), seq=64),
        lambda: plan("llama-3-8b", "8xH100", Workload(64, 8), batch=8),
    ):
        with pytest.raises(UserError, match="either a Workload, or seq and batch"):
            call()
    assumed = estimate("llama-3-8b", "dp=8")
    assert assumed == estimate("llama-3-8b", "dp=8", seq=None) and assumed.workload["batch"] == 256
    assert any("--seq 8192" in note for note in assumed.notes)


def test_public_names_are_typed_and_documented() -> None:
    for name in shardwise.__all__:
        thing = getattr(shardwise, name)
        if not callable(thing) or thing is UserError:
            continue
        assert inspect.getdoc(thing), name
        parameters = inspect.signature(thing).parameters.values()
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters), name


# -- Numbers as people read them


@from_table
def test_bytes(n, text):
    assert format_bytes(n) == text


def test_binary_bytes():
    assert [format_bytes(n, binary=True) for n in (1023, 1024, 80 * 2**30)] == ["1023 B", "1.00 KiB", "80.0 GiB"]


@given(st.integers(min_value=1, max_value=10**20), st.booleans())
def test_bytes_are_right_to_three_digits(n, binary):
    number, unit = format_bytes(n, binary).split()
    powers = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] if binary else ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    assert float(number) * (1024 if binary else 1000) ** powers.index(unit) == pytest.approx(n, rel=0.0051)


def test_counts():
    assert [format_count(n) for n in (12, 12_345, 7e9, 1.2e12)] == ["12", "12.3k", "7.00B", "1.20T"]


@from_table
def test_time(seconds, text):
    assert format_time(seconds) == text


def test_shares_never_round_a_difference_away():
    assert [format_share(x) for x in (0, 1e-9, 0.0123, -0.5, 12.5)] == ["0%", "<0.01%", "1.23%", "-50.0%", "1,250%"]
    assert format_share(0.0123, signed=True) == "+1.23%"


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_name_exactly_their_numbers(numbers):
    found = set()
    for span in format_spans(tuple(sorted(numbers))).split(","):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_ranks():
    assert [format_ranks((3,)), format_ranks((0, 1, 2, 8))] == ["rank 3", "ranks 0-2,8"]


@given(st.integers(1, 10**13), st.integers(1, 10**13))
def test_different_sizes_are_told_apart(n, other):
    a, b = format_apart(n, other)
    assert (a == b) == (n == other) or abs(n - other) < 1e-8 * max(n, other)
    assert format_apart(149.4e9, 149.1e9) == ("149.4 GB", "149.1 GB")
    assert format_apart(150e9, 83e9) == ("150 GB", "83.0 GB")
