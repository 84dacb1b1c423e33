"""`shardwise collective bench`: what it measures, what it makes of it, and what it refuses."""

import argparse
import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from harness.processes import alive, children
from shardwise.cli.collective_bench import _network, _summed_up
from shardwise.schedule import algorithms, build
from shardwise.schedule.collectives import COLLECTIVES
from shardwise.schedule.price import price

CLUSTER = """
nodes = 1
devices_per_node = 2
[device]
name = "this host"
kind = "cpu"
[intra]
alpha = 1e-5
bandwidth = 5e9
"""


@pytest.fixture
def bench(command):
    return partial(command, "collective", "bench")


@pytest.fixture
def bench_ranks(ranks_command):
    return partial(ranks_command, "collective", "bench")


@pytest.fixture
def cluster(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return file


def test_every_algorithm_is_measured_beside_the_backend_s_own(bench_ranks, cluster):
    code, out, err = bench_ranks("--all", "--ranks", 2, "--sizes", "11", "--rounds", 2, "--cluster", cluster, "--json")
    result = json.loads(out)
    assert code == 0 and result["wanted"] == len(result["cells"]) == len(COLLECTIVES)
    assert "all-to-all, 8 bytes (8 of 8)" in err  # a size that does not divide is made one that does
    found = set()
    for cell in result["cells"]:
        for row in cell["rows"]:
            assert len(row["seconds"]) == 2 and row["median_s"] > 0
            assert (row["predicted_s"] is None) == (row["algorithm"] is None)
            found.add((cell["collective"], row["algorithm"], row["transport"]))
    expected = {(a.collective, a.name, by) for a in algorithms() for by in ("shared", "sends")}
    assert found == expected | {(collective, None, "gloo") for collective in COLLECTIVES}


def test_tables_name_what_was_measured(bench_ranks):
    words = ("--ranks", 2, "--transport", "sends", "--sizes", "1KB", "--rounds", 1)
    code, out, _ = bench_ranks("all_reduce", "ring", *words)
    assert code == 0 and "all-reduce of 1.00 kB on 2 ranks" in out and "quartiles" in out
    words = [line.split()[0] for line in out.splitlines() if line]
    assert sorted(words[2:4]) == ["ring", "the"] and "shared" not in out and "predicted" not in out


def test_it_ends_at_the_limit(bench_ranks):
    code, out, _ = bench_ranks("all-reduce", "ring", "--ranks", 2, "--sizes", "4,8", "--limit", 1e-6)
    assert code == 0 and "after 1 of 2 sizes" in out


def test_figures_are_summed_up(cluster):
    network = _network(argparse.Namespace(cluster=str(cluster), ranks=2))
    rows = [
        {"algorithm": "ring", "transport": "sends", "options": {}, "seconds": [4e-3, 1e-3, 2e-3, 3e-3, 5e-3]},
        {"algorithm": None, "transport": "gloo", "options": {}, "seconds": [1e-3]},
    ]
    cell = _summed_up({"collective": "all-reduce", "bytes": 6000, "rows": rows}, 2, network)
    own, ring = cell["rows"]
    assert own["algorithm"] is None and own["median_s"] == 1e-3 and own["quartiles_s"] == [1e-3, 1e-3]
    assert ring["median_s"] == 3e-3 and ring["quartiles_s"] == [2e-3, 4e-3] and ring["bytes_per_s"] == 2e6
    assert ring["predicted_s"] == price(build("all-reduce", "ring", 2), network, 6000).seconds


def test_an_interrupt_leaves_what_was_measured_and_no_process():
    command = [sys.executable, "-m", "shardwise", "collective", "bench", "all-reduce", "ring", "--ranks", "2"]
    command += ["--transport", "sends", "--sizes", "4,64MB", "--rounds", "60"]
    # A shell that runs the tests in its background has them ignore SIGINT, and their children inherit that.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        for line in process.stderr:
            if "(2 of 2)" in line:
                break
        ranks = children(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "all-reduce of 8 B" in out and "stopped by SIGINT" in err
    deadline = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2 and not any(map(alive, ranks))
