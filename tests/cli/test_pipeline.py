"""`shardwise pipeline`: list, show, verify, simulate, bubble."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import shardwise
from harness.processes import alive, children
from shardwise.cli.main import main
from shardwise.cli.show.pipeline_table import order
from shardwise.emulate import job
from shardwise.emulate.job import EmulationResult, MeasuredCase, one_by_one
from shardwise.report.step_report import StepReport
from shardwise.schedule.pipeline import build, generators
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.show import to_text
from shardwise.schedule.pipeline.simulate import simulate


@pytest.fixture
def pipeline(command):
    return partial(command, "pipeline")


def test_list_has_every_schedule(pipeline):
    code, out, _ = pipeline("list")
    assert code == 0 and all(g.name in out for g in generators())
    code, out, _ = pipeline("list", "--json")
    assert code == 0 and [found["name"] for found in json.loads(out)] == [g.name for g in generators()]


def test_show_draws_and_lists(pipeline):
    code, out, _ = pipeline("show", "1f1b", "--ranks", 2, "--micro", 2)
    assert code == 0 and "1f1b: 2 ranks, 2 micro-batches; 20 actions" in out
    assert "rank 0  F0 F1 ·  ·  B0    ·  B1\nrank 1  ·  F0 B0    F1 B1    ·  ·" in out
    assert "rank 0: 0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD 1SHARE_LOSS" in out
    code, out, _ = pipeline("show", "dualpipe-v", "--ranks", 2, "--micro", 4, "--json")
    assert code == 0 and json.loads(out)["placement"] == [0, 1, 1, 0]
    code, out, _ = pipeline("show", "naive", "--ranks", 4, "--micro", 100)
    assert code == 0 and "one unit each" not in out, "too long to draw"


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_files_are_written_verified_and_simulated(pipeline, tmp_path, suffix):
    file = tmp_path / f"mine{suffix}"
    assert pipeline("show", "zb-v", "--ranks", 3, "--micro", 6, "--zero", 3, "--out", file)[0] == 0
    code, out, _ = pipeline("verify", "--file", file)
    assert code == 0 and "right, 1 case" in out
    code, out, _ = pipeline("simulate", "--file", file, "--json")
    assert code == 0 and json.loads(out)["micro"] == 6
    file.write_text(file.read_text().replace("4SEND_F3", "4SEND_F2"))
    code, out, _ = pipeline("verify", "--file", file)
    assert code == 1 and "4SEND_F2" in out and "0 of 1" in out
    code, out, err = pipeline("simulate", "--file", file)
    assert code == 2 and "this schedule is wrong: rank 1" in err


def test_a_csv_of_computations_is_completed(pipeline, tmp_path):
    file = tmp_path / "torch.csv"
    pipeline("show", "interleaved", "--ranks", 2, "--micro", 4, "--out", file, "--compute-only")
    assert "SEND" not in file.read_text()
    code, out, _ = pipeline("verify", "--file", file, "--zero", 3, "--tied", "--json")
    assert code == 0 and json.loads(out)[0]["findings"] == []


def test_verify_tells_how_many(pipeline):
    code, out, _ = pipeline("verify", "--all", "--ranks", "1-3", "--micro", "1,4", "--zero", 2, "--tied")
    assert code == 0 and out.count("✓") == len(generators()) and "11 of 11 are right" in out
    code, out, _ = pipeline("verify", "zb-h1", "--ranks", "2", "--micro", "1-4", "--json")
    assert code == 0 and json.loads(out) == [{"schedule": "zb-h1", "checked": 4, "findings": []}]
    code, out, _ = pipeline("verify", "--all", "--ranks", "1", "--micro", "4")
    assert code == 0 and "- zb-v: no case is legal" in out


def test_simulate_prints_bubbles_and_writes_timelines(pipeline, tmp_path):
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    argv = ["simulate", "gpipe", "--ranks", 4, "--micro", 8, "--times", "F=10ms,B=20ms"]
    code, out, _ = pipeline(*argv, "--report", report, "--trace", trace)
    assert code == 0 and "makespan 330 ms; bubble 37.5% over ideal, 27.3% of the total" in out
    assert StepReport.read(report).time == pytest.approx(0.33)
    assert json.loads(trace.read_text())["traceEvents"]
    _, out, _ = pipeline(*argv, "--json", "--hop", "1ms", "--bytes", "1MB", "--bandwidth", "1GB")
    assert json.loads(out)["makespan_s"] == pytest.approx(0.33 + 6 * 0.002)
    _, out, _ = pipeline(*argv, "--json", "--recompute", "0.125")
    data = json.loads(out)
    assert data["makespan_s"] == pytest.approx(0.44) and data["by_rank"][0]["peak"]["held"] == 1.875
    _, out, _ = pipeline(*argv, "--json", "--stages", "2/2/2/1", "--head", 1)
    assert json.loads(out)["makespan_s"] == pytest.approx(0.33)
    _, out, _ = pipeline(*argv, "--json", "--layers", 5)
    assert json.loads(out)["by_rank"][0]["busy_s"] == pytest.approx(0.24 * 8 / 5)


def test_bubble_prints_plots_and_finds_the_least_number(pipeline):
    code, out, _ = pipeline("bubble", "gpipe", "interleaved", "--ranks", 4, "--want", "20%")
    assert code == 0 and "75.0% / 42.9%" in out and "interleaved v=2" in out and "micro-batches" in out
    # (p-1)/(m+p-1) is 20% at m = 12, and half the bubble at m = 6.
    assert "gpipe: 20% of the total takes at least 12 micro-batches" in out
    assert "interleaved v=2: 20% of the total takes at least 6 micro-batches" in out
    code, out, _ = pipeline("bubble", "--ranks", 2, "--micro", "1-12", "--json", "--want", "0.1")
    found = {entry["schedule"]: entry for entry in json.loads(out)}
    assert code == 0 and "naive" not in found and found["1f1b"]["least_micro"] == 9
    assert [point["micro"] for point in found["dualpipe-v"]["points"]] == list(range(4, 13))
    _, out, _ = pipeline("bubble", "naive", "--ranks", 4, "--micro", "4", "--want", "50%")
    assert "naive: 50% of the total is not reached with up to 4,096 micro-batches" in out


@pytest.mark.parametrize("action", ["show", "simulate", "run", "verify"])
@pytest.mark.parametrize(
    "flag", ["--early", "--tied", "--zero 2", "--ranks 4", "--micro 8", "--virtual 2", "--tokens 2"]
)
def test_what_a_file_says_itself_is_not_given_beside_it(pipeline, tmp_path, action, flag):
    if (action, flag) == ("verify", "--tokens 2"):
        return
    file = tmp_path / "schedule.txt"
    file.write_text(to_text(build("1f1b", 2, 2)))
    pretend = ["--emulate", "F=1ms,B=1ms"] if action == "run" else []
    code, out, err = pipeline(action, "--file", file, *flag.split(), *pretend)
    assert (code, out) == (2, "") and f"{flag.split()[0]} is in the schedule of --file" in err and err.count("\n") == 1


def test_a_wrong_schedule_is_shown_without_times(pipeline, tmp_path):
    file = tmp_path / "wrong.txt"
    for text, words in (
        ("rank 0: 0F0 7F0", "action 1 (7F0): this rank has the stages 0 only"),
        ("rank 0: 0F0 0F0", "action 1 (0F0): it happens a second time"),
    ):
        file.write_text(f"pipeline x micro=1 stages=0 forward-only\n{text}\n")
        code, out, err = pipeline("show", "--file", file)
        assert (code, err) == (0, "") and words in out and text in out and "time, where" not in out


def test_a_narrow_terminal_loses_no_figure(pipeline, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "56")
    code, out, _ = pipeline("bubble", "gpipe", "--ranks", 4, "--micro", "4-40")
    assert code == 0 and "\x1b" in out and "…" not in out


def test_nothing_heavy_is_loaded():
    run = "import sys\nfrom shardwise.cli.main import main\nmain(['pipeline', 'list', '--json'])"
    code = f"{run}\nsys.exit(bool({{'torch', 'rich'}} & set(sys.modules)))"
    environment = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


# -- `shardwise pipeline run`: what it runs, what it lays beside it, and what it refuses


TINY = ("--emulate", "F=1ms,I=1ms,W=1ms", "--steps", 1)


@pytest.fixture
def run(command):
    return partial(command, "pipeline", "run")


@pytest.fixture
def pretended(monkeypatch):
    """Even the processes are pretended: each step takes a tenth longer than simulated."""

    def measure(cases, nbytes, steps, transport):
        found = []
        for case in cases:
            executed = one_by_one(case.schedule)
            slow = simulate(executed, case.times)
            spans = tuple(tuple((1.1 * a, 1.1 * b) for a, b in mine) for mine in slow.spans)
            expected = peaks(case.schedule, case.held)
            held, buffers = tuple(int(p.held) for p in expected), tuple(p.buffers for p in expected)
            found.append(MeasuredCase(case, (type(slow)(executed, case.times, spans),) * steps, held, buffers))
        return EmulationResult("shared", 0.002, tuple(found))

    monkeypatch.setattr(job, "measure", measure)


def test_a_file_s_schedule_runs_beside_its_simulation(run, tmp_path, capfd):
    file, trace = tmp_path / "mine.txt", tmp_path / "trace.json"
    assert main(["pipeline", "show", "zb-v", "--ranks", "2", "--micro", "4", "--tied", "--out", str(file)]) == 0
    options = "--times F=1ms,I=1ms,W=1ms --hop 3ms --no-overlap --json --weight-share 0.5"
    simulate = ["simulate", "--file", str(file), *options.split()]
    capfd.readouterr()
    assert main(["pipeline", *simulate]) == 0
    expected = json.loads(capfd.readouterr().out)
    argv = ["--file", file, *TINY, "--hop", "3ms", "--bytes", 1001, "--saved", "2kB", "--weight-share", 0.5]
    code, out, err = run(*argv, "--trace", trace, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["message_bytes"], result["hop"], result["hop_s"]) == (1008, "given", 0.003)
    (row,) = result["schedules"]
    assert row["ratio"] == row["measured"]["makespan_s"] / row["simulated"]["makespan_s"]
    for key in ("makespan_s", "bubble_over_ideal", "bubble_of_total"):
        assert row["simulated"][key] == pytest.approx(expected[key])
    for mine, theirs in zip(row["simulated"]["by_rank"], expected["by_rank"], strict=True):
        assert mine["busy_s"] == pytest.approx(theirs["busy_s"])
        assert mine["held_bytes"] == 2000 * theirs["peak"]["held"] and mine["buffers"] == theirs["peak"]["buffers"]
    for mine, theirs in zip(row["measured"]["by_rank"], row["simulated"]["by_rank"], strict=True):
        assert (mine["held_bytes"], mine["buffers"]) == (theirs["held_bytes"], theirs["buffers"])
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {f"{stage}{kind}{micro}" for stage in range(4) for kind in "FIW" for micro in range(4)} <= names
    assert {"0SEND_F0", "1RECV_F0", "3SHARE_LOSS"} <= names


def test_one_schedule_is_told_rank_by_rank(run, pretended):
    code, out, _ = run("1f1b", "--ranks", 4, "--micro", 8, "--emulate", "F=20ms,I=20ms,W=20ms", "--hop", 0)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("1f1b: 4 ranks, 8 micro-batches")
    assert "messages of 1.00 MB over shared memory" in lines[1] and "(given)" in lines[1]
    assert "726 ms measured, the median of 726 ms, 726 ms, 726 ms; 660 ms simulated; ratio 1.100" in lines[2]
    assert [line.split()[0] for line in lines[5:9]] == ["0", "1", "2", "3"]
    assert "726 ms / 660 ms" in lines[5] and "528 ms / 480 ms" in lines[5] and "27.3% / 27.3%" in lines[5]
    assert "4.00 MB / 4.00 MB" in lines[5] and "1.00 MB / 1.00 MB" in lines[8]


def test_all_are_told_by_their_simulated_makespan(run, pretended):
    argv = ["--all", "--ranks", 3, "--micro", 4, *TINY]
    code, out, _ = run(*argv, "--json")
    result = json.loads(out)
    assert code == 0 and (result["hop"], result["hop_s"]) == ("measured", 0.002)
    assert {row["schedule"] for row in result["schedules"]} | result["left_out"].keys() == {
        g.name for g in generators()
    }
    assert "m of at least 6" in result["left_out"]["dualpipe-v"]
    makespans = [row["simulated"]["makespan_s"] for row in result["schedules"]]
    assert makespans == sorted(makespans)
    code, out, _ = run(*argv)
    names = [line.split()[0] for line in out.splitlines()[3 : 3 + len(makespans)]]
    assert names == [row["schedule"] for row in result["schedules"]]
    assert "left out: dualpipe-v: " in out and f" of {result['order']['pairs']} pairs" in out


def test_chunks_are_given_to_those_that_can_have_them(run, pretended):
    _, out, _ = run("--all", "--ranks", 2, "--micro", 4, "--virtual", 3, *TINY, "--json")
    virtual = {row["schedule"]: row["virtual"] for row in json.loads(out)["schedules"]}
    assert (virtual["interleaved"], virtual["zb-v"], virtual["1f1b"]) == (3, 2, 1)


def test_only_pairs_that_differ_must_be_in_order():
    def row(name, simulated, measured):
        made = {"simulated": {"makespan_s": simulated}, "measured": {"makespan_s": measured}}
        return {"schedule": name, "virtual": 1, **made}

    rows = [row("a", 100, 120), row("b", 104, 110), row("c", 106, 115), row("d", 200, 190)]
    assert order(rows) == {"pairs": 4, "wrong": [("a", "c")]}


def test_a_wrong_schedule_is_refused(run, tmp_path):
    file = tmp_path / "mine.txt"
    assert main(["pipeline", "show", "1f1b", "--ranks", "2", "--micro", "2", "--out", str(file)]) == 0
    file.write_text(file.read_text().replace("0SEND_F0 ", ""))
    code, _, err = run("--file", file, *TINY)
    assert code == 2 and "this schedule is wrong: rank" in err


def test_a_killed_rank_is_one_line_and_leaves_nothing():
    command = [sys.executable, "-m", "shardwise", "pipeline", "run", "1f1b", "--ranks", "2", "--micro", "4"]
    command += ["--emulate", "F=60,I=60,W=60", "--steps", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(ranks := children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    lines = err.splitlines()
    assert (process.returncode, out) == (1, "") and "rank 1 was killed by SIGKILL" in lines[-1]
    assert len(lines) == 2 and lines[0].startswith("1 schedule, 1 step each: about ")
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, ranks))
