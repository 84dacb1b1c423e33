"""`shardwise pipeline run`: what it runs, what it lays beside it, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from harness.processes import alive, children
from shardwise.cli.main import main
from shardwise.cli.show.pipeline_table import order
from shardwise.emulate import job
from shardwise.emulate.job import EmulationResult, MeasuredCase, one_by_one
from shardwise.schedule.pipeline import generators
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.simulate import simulate

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
