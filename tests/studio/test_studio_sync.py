"""Workers and servers: the view's data are the record's, of runs and in virtual time; drawn, and followed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from studio_visitor import Visitor, plain_columns, serving, step_event
from test_studio_page import answers_the_pointer, has_room, is_accessible_in_both_themes

from harness.cases import from_table
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.virtual_run import virtual_run
from shardwise.report.run_directory import RunDirectory
from shardwise.schedule.stragglers import Stragglers
from shardwise.schedule.update_record import UpdateRecord
from shardwise.studio.data.sync import LOCKSTEP, data

SERVED = "dp=3,sync=ssp,staleness=2,servers=2"


def recorded(text: str, *slow: str) -> UpdateRecord:
    return virtual_run(Layout.parse(text), 20, 0.05, Stragglers.parse(slow or ("none",)))


def make_runs(folder: Path) -> list[UpdateRecord]:
    """Runs of every kind: with two servers, with dropped gradients, of replicas, in lockstep, and just begun."""
    records = [recorded(SERVED, "rank=1,factor=3"), recorded(SERVED, "rank=2,factor=2,probability=0.5")]
    texts = {"served": SERVED, "backup": "dp=3,sync=ps,backup=1", "apart": "dp=2,sync=local,every=3"}
    for name, text in (texts | {"lockstep": "dp=2,zero=3", "begun": "dp=2,sync=async"}).items():
        config = {"layout": text, "model": {"name": "small"}, "workload": {}, "steps": 20}
        with RunDirectory.create(folder / name, {"config": config, "ranks": 3, "status": "finished"}) as run:
            for server, record in enumerate(records if name == "served" else []):
                run.append_updates({"server": server, **record.fresh()})
            if name == "backup":
                run.append_updates({"server": 0, **recorded(text, "rank=0,factor=3").fresh()})
            for step in range(1, 9) if name == "apart" else ():
                run.append(step_event(step) | ({"outer_loss": 7.0 - step / 10} if step % 3 == 0 else {}))
    return records


def view(folder: Path, **words: str) -> Any:
    return data(words, folder)


def test_incast_is_measured_and_grows_with_the_workers_alone_over_a_server(tmp_path: Path) -> None:
    make_runs(tmp_path)
    columns = view(tmp_path, run="served").tables["incast"].columns
    assert columns == view(tmp_path).tables["incast"].columns
    rows = list(zip(*(columns[name] for name in ("over", "workers", "measured step", "predicted")), strict=True))
    steps = {over: {row[1]: row[2] for row in rows if row[0] == over} for over in ("server", "ring")}
    assert steps["server"][6] > 5 * steps["server"][1] and steps["ring"][6] < 2 * steps["ring"][2]
    assert all(abs(predicted / step - 1) < 0.1 for _, _, step, predicted in rows)
    assert "incast" not in view(tmp_path, run="apart").tables


@pytest.mark.parametrize("server", [0, 1])
def test_figures_of_a_run_are_its_record(tmp_path: Path, server: int) -> None:
    record = make_runs(tmp_path)[server]
    found = view(tmp_path, run="served", server=str(server))
    columns = found.tables["gradients"].columns
    assert list(columns["version read"]) == [one.read for one in record.gradients]
    assert list(columns["updates behind"]) == [one.staleness for one in record.gradients]
    assert columns["pushed"] == pytest.approx([one.arrived for one in record.gradients])
    assert columns["answered"] == pytest.approx([one.answered for one in record.gradients])
    workers = found.tables["workers"].columns
    assert workers["waiting"] == pytest.approx([tally.waiting for tally in record.workers])
    assert workers["over the median"] == pytest.approx(record.slowness())
    stale = found.tables["staleness"].columns
    assert dict(zip(stale["updates behind"], stale["gradients"], strict=True)) == record.staleness
    waits = found.tables["waits"].columns
    assert sum(waits["time"]) == pytest.approx(sum(sum(t.waited_for.values()) for t in record.workers))
    assert found.more["servers"] == 2 and found.how["gradients"].command.startswith("shardwise sync show")
    drawn(found, record)


def drawn(found: Any, record: UpdateRecord) -> None:
    """A bar for each gradient, each wait and each update, where its times say."""
    events = {name: values.tolist() for name, values in found.more["events"].items()}
    rows = list(zip(*(events[name] for name in ("rank", "start", "seconds", "kind", "label", "gradient")), strict=True))
    bars = [row for row in rows if row[3] in (0, 1, 2)]
    assert len(bars) == len(record.gradients)
    for rank, start, seconds, kind, label, place in bars:
        one = record.gradients[place]
        assert (rank, label) == (one.worker, one.read)
        assert (start, start + seconds) == pytest.approx((one.started, one.arrived), abs=1e-5)
        assert kind == (2 if one.update is None else int(bool(one.staleness)))
    waits = sum(row[2] for row in rows if row[3] == 3)
    assert waits == pytest.approx(sum(sum(t.waited_for.values()) for t in record.workers), abs=1e-3)
    ends = [row[1] + row[2] for row in rows if row[3] == 4]
    assert ends == pytest.approx(record.updated, abs=1e-5)
    assert [row[4] for row in rows if row[3] == 4] == list(range(1, record.updates + 1))


def test_every_kind_of_run_says_what_there_is(tmp_path: Path) -> None:
    make_runs(tmp_path)
    backup = view(tmp_path, run="backup")
    dropped = backup.more["summary"]["dropped"]
    assert dropped > 0 and list(backup.tables["gradients"].columns["in update"]).count("dropped") == dropped
    assert LOCKSTEP in backup.more["sentence"] and f"{dropped} of " in backup.more["sentence"]
    assert "staleness" not in backup.tables
    lockstep = view(tmp_path, run="lockstep")
    assert (lockstep.more["sentence"], lockstep.tables) == (LOCKSTEP, {})
    assert "No update is recorded yet" in view(tmp_path, run="begun").more["sentence"]
    apart = view(tmp_path, run="apart")
    rounds = apart.tables["rounds"].columns
    assert (rounds["steps"], rounds["last step"]) == ([3, 3, 2], [3, 6, 8])
    assert rounds["loss of all replicas"] == [6.7, 6.4, None] and rounds["time"] == [1.5, 1.5, 1.0]
    assert "workers" not in apart.tables and "waiting_share" not in apart.more["summary"], "it is not known"
    assert apart.more["count"] == 1 and apart.more["names"] == ["replica", "outer step"]


def test_a_long_record_says_what_it_leaves_out(tmp_path: Path) -> None:
    record = UpdateRecord(1, most=3)
    for step in range(5):
        record.push(0, step, step, float(step), step + 1.0)
    with RunDirectory.create(tmp_path / "long", {"config": {"layout": "dp=1,sync=async"}, "status": "running"}) as run:
        run.append_updates({"server": 0, **record.fresh()})
    found = view(tmp_path, run="long")
    assert "The first 3 gradients; 2 later ones" in found.tables["gradients"].title
    assert found.more["summary"]["gradients"] == 5 and len(found.more["events"]["kind"]) == 3


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"sync": "async", "workers": "5", "slow": "all", "probability": "0.3"},
        {"sync": "ps", "backup": "1", "factor": "2.5", "seed": "7", "gradient": "12.5"},
        {"sync": "local", "every": "3", "steps": "20"},
        {"sync": "allreduce", "slow": "none"},
    ],
    ids=["ssp", "async", "backup", "local", "allreduce"],
)
def test_a_simulation_is_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: dict[str, str]) -> None:
    import shlex

    found = view(tmp_path, **words)
    (command,) = {how.command for name, how in found.how.items() if name not in ("compared", "incast")}
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (server,) = printed["servers"]
    assert printed["seconds"] == found.more["summary"]["seconds"]
    columns = found.tables["gradients"].columns
    for heading, name in (
        ("version read", "read"),
        ("began", "started"),
        ("pushed", "arrived"),
        ("waited for", "waited_for"),
    ):
        assert list(columns[heading]) == [one[name] for one in server["gradients_listed"]]
    assert found.tables["workers"].columns["waiting"] == [one["waiting_s"] for one in server["workers"]]
    layout = Layout.parse(printed["layout"])
    record = virtual_run(layout, found.state["steps"], found.state["gradient"] / 1e3, Stragglers.parse(
        [printed["slow"]], found.state["seed"]))  # fmt: skip
    drawn(found, record)
    compared = found.tables["compared"].columns
    commands = found.how["compared"].command.split(" && ")
    assert len(compared["layout"]) == len(commands) and compared["layout"][0] == printed["layout"]
    for i, one in enumerate(commands):
        assert main([*shlex.split(one)[1:], "--json"]) == 0
        other = json.loads(capsys.readouterr().out)
        (server,) = other["servers"]
        assert (compared["layout"][i], compared["takes"][i]) == (other["layout"], other["seconds"])
        assert compared["waiting"][i] == server["waiting_share"]
        assert (compared["at most"][i], compared["gradients dropped"][i]) == (
            server["max_staleness"],
            server["dropped"],
        )


@from_table
def test_mistakes_are_one_line(tmp_path: Path, words: dict[str, str], line: str) -> None:
    make_runs(tmp_path)
    with pytest.raises(UserError, match=line):
        view(tmp_path, **words)


# -- in the browser


def test_a_run_is_chosen_and_each_bar_says_what_it_read(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    with serving(tmp_path) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("sync?_tables=gradients,workers,waits,staleness")
        assert page.locator('[data-control="sync"]').is_visible()
        visitor.after(lambda: page.locator('[data-control="run"] select').select_option("served"))
        assert not page.locator('[data-control="sync"]').is_visible() and visitor.given["run"] == "served"
        found = view(tmp_path, run="served")
        for name in ("gradients", "workers", "waits", "staleness"):
            expected = {heading: values[:100] for heading, values in plain_columns(found.tables[name]).items()}
            assert visitor.table(name) == expected, name
        assert page.locator(".sentence:visible").first.inner_text() == found.more["sentence"]
        said = pointed_at(page, found)
        assert any("waits" in words and "for worker" in words for words in said)
        visitor.tab_to('[data-control="server"] input')
        visitor.after(lambda: page.keyboard.press("ArrowRight"))
        other = view(tmp_path, run="served", server="1")
        assert visitor.table("workers") == plain_columns(other.tables["workers"])
        is_accessible_in_both_themes(page)
        visitor.close()


def pointed_at(page: Any, found: Any) -> set[str]:
    """Words beside the pointer at the middle of every event of the first lane; each names its version."""
    canvas, events, said = page.locator('[data-figure="gradients"] canvas'), found.more["events"], set()
    box = canvas.bounding_box()
    whole = max(events["start"] + events["seconds"])
    left, wide = 86, box["width"] - 86 - 12
    for i in range(len(events["kind"])):
        if events["rank"][i] or events["seconds"][i] / whole * wide < 4:
            continue
        middle = events["start"][i] + events["seconds"][i] / 2
        page.mouse.move(box["x"] + left + middle / whole * wide, box["y"] + 8 + 10)
        words = page.locator(".tip:visible").inner_text()
        said.add(words)
        if events["kind"][i] != 3:
            step = found.tables["gradients"].columns["step"][events["gradient"][i]]
            assert words.startswith(f"worker 0, step {step}: read version {events['label'][i]}, "), words
    return said


def test_lanes_are_moved_by_keys_and_fit_narrow_screens(visitor: Visitor) -> None:
    page = visitor.open("sync?sync=ps&backup=1&slow=1&steps=40")
    canvas = page.locator('[data-figure="gradients"] canvas')
    visitor.tab_to('[data-figure="gradients"] canvas')
    pixels = "document.querySelector('[data-figure=gradients] canvas').toDataURL()"
    before = page.evaluate(pixels)
    page.keyboard.press("+")
    visitor.until("location.hash.includes('_window')")
    visitor.until(f"{pixels} !== {json.dumps(before)}")
    assert "dropped" in page.locator('[data-figure="gradients"] .legend').inner_text()
    assert "40 updates" in (canvas.get_attribute("aria-label") or "")
    answers_the_pointer(page)
    has_room(page, 1440, 600, 390, 320)


def test_runs_without_lanes_and_of_replicas(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    with serving(tmp_path) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("sync?run=lockstep")
        assert page.locator(".sentence:visible").inner_text() == LOCKSTEP
        assert page.locator("main canvas:visible").count() == 0
        page = visitor.open("sync?run=apart&_tables=rounds")
        assert visitor.table("rounds")["loss of all replicas"] == [6.7, 6.4, None]
        assert page.locator('[data-figure="rounds"] canvas').is_visible()
        assert not page.locator('[data-figure="waits"]').is_visible()
        answers_the_pointer(page)
        has_room(page, 1440, 320)
        visitor.close()


def test_a_run_in_progress_is_followed(browser: Any, tmp_path: Path) -> None:
    text = "dp=2,sync=async"
    with RunDirectory.create(tmp_path / "live", {"config": {"layout": text}, "status": "running"}) as run:
        record = UpdateRecord(2)
        with serving(tmp_path) as studio:
            visitor = Visitor(browser, studio, reduced_motion="reduce")
            page = visitor.open("sync?run=live")
            assert "No update is recorded yet" in page.locator(".sentence:visible").inner_text()
            record.push(0, 0, 0, 0.0, 1.0)
            run.append_updates({"server": 0, **record.fresh()})
            visitor.until("document.querySelector('[data-figure=gradients]').checkVisibility()")
            run.update(status="finished")
            visitor.close()
    assert math.isnan(record.gradients[0].answered)


def test_runs_lead_to_their_workers(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    with serving(tmp_path) as studio:
        visitor = Visitor(browser, studio, reduced_motion="reduce")
        page = visitor.open("runs?run=lockstep")
        assert page.get_by_role("link", name="Workers and servers").count() == 1, "the view's own link alone"
        page = visitor.open("runs?run=served")
        visitor.after(lambda: page.locator("main").get_by_role("link", name="Workers and servers").click())
        assert visitor.given == {"run": "served"} and page.locator('[data-figure="gradients"]').is_visible()
        visitor.close()
