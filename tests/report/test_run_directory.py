"""Run directories: nothing overwritten, nothing lost, torn lines forgiven, damage named."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.report import RunDirectory
from shardwise.report.run_directory import next_free

values = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
events = st.lists(st.dictionaries(st.text(), values | st.lists(values, max_size=3), max_size=4), max_size=8)


def seen(run, after=0):
    return [event for _, event in run.events(after)]


@given(events)
def test_events_come_back_as_they_went_in(tmp_path_factory, some):
    path = tmp_path_factory.mktemp("runs") / "a"
    with RunDirectory.create(path, {}) as run:
        for event in some:
            run.append(event)
        assert seen(RunDirectory.open(path)) == some


@given(events, events)
def test_a_cursor_goes_on_where_it_stopped(tmp_path_factory, first, second):
    with RunDirectory.create(tmp_path_factory.mktemp("runs") / "a", {}) as run:
        for event in first:
            run.append(event)
        cursor = max((cursor for cursor, _ in run.events()), default=0)
        for event in second:
            run.append(event)
        assert seen(run, cursor) == second


@given(st.integers(min_value=1, max_value=60))
def test_a_torn_last_line_is_left_out_and_the_next_event_is_whole(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("runs") / "a"
    with RunDirectory.create(path, {}) as run:
        run.append({"step": 1, "loss": 2.5})
        run.append({"step": 2, "text": "x" * 60})
    content = run.events_path.read_bytes()
    run.events_path.write_bytes(content[:-cut])
    again = RunDirectory.open(path)
    assert seen(again) == [{"step": 1, "loss": 2.5}]
    with again:
        again.append({"step": 3})
    assert seen(again) == [{"step": 1, "loss": 2.5}, {"step": 3}]


def test_an_event_is_on_disk_when_append_returns(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.append({"step": 1})
    code = "import sys; from shardwise.report import RunDirectory as R; print(list(R.open(sys.argv[1]).events()))"
    out = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, check=True)
    assert "{'step': 1}" in out.stdout
    run.close()


def test_nan_is_written_as_strict_json(tmp_path):
    with RunDirectory.create(tmp_path / "a", {"lr": float("inf")}) as run:
        run.append({"loss": float("nan"), "deep": {"norms": [float("-inf")]}})
    assert seen(run) == [{"loss": "NaN", "deep": {"norms": ["-Infinity"]}}]
    assert run.run == {"lr": "Infinity"} and float(run.run["lr"]) == float("inf")


def test_a_damaged_line_is_named(tmp_path):
    with RunDirectory.create(tmp_path / "a", {}) as run:
        run.append({"step": 1})
    for damage in (b"{oops\n", b"5\n", b"\xff\n"):
        run.events_path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 2}\n')
        with pytest.raises(UserError, match=r"events\.jsonl is damaged"):
            seen(run)


def test_a_cursor_beyond_the_file_is_refused(tmp_path):
    with RunDirectory.create(tmp_path / "a", {}) as run:
        run.append({"step": 1})
    with pytest.raises(UserError, match="shorter than the cursor"):
        seen(run, 10_000)


def test_create_keeps_an_existing_run(tmp_path):
    with RunDirectory.create(tmp_path / "a", {"status": "finished"}) as run:
        run.append({"step": 1})
    with pytest.raises(UserError, match=r"nothing was overwritten.*--out.*--resume"):
        RunDirectory.create(tmp_path / "a", {"status": "running"})
    assert run.run == {"status": "finished"} and seen(run) == [{"step": 1}]
    with RunDirectory.create(tmp_path / "a", {"status": "running"}, resume=True) as resumed:
        resumed.append({"step": 2})
    assert resumed.run == {"status": "running"} and seen(resumed) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("resume", [False, True])
def test_create_keeps_what_is_not_a_run(tmp_path, resume):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds no run.*--out"):
        RunDirectory.create(tmp_path, {}, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_create_takes_empty_and_missing_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "deep" / "er"):
        run = RunDirectory.create(path, {"layout": "dp=2"})
        assert run.run == {"layout": "dp=2"} and run.reports.is_dir() and run.checkpoints.is_dir()


def test_places_that_cannot_hold_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="it is not a directory; choose another --out"):
            RunDirectory.create(path, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_parent_is_a_user_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied; choose another --out"):
        RunDirectory.create(tmp_path / "a", {})


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_a_user_error(tmp_path):
    with RunDirectory.create(tmp_path / "a", {}) as run:
        run.append({"step": 1})
        run._events._file = open("/dev/full", "wb")  # noqa: SIM115 (the run closes it)
        with pytest.raises(UserError, match=r"cannot write .*events\.jsonl: No space left"):
            run.append({"step": 2})


def test_events_that_cannot_be_opened_are_a_user_error(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.events_path.mkdir()
    with pytest.raises(UserError, match=r"cannot write .*events\.jsonl"):
        run.append({"step": 1})
    with pytest.raises(UserError, match=r"cannot read .*events\.jsonl"):
        seen(run)


def test_open_needs_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"holds no run: it has no run\.json"):
            RunDirectory.open(path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_run_json_is_named(tmp_path, text):
    run = RunDirectory.create(tmp_path / "a", {})
    (tmp_path / "a" / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        _ = run.run


def test_update_changes_only_its_fields(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {"layout": "dp=2", "status": "running"})
    run.update(status="finished")
    assert json.loads((tmp_path / "a" / "run.json").read_text()) == {"layout": "dp=2", "status": "finished"}


def test_reports_lie_in_the_run(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    assert run.report("predicted") == tmp_path / "a" / "reports" / "predicted.json"


def test_next_free_is_above_all_that_exist(tmp_path):
    base = tmp_path / "runs" / "demo"
    assert next_free(base).name == "demo-1"
    for name in ("demo-2", "demo-9", "demo-10", "demo-x", "demos-77"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert next_free(base) == tmp_path / "runs" / "demo-11"
    RunDirectory.create(next_free(base), {})
    assert next_free(base).name == "demo-12"
