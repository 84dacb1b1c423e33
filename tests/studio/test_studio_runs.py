"""Runs: followed live through reload and end; files that are dropped."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from studio_visitor import DELAY, TIMELINE, Visitor, make_run, serving, step_event

from harness.cases import from_table
from harness.report_strategies import reports
from harness.today import FOLLOWED, of_some
from shardwise.audit.calls import Call
from shardwise.audit.job import AuditedJob
from shardwise.audit.kept import keep_run
from shardwise.audit.reading import RankRecording, StepMark
from shardwise.audit.result import audit_of
from shardwise.certify.result import COLUMNS, Cell, Certificate, LayoutRow, WrongCell
from shardwise.errors import UserError
from shardwise.report.rank_timelines import Recorded, aligned
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_memory import ALLOC, ENGINE, FREE, PART, SAVED, StorageEvent, step_memory, write_memory
from shardwise.report.step_parts import PARTS
from shardwise.report.step_report import Bytes, LedgerRow, Role, StepReport, TransportRow
from shardwise.report.strict_json import strict
from shardwise.report.time_parts import RECORDED, STEP
from shardwise.report.trace import trace_events
from shardwise.studio.columns import encode
from shardwise.studio.data.opened import opened
from shardwise.studio.data.run_time import HOW_TIMED, time_figures
from shardwise.studio.data.runs import data, events, listed
from shardwise.studio.page import exported, write_export


def test_a_cursor_brings_only_what_is_new(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=3, status="running")
    first = events({"run": "one"}, tmp_path)
    assert first["steps"]["step"] == [1, 2, 3] and first["status"] == "running"
    with RunDirectory.open(tmp_path / "one") as run:
        run.append(step_event(4))
    again = events({"run": "one", "after": str(first["cursor"])}, tmp_path)
    assert again["steps"]["step"] == [4]
    assert events({"run": "one", "after": str(again["cursor"])}, tmp_path)["steps"]["step"] == []


def test_a_torn_last_line_waits(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=2, status="running")
    with (tmp_path / "one" / "events.jsonl").open("a") as file:
        file.write('{"step":3,"lo')
    found = events({"run": "one"}, tmp_path)
    assert found["steps"]["step"] == [1, 2]


@pytest.mark.parametrize("name", ["..", "../one", "/etc", "one/../one", ".", "two"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "runs" / "one", steps=1)
    make_run(tmp_path / "one", steps=1)
    with pytest.raises(UserError, match="holds no run"):
        events({"run": name}, tmp_path / "runs")
    with pytest.raises(UserError, match="holds no run"):
        data({"run": name}, tmp_path / "runs")


def test_all_ranks_lie_on_one_clock(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    view = data({"run": "one"}, tmp_path)
    drawn = view.more["timeline"]
    streams = ("compute", "communication", "waiting")
    assert drawn["rows"] == [f"rank {rank} {stream}" for rank in range(2) for stream in streams]
    starts = [drawn["columns"]["start"][drawn["columns"]["rank"] // 3 == rank] for rank in range(2)]
    assert starts[1] - starts[0] == pytest.approx(DELAY / 1e9)
    assert view.more["timeline_of"] == "Step 4 on all 2 ranks, on one clock."
    (tmp_path / "one" / "reports" / "timelines.json").unlink()
    alone = data({"run": "one"}, tmp_path).more["timeline"]
    assert {row.rpartition(" ")[0] for row in alone["rows"]} == {"rank 0"}


def test_an_empty_or_missing_folder_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        found = data({}, folder)
        assert found.state["run"] == "" and listed(folder) == []


def test_the_latest_run_that_can_be_read_is_shown_first(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    make_run(tmp_path / "two", steps=1)
    os.utime(tmp_path / "one" / "events.jsonl", (0, 0))
    assert data({}, tmp_path).state["run"] == "two"
    (tmp_path / "two" / "run.json").write_text("{")
    found = data({}, tmp_path)
    assert found.state["run"] == "one" and found.choices["run"] == ["two", "one"]
    with pytest.raises(UserError, match="damaged"):
        data({"run": "two"}, tmp_path)
    (tmp_path / "one" / "run.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        data({}, tmp_path)


def test_steps_without_numbers_are_left_open(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    with RunDirectory.open(tmp_path / "one") as run:
        run.append({"step": 2, "loss": float("nan")})
    assert data({"run": "one"}, tmp_path).tables["steps"].columns["loss"] == [7.4, None]


def timed_report() -> StepReport:
    """A step of 186 ms: 160 computing, 12 and 14 exposed, 31 of the gather's 43 hidden."""
    compute = (("forward blocks.0", 0, 61), ("backward blocks.0", 73, 42), ("recompute blocks.0", 115, 21))
    compute += (("optimizer step", 136, 17), ("loss", 153, 19))
    gather = {"op": "all_gather_into", "axes": "shard", "bytes": 98_765}
    calls = (("gather", 30, 43, gather), ("sum", 172, 14, {"op": "all_reduce", "axes": "tp", "bytes": 12}))
    events = [{"name": n, "stream": "compute", "start_s": a / 1e3, "duration_s": b / 1e3} for n, a, b in compute]
    events += [
        {"name": n, "stream": "communication", "start_s": a / 1e3, "duration_s": b / 1e3, "args": args}
        for n, a, b, args in calls
    ]
    rows = tuple(LedgerRow("forward", "all_gather_into", "shard", f"blocks.{i}", "bfloat16", 4321, 3) for i in range(4))
    carried = tuple(TransportRow(i, "ring", 777, 6, 0.004, 0.001) for i in range(4))
    role = Role("all", (0, 1), Bytes(1), rows, carried, tuple(events))
    return StepReport("measured", {"name": "m"}, "dp=2,zero=3", {}, "2xCPU", (role,))


