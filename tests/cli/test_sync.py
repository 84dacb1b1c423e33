"""`shardwise sync`: workers of a run, or in virtual time, and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.command_line import mistake
from shardwise.layout import Layout
from shardwise.layout.virtual_run import virtual_run
from shardwise.report.run_directory import RunDirectory
from shardwise.schedule.stragglers import Stragglers
from shardwise.schedule.update_record import UpdateRecord

Command = Callable[..., tuple[int, str, str]]


def record_of(layout: str, *slow: str, steps: int = 24, seconds: float = 0.1) -> UpdateRecord:
    return virtual_run(Layout.parse(layout), steps, seconds, Stragglers.parse(slow or ("none",)))


def make_served_run(path: Path, layout: str, *records: UpdateRecord, status: str = "finished") -> None:
    with RunDirectory.create(path, {"config": {"layout": layout, "steps": 24}, "status": status}) as run:
        for server, record in enumerate(records):
            run.append_updates({"server": server, **record.fresh()})


def simulated(command: Command, layout: str, *words: object) -> dict[str, Any]:
    code, out, err = command("sync", "simulate", layout, *words, "--json")
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def test_slow_ranks_in_virtual_time(command: Command) -> None:
    """Three workers of a step of 100 ms, one of 300 ms: lockstep waits for it, async does not."""
    slow = ("--slow", "rank=1,factor=3", "--steps", 20)
    lockstep = simulated(command, "dp=4,sync=ps", *slow)
    assert lockstep["seconds"] == pytest.approx(20 * 0.3)
    workers = lockstep["servers"][0]["workers"]
    assert [one["waiting_share"] for one in workers] == pytest.approx([2 / 3, 0, 2 / 3, 2 / 3])
    assert [one["slowness"] for one in workers] == pytest.approx([1, 3, 1, 1])
    assert workers[0]["waited_for_s"] == {"1": pytest.approx(20 * 0.2)}
    at_once = simulated(command, "dp=4,sync=async", *slow)
    assert at_once["seconds"] == pytest.approx(80 / (10 / 0.3), rel=0.05)  # ten gradients in 300 ms
    assert at_once["servers"][0]["waiting_share"] == 0 and at_once["servers"][0]["max_staleness"] > 3
    rounds = simulated(command, "dp=4,sync=local,every=5", *slow)
    assert (rounds["servers"][0]["updates"], rounds["seconds"]) == (4, pytest.approx(20 * 0.3))
    backup = simulated(command, "dp=4,sync=ps,backup=1", *slow)["servers"][0]
    assert backup["dropped"] == backup["workers"][1]["gradients"] > 0
    listed = [one for one in backup["gradients_listed"] if one["update"] is None]
    assert {one["worker"] for one in listed} == {1} and len(listed) == backup["dropped"]


def test_a_worker_is_as_slow_as_its_slowest_rank(command: Command) -> None:
    found = simulated(command, "dp=2,tp=2,sync=ps", "--slow", "rank=3,factor=2", "--steps", 5)
    assert [one["computing_s"] for one in found["servers"][0]["workers"]] == pytest.approx([0.5, 1.0])
    assert found["slow"] == "rank=3,factor=2"


@pytest.mark.parametrize(
    "layout",
    ["dp=16,sync=ssp,staleness=3", "dp=12,sync=async", "dp=9,sync=ps,backup=2", "dp=3,sync=local,every=7", "dp=2"],
)
def test_tables_fit_80_columns(command: Command, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command("sync", "simulate", layout, "--slow", "rank=all,factor=4,probability=0.2", "--steps", 400)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80 and "…" not in out
    record = record_of(layout, "rank=all,factor=4,probability=0.2", steps=400)
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows if len(row) >= 7 and row[0].isdecimal() and row[1][0].isdecimal()] == [
        f"{tally.gradients:,}" for tally in record.workers
    ]
    assert ("staleness" in [row[0] for row in rows if row]) == bool(set(record.staleness) - {0})


def test_the_record_of_a_run(command: Command, tmp_path: Path) -> None:
    text = "dp=4,sync=ssp,servers=2,staleness=2"
    records = [record_of(text, "rank=0,factor=2"), record_of(text, "rank=2,factor=5")]
    make_served_run(tmp_path / "run", text, *records)
    code, out, err = command("sync", "show", tmp_path / "run", "--json")
    found = json.loads(out)
    assert (code, err, found["layout"], found["traffic"], found["rounds"]) == (0, "", text, [], [])
    for one, record in zip(found["servers"], records, strict=True):
        expected = json.loads(json.dumps(record.summary()))
        assert {k: v for k, v in one.items() if k in ("updates", "gradients", "dropped", "staleness")} == {
            k: expected[k] for k in ("updates", "gradients", "dropped", "staleness")
        }
        assert [g["read"] for g in one["gradients_listed"]] == [g.read for g in record.gradients]
        assert one["updated_s"] == pytest.approx(record.updated)
    code, out, _ = command("sync", "show", tmp_path / "run")
    assert code == 0 and "server 1: 24 updates by 96 gradients; staleness" in out


def test_runs_without_a_record_say_why(command: Command, tmp_path: Path) -> None:
    make_served_run(tmp_path / "lockstep", "dp=2")
    make_served_run(tmp_path / "begun", "dp=2,sync=ps", status="running")
    make_served_run(tmp_path / "apart", "dp=2,sync=local,every=2")
    with RunDirectory.open(tmp_path / "apart") as run:
        for step in range(1, 6):
            outer = {"outer_loss": 5.0 - step} if step % 2 == 0 else {}
            run.append({"step": step, "loss": 4.0, "seconds": 0.5, **outer})
    assert "lockstep: every gradient" in command("sync", "show", tmp_path / "lockstep")[1]
    assert "no update is recorded" in command("sync", "show", tmp_path / "begun")[1]
    rounds = json.loads(command("sync", "show", tmp_path / "apart", "--json")[1])["rounds"]
    assert [(one["steps"], one["last_step"], one["loss"]) for one in rounds] == [
        (2, 2, 3.0),
        (2, 4, 1.0),
        (1, 5, "NaN"),
    ]
    assert [one["ended"] for one in rounds] == [1.0, 2.0, 2.5]
    assert "rounds of rank 0's replica" in command("sync", "show", tmp_path / "apart")[1]


def test_mistakes_are_one_line(command: Command, tmp_path: Path) -> None:
    make_served_run(tmp_path / "run", "dp=2,sync=ps", record_of("dp=2,sync=ps"))
    lines = (tmp_path / "run" / "updates.jsonl").read_text()
    (tmp_path / "run" / "updates.jsonl").write_text(lines.replace('"begins":true', '"begins":false'))
    mistake(command("sync", "show", tmp_path / "run"), "the record of updates is damaged", "lacks the beginning")
    (tmp_path / "run" / "updates.jsonl").write_text("{}x\n")
    mistake(command("sync", "show", tmp_path / "run"), "updates.jsonl is damaged")
    RunDirectory.create(tmp_path / "bare", {})
    mistake(command("sync", "show", tmp_path / "bare"), "names no layout")
