"""Terminal tables: every figure shown, verdicts right, names never read as markup."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.report_strategies import reports
from shardwise.report import Bytes, LedgerRow, Role, StepReport, compare
from shardwise.report.room import DeviceRoom
from shardwise.report.tables import comparison_tables, ledger_table, memory_table, zero_table

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
    text = shown(comparison_tables(compare(report(), report("measured", replace(HELD, saved=1), ledger))))
    assert "80 of 81 rows equal" in text
    assert "✗" in line_with(text, "saved activations") and "✗" in line_with(text, "blocks.0 ", "786,944")
    assert "✓" in line_with(text, "blocks.1-79 \u00d779") and "+41.0 MB" in line_with(text, "saved activations")
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
    for table in (
        memory_table(a),
        ledger_table(a),
        comparison_tables(compare(a, b)),
    ):
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