def test_a_steps_time_adds_up() -> None:
    shown = opened(json.dumps(strict(timed_report().to_json())).encode())
    part = {name: values[0] for name, values in shown.tables["ranks"].columns.items()}
    assert part["transfers that nothing hides"] == pytest.approx(0.026) and part["computing"] == pytest.approx(0.160)
    assert part["behind computation"] == pytest.approx(0.031)
    assert [part[name] for name in ("forward", "backward", "forward again", "optimizer")] == pytest.approx(
        [0.061, 0.042, 0.021, 0.017]
    )
    assert sum(part[name] for name in PARTS.values()) == pytest.approx(0.186)
    (ranks,) = shown.more["bars"]["ranks"]
    assert sum(seconds for _, seconds in ranks["parts"]) == pytest.approx(0.186)
    figures = time_figures(timed_report())
    traffic = figures.tables["traffic"].columns
    assert traffic["operation"] == ["all_gather_into", "all_reduce"] and traffic["payload"] == [98_765, 12]
    assert traffic["hidden"] == pytest.approx([0.031, 0]) and traffic["exposed"] == pytest.approx([0.012, 0.014])
    carried = figures.tables["transport"].columns
    assert carried["unit"] == ["blocks.0-3 \u00d74"] and carried["sent"] == [3108] and carried["steps"] == [24]
    (bar,) = figures.bars["transport"]
    assert dict(bar["parts"]) == pytest.approx({"waited": 0.004, "hidden": 0.012})


def adds_up(columns: Any) -> None:
    """Each bar of a waterfall begins where the one above ends, and the last is the sum."""
    table = list(zip(*columns.values(), strict=True))
    for (*_, end), (_, before, after, start, stop) in pairwise(table[:-1]):
        assert start == pytest.approx(end) and stop - start == pytest.approx(after - before)
    assert table[-1][-1] == pytest.approx(table[-2][-1])


