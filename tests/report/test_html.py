"""Pages are whole, self-contained, hold every figure that went in, and cannot be broken by what they show."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reader import Page
from report_strategies import reports

from shardwise.errors import UserError
from shardwise.report import Bytes, LedgerRow, Role, StepReport, TransportRow, compare
from shardwise.report.exposure import STREAMS
from shardwise.report.html import (
    Card,
    Section,
    comparison_cards,
    html_report,
    ledger_section,
    loss_card,
    loss_section,
    memory_section,
    notes_section,
    parameters_fact,
    run_section,
    summary_section,
    timeline_section,
    transport_section,
    write_html,
    zero_section,
)
from shardwise.report.page.markup import element
from shardwise.report.units import format_bytes

HOSTILE = "</title><script>alert('x')</script><b a=\"1\">&amp;\x00\ud800"


def event(name: str, stream: str, start_s: float, duration_s: float, **args: object) -> dict[str, object]:
    return {"name": name, "stream": stream, "start_s": start_s, "duration_s": duration_s, "args": args}


TIMELINE = (
    event("forward blocks.0", "compute", 0.0, 0.061),
    event("backward blocks.0", "compute", 0.073, 0.042),
    event("recompute blocks.0", "compute", 0.115, 0.021),
    event("optimizer step", "compute", 0.136, 0.017),
    event("loss", "compute", 0.153, 0.019),
    event("gather", "communication", 0.03, 0.043, op="all_gather_into", axes="shard", bytes=98_765),
    event("sum", "communication", 0.172, 0.014, op="all_reduce", axes="tp", bytes=12),
    event("for gather", "waiting", 0.061, 0.012),
)


def sample() -> tuple[StepReport, StepReport]:
    ledger = tuple(
        LedgerRow("forward", "all_gather_into", "shard", f"blocks.{i}", "bfloat16", 4321, 3) for i in range(4)
    )
    ledger += (LedgerRow("loss", "all_reduce", "dp_cp", "tokens", "int64", 1, 1),)
    carried = tuple(TransportRow(i, "ring", 777, 6, 0.004, 0.001) for i in range(5))
    held = Bytes(1_111_111, 2_222_222, 3_333_333, 4_444_444, 5_555_555, 6_666_666)
    predicted = StepReport(
        "predicted",
        {"name": "tiny-llama", "layers": 4, "hidden": 256},
        "dp=2,tp=2,zero=3,sp",
        {"sequence": 128, "batch": 16},
        "4xCPU",
        (Role("all", (0, 1, 2, 3), held, ledger),),
        notes=("The interpreter is not counted.",),
    )
    seen = Role("all", (0, 1, 2, 3), replace(held, other=6_777_777), ledger, carried, TIMELINE)
    return predicted, replace(predicted, source="measured", roles=(seen,), time=0.25)


def events():
    out = [{"kind": "started"}]
    for step in range(1, 41):
        out.append({"step": step, "loss": 9 - step / 10, "tokens_per_s": 1234})
    return [*out, {"step": 20, "validation_loss": 7.0625}, {"step": 40, "validation_loss": 5.125}]


def zero_cells():
    return {stage: {n: Bytes(10**9 * n, 2 * 10**9, (8 - stage) * 10**10) for n in (8, 64)} for stage in range(4)}


def whole_page() -> str:
    predicted, measured = sample()
    comparison = compare(predicted, measured)
    return html_report(
        "A run",
        summary_section([loss_card(events(), 6.5), *comparison_cards(comparison)]),
        run_section(measured, {"Parameters": parameters_fact(12_345_678)}),
        loss_section(events(), 6.5),
        memory_section(comparison),
        ledger_section(comparison),
        transport_section(measured),
        timeline_section(measured),
        zero_section("Llama-3-70B", zero_cells(), 80 * 10**9),
        notes_section(predicted, measured),
        subtitle="dp=2,tp=2",
    )


def test_page_is_balanced_and_fetches_nothing():
    source = whole_page()
    page = Page(source)
    assert not page.named("script") and not page.named("link") and not page.named("img")
    assert not re.search(r"(https?:)?//(?!www\.w3\.org)|@import", source)
    assert all(target.startswith("#") for a in page.named("a") if (target := a["href"]))
    assert "prefers-color-scheme: dark" in source


def test_ids_are_unique_and_every_reference_leads_somewhere():
    source = whole_page()
    ids = [a["id"] for _, a in Page(source).tags if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]+)\)", source)) | {a["href"][1:] for a in Page(source).named("a")}
    wanted |= {a["aria-labelledby"] for a in Page(source).named("section") if "aria-labelledby" in a}
    assert wanted and wanted <= set(ids)


def test_every_figure_of_the_input_appears():
    text = Page(whole_page()).text
    predicted, measured = sample()
    for report in (predicted, measured):
        for n in (*report.roles[0].bytes.to_json().values(), report.roles[0].peak_bytes):
            assert f"{n:,}" in text
    for figure in (
        "4,321",
        "blocks.0-3 \u00d74",
        "tiny-llama",
        "256",
        "128",
        "12,345,678",
        "250 ms",
        "16.0 ms",
        "4.00 ms",
    ):
        assert figure in text, figure
    for event in events():
        for name in ("loss", "validation_loss"):
            if name in event:
                assert f"{event[name]:.4f}" in text
    for cells in zero_cells().values():
        for held in cells.values():
            assert format_bytes(held.total) in text
    assert "5 of 5" in text and "The interpreter is not counted." in text and "6.5" in text


def test_verdicts_follow_the_reports():
    predicted, measured = sample()
    page = Page(html_report("x", summary_section(comparison_cards(compare(predicted, measured)))))
    assert page.text.count("✓") == 3 and "✗" not in page.text
    changed = replace(measured.roles[0], ledger=measured.roles[0].ledger[1:], bytes=Bytes(1))
    worse = compare(predicted, replace(measured, roles=(changed,)))
    assert Page(html_report("x", summary_section(comparison_cards(worse)))).text.count("✗") == 3
    assert Page(html_report("x", ledger_section(worse))).text.count("✗") == 2
    assert "✗" not in Page(html_report("x", ledger_section(compare(predicted, measured)))).text
    assert Page(html_report("x", summary_section([loss_card(events(), 5.0)]))).text.count("✗") == 1


def test_a_missing_rank_is_named():
    predicted, measured = sample()
    fewer = replace(measured, roles=(replace(measured.roles[0], ranks=(0, 1)),))
    assert (
        "The measured report lacks ranks 2-3." in Page(html_report("x", ledger_section(compare(predicted, fewer)))).text
    )


def test_figures_tell_classes_apart_without_colour():
    source = whole_page()
    letters = re.findall(r'class="letter on-(\w+)">(\w)<', source)
    assert len(dict(letters)) == len(set(dict(letters).values()))
    assert dict(letters).keys() >= {"gradients", "optimizer", "saved", "comm", "other"}
    assert all(f'id="hatch-{name}"' in source for name in ("gradients", "optimizer", "saved", "comm", "other"))


def test_a_timeline_is_drawn_with_its_shares():
    source = html_report("x", timeline_section(sample()[1]))
    text = Page(source).text
    # The step takes 186 ms: 160 of them computing, 12 and 14 exposed, 31 of the gather's 43 hidden.
    for figure in ("186 ms", "26.0 ms", "14.0%", "31.0 ms", "43.0 ms", "98.8 kB", "61.0 ms", "86.0%", "0%"):
        assert figure in text, figure
    letters = {letter for _, letter in re.findall(r'class="letter on-(\w+)">(\w)<', source)}
    assert letters == {"F", "B", "A", "U", "L", "H", "W"}
    assert "forward blocks.0: 61.0 ms" in text and "for gather: 12.0 ms" in text


def test_a_report_without_timeline_says_so_and_many_roles_are_counted():
    predicted, measured = sample()
    assert "No timeline was recorded." in Page(html_report("x", timeline_section(predicted))).text
    many = tuple(replace(measured.roles[0], role=f"r{i}", ranks=(i,)) for i in range(9))
    text = Page(html_report("x", timeline_section(replace(measured, roles=many)))).text
    assert "rank 3" in text and "rank 4" not in text and "5 more are in the report." in text


def test_a_long_timeline_is_drawn_coarsely_and_keeps_its_shares():
    # 6,000 spans of 1 ms, forward and backward in turn, then nothing for as long.
    moves = [event(("forward", "backward")[i // 2000 % 2], "compute", i * 1e-3, 1e-3) for i in range(6000)]
    moves.append(event("for x", "waiting", 6.0, 6.0))
    _, measured = sample()
    role = replace(measured.roles[0], timeline=tuple(moves))
    source = html_report("x", timeline_section(replace(measured, roles=(role,))))
    drawn = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"[^>]*k-(forward|backward)"', source)
    assert [kind for _, _, kind in drawn] == ["forward", "backward", "forward"]
    assert sum(float(width) for _, width, _ in drawn) == pytest.approx(50, abs=0.2)
    assert "4.00 s" in Page(source).text and "50.0%" in Page(source).text


def test_hostile_text_stays_text():
    predicted, _ = sample()
    rows = (replace(predicted.roles[0].ledger[0], unit=HOSTILE, op=HOSTILE, axes=HOSTILE),)
    moves = tuple(event(HOSTILE, stream, 0.0, 1.0, op=HOSTILE, axes=HOSTILE) for stream in STREAMS)
    role = Role(HOSTILE, (0,), Bytes(1), rows, (TransportRow(0, HOSTILE, None, None, 0.1, 0.1),), moves)
    nasty = StepReport(
        "measured", {"name": HOSTILE, HOSTILE: 1}, HOSTILE, {HOSTILE: HOSTILE}, HOSTILE, (role,), 1.0, (HOSTILE,)
    )
    comparison = compare(replace(nasty, source="predicted", layout="dp=1"), nasty)
    page = Page(
        html_report(
            HOSTILE,
            summary_section([Card(HOSTILE, HOSTILE, HOSTILE), *comparison_cards(comparison)]),
            run_section(nasty, {HOSTILE: HOSTILE}),
            memory_section(comparison),
            ledger_section(comparison),
            transport_section(nasty),
            timeline_section(nasty),
            zero_section(HOSTILE, zero_cells()),
            notes_section(nasty),
            Section(HOSTILE, element("p", HOSTILE)),
            subtitle=HOSTILE,
        )
    )
    assert not page.named("script") and not page.named("b")
    assert page.text.count("<script>alert('x')</script>") > 10


@settings(max_examples=25)
@given(reports(), reports(), st.booleans())
def test_any_two_reports_make_a_page(a, b, binary):
    comparison = compare(a, b)
    sections = [
        summary_section(comparison_cards(comparison)),
        run_section(b),
        memory_section(comparison, binary),
        ledger_section(comparison, binary),
        transport_section(b, binary),
        timeline_section(b, binary),
        notes_section(a, b),
    ]
    assert Page(html_report("x", *sections)).text.startswith("x")


finite = st.floats(min_value=-1e6, max_value=1e6)
losses = st.lists(
    st.fixed_dictionaries({"step": st.integers(0, 10**6), "loss": finite | st.sampled_from(["NaN", 9e999])})
)


@given(losses, st.none() | finite)
def test_any_losses_make_a_chart(some, entropy):
    source = html_report("x", loss_section(some, entropy))
    Page(source)
    assert not re.search(
        r'="[^"]*(nan|inf)[^"]*"', source.split("<main>")[1].split("</figure>")[0].split("aria-label")[0]
    )


def test_write_html_replaces_whole_files_and_names_a_bad_place(tmp_path):
    path = tmp_path / "r.html"
    path.write_text("old")
    write_html(path, "A run", [Section("One", element("p", "text"))], subtitle="sub")
    assert path.read_text(encoding="utf-8") == html_report(
        "A run", Section("One", element("p", "text")), subtitle="sub"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(UserError, match="cannot write"):
        write_html(tmp_path / "none" / "r.html", "A run", [])