def test_the_waterfall_adds_up_from_the_plan_and_from_another_run(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    make_run(tmp_path / "two", steps=1)
    alone = data({"run": "one"}, tmp_path).tables["waterfall"].columns
    assert set(alone["nothing"]) == {0.0}
    predicted = tmp_path / "one" / "reports" / "predicted.json"
    parts = {"matmul": 0.05, "data": 0.01, "bubble": 0.02, "host": 0.03, "offload": 0.004}
    timing = {"seconds": sum(parts.values()), "low": 0.1, "high": 0.2, "parts": parts, "engine": "x"}
    replace(StepReport.read(predicted), time=timing["seconds"], timing=timing).write(predicted)
    planned = data({"run": "one"}, tmp_path).tables["waterfall"].columns
    assert planned["part"][0] == "step, planned" and planned["to"][0] == pytest.approx(sum(parts.values()))
    other = data({"run": "one", "against": "two"}, tmp_path).tables["waterfall"].columns
    assert other["part"][0] == "step, two" and other["to"][0] == pytest.approx(other["to"][-1])
    for columns in (planned, other):
        adds_up(columns)
    with pytest.raises(UserError, match="holds no run"):
        data({"run": "one", "against": "../two"}, tmp_path)


def test_every_part_of_a_plan_has_a_place_in_the_waterfall() -> None:
    assert sorted(part for group in RECORDED.values() for part in group) == sorted(STEP)
    assert set(RECORDED) <= set(PARTS)


def test_the_step_and_the_verdict_are_those_that_are_chosen(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    with RunDirectory.open(tmp_path / "one") as run:
        run.write_timelines(aligned({0: Recorded("here", 0, TIMELINE[:1])}, 12, 2), last=True)
    first, last = (data({"run": "one", "step": step}, tmp_path) for step in ("0", "12"))
    assert first.choices["step"] == [4, 12] and first.state["step"] == 4 and last.state["step"] == 12
    assert first.more["verdict"]["seconds"] == pytest.approx(0.232) and last.more["verdict"]["step"] == 12
    assert last.tables["ranks"].columns["rank"] == [0]
    with pytest.raises(UserError, match="step=5: one has recorded 4, 12"):
        data({"run": "one", "step": "5"}, tmp_path)


def test_memory_of_a_step_has_its_peak_by_class(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=1)
    events = [
        StorageEvent(*event)
        for event in (
            (9, PART, 0, 0, "forward blocks.0"), (10, ALLOC, 1, 100, "aten.mm [10]"), (11, ALLOC, 2, 50, "aten.mm [5]"),
            (12, SAVED, 1, 0, ""), (13, FREE, 2, 0, ""), (14, PART, 0, 0, "backward blocks.0"),
            (15, ENGINE, 0, 70, "gradients"), (16, FREE, 1, 0, ""),
        )
    ]  # fmt: skip
    traced = step_memory(0, 3, events, {"parameters": 1000}, 29)
    assert (traced.during, traced.peak_at, traced.seconds) == ("backward blocks.0", 6e-9, 2e-8)
    assert {name: size for name, size in traced.peak.items() if size} == {
        "parameters": 1000, "gradients": 70, "saved": 100,
    }  # fmt: skip
    assert [(one.byte_class, one.what, one.count, one.bytes) for one in traced.tensors] == [
        ("saved", "aten.mm [10]", 1, 100)
    ]
    with RunDirectory.open(tmp_path / "one") as run:
        write_memory(run.memory, [traced])
    shown = data({"run": "one"}, tmp_path)
    assert shown.tables["over"].columns["saved activations"][-1] == 0
    assert shown.tables["peak"].columns["bytes"] == [100]
    assert shown.more["peaks"] == [
        "rank 0: 1.17 kB in backward blocks.0, 6.00 ns after step 3 began, which took 20.0 ns"
    ]
    run.memory.write_text("{")
    with pytest.raises(UserError, match="holds no memory trace"):
        data({"run": "one"}, tmp_path)


def test_the_timeline_is_searched_and_added_up(visitor: Any) -> None:
    page = visitor.open("runs?run=first")
    assert "Step 4: 232 ms" in page.locator(".verdict").inner_text()
    totals = page.locator('[data-figure="timeline"] .totals')
    assert "forward 160 ms" in totals.inner_text()  # 80 ms on each of two ranks
    box = page.get_by_label("Find events")
    box.fill("backward")
    found = page.locator('[data-figure="timeline"] .find output')
    assert found.inner_text() == "2 of 10 events, 200 ms"
    box.press("Enter")
    assert found.inner_text() == "1 of 2: backward blocks.0 in rank 0 compute, 100 ms"
    box.fill("nothing like it")
    assert found.inner_text() == "no event has it in its name"
    page.get_by_role("button", name="Show all").first.click()
    canvas = page.locator('[data-figure="timeline"] canvas')
    canvas.scroll_into_view_if_needed()
    area = canvas.bounding_box()
    page.keyboard.down("Shift")
    page.mouse.move(area["x"] + 150 + (area["width"] - 162) * 0.1, area["y"] + 20)
    page.mouse.down()
    page.mouse.move(area["x"] + 150 + (area["width"] - 162) * 0.2, area["y"] + 20)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert totals.inner_text().startswith("Selected: 23")
    assert "forward 46" in totals.inner_text()  # a tenth of 232 ms on both ranks
    page.get_by_role("button", name="Select nothing").click()
    assert totals.inner_text().startswith("Shown: 0")


@settings(max_examples=25)
@given(reports())
def test_any_report_can_be_shown(report: StepReport) -> None:
    encode(opened(json.dumps(strict(report.to_json())).encode()))
    assert set(time_figures(report).tables) <= set(HOW_TIMED)


def test_hostile_text_of_a_run_stays_text(browser: Any, studio: Any, tmp_path: Path) -> None:
    hostile = "</script><script>document.title = 'broken'</script><b a=\"1\">"
    make_run(tmp_path / "one", steps=1)
    role = timed_report().roles[0]
    rows = tuple(replace(row, unit=hostile, op=hostile, axes=hostile) for row in role.ledger)
    moves = tuple({**event, "name": hostile, "args": {"op": hostile, "axes": hostile}} for event in role.timeline)
    roles = (replace(role, ledger=rows, timeline=moves),)
    replace(timed_report(), layout=hostile, notes=(hostile,), roles=roles).write(
        tmp_path / "one" / "reports" / "measured.json"
    )
    (tmp_path / "one" / "reports" / "timelines.json").unlink()
    write_export(tmp_path / "page.html", "runs?_tables=ledger,traffic,transport&_how=ledger", runs=tmp_path)
    disk = Visitor(browser, studio, reduced_motion="reduce")
    disk.page.goto((tmp_path / "page.html").as_uri())
    disk.ready()
    assert disk.page.title() == "Runs \u00b7 shardwise studio" and disk.page.locator("main b").count() == 0
    assert disk.page.inner_text("main").count(hostile) >= 10
    disk.close()


def test_a_file_with_two_views_shows_both(browser: Any, studio: Any, runs: Path, tmp_path: Path) -> None:
    write_export(tmp_path / "page.html", "runs?run=first&_tables=ranks", "memory?zero=3&cluster=8xH100", runs=runs)
    disk = Visitor(browser, studio, reduced_motion="reduce")
    disk.page.goto((tmp_path / "page.html").as_uri())
    disk.ready()
    assert disk.table("ranks")["rank"] == [0, 1]
    assert "\u2713 Every collective" in disk.page.locator('[data-figure="ledger"]').inner_text()
    assert disk.page.locator("nav a").all_inner_texts() == ["Runs", "Memory"]
    disk.after(disk.page.get_by_role("link", name="Memory").click)
    assert "zero=3" in disk.page.locator("dl.facts").inner_text()
    disk.close()
    with pytest.raises(UserError, match="one state of memory"):
        exported("memory", "memory?zero=1")


@of_some("a run to its end", FOLLOWED, 2)
def test_the_page_follows_a_run_to_its_end(visitor: Any, runs: Path) -> None:
    make_run(runs / "live", steps=2, status="running")
    try:
        page = visitor.open("runs?run=live&_tables=steps")
        assert visitor.table("steps")["step"] == [1, 2]
        with RunDirectory.open(runs / "live") as run:
            run.append(step_event(3))
            visitor.until("document.querySelectorAll('[data-figure=steps] tbody tr').length === 3")
            page.reload()
            visitor.ready()
            assert visitor.table("steps")["step"] == [1, 2, 3]
            run.append(step_event(4))
            run.update(status="finished")
        visitor.until("document.querySelector('.sentence').textContent.includes('finished')")
        visitor.ready()
        assert visitor.table("steps")["step"] == [1, 2, 3, 4]
    finally:
        (runs / "live" / "run.json").unlink()


@of_some("what comes later", FOLLOWED, 2)
def test_what_comes_later_appears(browser: Any, tmp_path: Path) -> None:
    """A run that begins while the page is open, its reports, which are written when it has ended, and the next run."""
    folder, aside = tmp_path / "runs", tmp_path / "aside"
    with serving(folder) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("runs?_tables=ledger,steps")
        assert "There is no run" in page.locator(".sentence").first.inner_text()
        make_run(tmp_path / "later", steps=2, status="running")
        (tmp_path / "later" / "reports").rename(aside)
        (tmp_path / "later" / "reports").mkdir()
        folder.mkdir()
        (tmp_path / "later").rename(folder / "later")
        visitor.until("document.querySelector('.sentence').textContent.startsWith('Training: step 2')")
        assert not page.locator('[data-figure="ledger"]').is_visible()
        with RunDirectory.open(folder / "later") as run:
            run.append(step_event(3))
            run.update(status="finished")
        visitor.until("document.querySelector('.sentence').textContent.includes('finished')")
        for path in aside.iterdir():
            path.rename(folder / "later" / "reports" / path.name)
        visitor.until("document.querySelector('[data-figure=ledger] table')?.tHead.textContent.includes('predicted')")
        visitor.ready()
        assert "✓ Every collective" in page.locator('[data-figure="ledger"]').inner_text()
        assert visitor.table("steps")["step"] == [1, 2, 3]
        make_run(folder / "next", steps=1, status="running")
        visitor.until("document.querySelector('.sentence').textContent.startsWith('Training: step 1')")
        assert page.locator('[data-control="run"] option').all_inner_texts() == ["next", "later"]
        visitor.close()


def test_a_report_and_its_trace_give_the_same_events(runs: Path) -> None:
    path = runs / "first" / "reports" / "measured.json"
    report = StepReport.read(path)
    of_report = opened(path.read_bytes())
    of_trace = opened(json.dumps(trace_events(report)).encode())
    for name in ("start", "seconds"):
        assert sorted(of_trace.more["timeline"]["columns"][name]) == pytest.approx(
            sorted(of_report.more["timeline"]["columns"][name])
        )
    assert len(of_report.tables["ledger"].columns["op"]) == len(report.roles[0].ledger)


@from_table
def test_other_files_are_refused_in_one_line(content: bytes, line: str) -> None:
    with pytest.raises(UserError, match=line):
        opened(content)


def test_an_audit_is_a_run(tmp_path: Path, browser: Any) -> None:
    """Of two DDP ranks with three steps; rank 1 comes a second late to the all-reduce of each."""
    held = {"parameters": 256, "gradients": 256, "optimizer": 512, "saved": 64, "total": 2000, "peak": 2000}
    model = ("Net", 64, None, [["0.weight", [8, 8], "float32", True, [8, 8]]])
    call = Call(0, 0, "all_reduce", (0, 1), "float32", (64,), 256, 256, None, "train.py:7", "backward", engine="ddp")
    steps, ranks = tuple(StepMark(n + 1, 10.0 * n + 9, held) for n in range(3)), []
    for rank in range(2):
        times = [{"order": n, "step": n, "begin": 10.0 * n + 2 + rank, "end": 10.0 * n + 4} for n in range(3)]
        calls = tuple(replace(call, rank=rank, **about) for about in times)  # type: ignore[arg-type]
        ranks.append(RankRecording(rank, calls, 2, steps=steps, model=model))
    RunDirectory.create(tmp_path / "audit", {"status": "running"}).close()
    keep_run(audit_of(AuditedJob(0, 30.0, ranks, None, False), "train.py"), ranks, tmp_path / "audit")
    view = data({"run": "audit"}, tmp_path)
    assert view.more["layout"] == "dp=2,precision=fp32" and view.more["equal_ledger"] and view.more["equal_classes"]
    arrivals = view.tables["arrivals"].columns
    assert (arrivals["last"], arrivals["late"]) == ([1], [1.0]) and "ranks" not in view.tables
    assert view.more["timeline"]["names"] == ["all_reduce train.py:7"]
    with serving(tmp_path) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("runs?run=audit&_tables=ledger")
        assert "finished: calls of all ranks meet" in page.locator(".sentence").first.text_content()
        assert visitor.table("ledger")["equal"] == [True] and "Speed10.0 sper" in page.locator(".facts").text_content()
        assert page.locator('[data-figure="steps"] h2').text_content() == "Seconds per step"
        visitor.close()


DROP = """(content) => {
    const data = new DataTransfer();
    data.items.add(new File([content], "measured.json"));
    const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.querySelector("h1").dispatchEvent(event);
    return event.defaultPrevented;
}"""
OPENED = "document.querySelector('[data-figure=timeline] h2')?.textContent.startsWith('measured.json')"


def test_a_file_that_is_dropped_anywhere_is_drawn_and_there_is_a_way_back(visitor: Any, runs: Path) -> None:
    content = (runs / "first" / "reports" / "measured.json").read_text()
    page = visitor.open("memory")
    assert page.evaluate(DROP, content), "the browser would leave the page for the file"
    visitor.until(OPENED)
    visitor.ready()
    page.locator('[data-figure="timeline"] .buttons button').first.click()
    assert visitor.table("timeline")["takes"][0] == 0.08
    back = page.get_by_role("button", name="Back to the runs")
    visitor.after(back.click)
    assert page.locator('[data-figure="timeline"] h2').text_content() == "One step on every rank"
    assert page.locator('[data-figure="steps"]').is_visible() and not back.is_visible()
    assert page.evaluate(DROP, content)
    visitor.until(OPENED)
    page.locator("input[type=file]").set_input_files(runs / "first" / "run.json")
    visitor.until("document.querySelector('[role=alert]').textContent.startsWith('run.json: ')")
    visitor.problems.clear()  # the browser itself reports the 400


def test_a_certificate_opens_with_what_is_wrong(visitor: Any, tmp_path: Path) -> None:
    cells = {name: Cell("proven", 1e-16, 1e-9) for name in COLUMNS} | {
        "norm": Cell("wrong", 0.5, 1e-9, "a", 1, "factor of 2")
    }
    row, script = LayoutRow("dp=2", "tiny", 2, cells), "import torch\nraise SystemExit(1)"
    found = WrongCell("norm", "tiny", "dp=2", cells["norm"], ("dp=2 (norm)",), script)
    (tmp_path / "ddp.json").write_text(json.dumps(Certificate("torch DDP", "float64", {}, (row,), (found,)).to_json()))
    page = visitor.open("runs")
    page.locator("input[type=file]").set_input_files(tmp_path / "ddp.json")
    visitor.until("document.querySelector('.verdict').textContent.startsWith('torch DDP: ')")
    visitor.ready()
    assert visitor.table("cells")["norm"] == ["wrong"] and visitor.table("findings")["kind"] == ["factor of 2"]
    page.locator('[data-figure="findings"] .buttons button').last.click()
    assert "raise SystemExit(1)" in page.locator('[data-figure="findings"]').inner_text()
    for damaged in ({"rows": []}, {"findings": [{}]}):
        with pytest.raises(UserError, match="certificate is damaged"):
            opened(
                json.dumps({"engine": "e", "rows": [row.to_json()], "findings": [], "counts": {}, **damaged}).encode()
            )
