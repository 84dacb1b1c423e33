"""`shardwise collective`: list, show, verify, cost."""

import argparse
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import shardwise
from harness.cases import table
from harness.processes import alive, children
from shardwise.cli.collective_bench import _network, _summed_up
from shardwise.cluster import Cluster
from shardwise.predict.time import Pricing
from shardwise.schedule import Draft, RepeatedRounds, Round, algorithms, build, find
from shardwise.schedule.comm import COLLECTIVES
from shardwise.schedule.price import price


@pytest.fixture
def collective(command):
    return partial(command, "collective")


def test_list_has_every_algorithm(collective):
    code, out, _ = collective("list")
    assert code == 0 and all(a.name in out and a.collective in out for a in algorithms())
    code, out, _ = collective("list", "--json")
    assert code == 0 and len(json.loads(out)) == len(algorithms())


def test_show_prints_rounds_and_writes_frames(collective, tmp_path):
    file = tmp_path / "frames.json"
    code, out, _ = collective("show", "all-reduce", "ring", "--ranks", 4, "--elements", 10, "--out", file)
    assert code == 0 and "round 5: all-gather" in out and "rank 0 → rank 1: copy chunk 2 (2 elements)" in out
    code, printed, _ = collective("show", "all-reduce", "ring", "--ranks", 4, "--elements", 10, "--json")
    assert code == 0 and json.loads(printed) == json.loads(file.read_text())


def test_show_takes_the_algorithm_s_options(collective):
    _, out, _ = collective("show", "broadcast", "chain", "--ranks", 3, "--root", 2, "--segments", 2)
    assert "rank 2 → rank 0: copy chunk 0" in out and "segments 2" in out
    _, out, _ = collective("show", "all_gather", "hierarchical", "--ranks", 6, "--node", 3, "--json")
    assert json.loads(out)["options"] == {"node": 3}


def test_verify_says_what_is_right(collective):
    code, out, _ = collective("verify", "--all", "--ranks", "1-3,5")
    assert code == 0 and out.count("✓") == len(algorithms()) and "right on 4 numbers of ranks" in out
    code, out, _ = collective("verify", "all-to-all", "--ranks", 4, "--json")
    assert code == 0 and [r["algorithm"] for r in json.loads(out)] == ["pairwise", "bruck"]


def test_verify_ends_with_1_where_something_is_wrong(collective, monkeypatch):
    found = find("reduce", "binomial")

    def wrong(p: int, root: int) -> Draft:
        return Draft(1, [RepeatedRounds.once(Round.of(0, p - 1, 0, reduce=True))])

    monkeypatch.setitem(found.__dict__, "draft", wrong)
    code, out, _ = collective("verify", "reduce", "binomial", "--ranks", "3")
    assert code == 1 and "✗ reduce binomial on 3 ranks: rank 0, chunk 0" in out and "0 of 1" in out


def test_cost_marks_the_cheapest_and_tells_crossovers(collective):
    argv = ("cost", "all-reduce", "--bytes", "64MB", "--ranks", 64, "--cluster", "8x8xH100")
    code, out, _ = collective(*argv)
    assert code == 0 and "✓  hierarchical node=8" in out and "cheapest: recursive-doubling from 256 B" in out
    assert "latency between nodes taken as 2.7 µs" in out
    code, out, _ = collective(*argv, "--json")
    data = json.loads(out)
    first = data["algorithms"][0]
    assert code == 0 and first["algorithm"] == "hierarchical" == data["crossovers"][-1]["algorithm"]
    assert first["seconds"] == pytest.approx(first["alpha_s"] + first["beta_s"] + first["gamma_s"])
    assert data["bytes"] == 64_000_000 and data["nics"] == 8
    _, out, _ = collective(*argv, "--json", "--nics", 1)
    assert json.loads(out)["algorithms"][0]["seconds"] > first["seconds"]


def test_torch_is_not_loaded():
    run = "import sys\nfrom shardwise.cli.main import main\nmain(['collective', 'list'])"
    code = f"{run}\nsys.exit('torch' in sys.modules or 'numpy' not in sys.modules)"
    environment = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize(("cluster", "reads"), [("4xA100", True), ("4xA100-80GB-PCIe", False), ("4xL40S", False)])
def test_one_all_reduce_has_one_price_in_every_command(cluster, reads, command):
    # 16 kB: a token of llama-3-70b in bf16. The software that generation is predicted for reads peers over NVLink.
    _, out, _ = command(
        "collective", "cost", "all-reduce", "--bytes", 16384, "--ranks", 4, "--cluster", cluster, "--json"
    )
    predicted = json.loads(out)["predicted"]
    assert predicted["library_seconds"] == Pricing(Cluster.parse(cluster)).collectives.seconds("all_reduce", 16384, 4)
    assert ("reading_peers_seconds" in predicted) == reads
    _, out, _ = command("generate", "llama-3-70b", "--compare", "tp=4", "--cluster", cluster, "--json")
    generated = json.loads(out)["predicted"]
    each = generated["strategies"][0]["token"]["middle"]["parts"]["tensor"] / (2 * 80)
    assert each == pytest.approx(predicted.get("reading_peers_seconds", predicted["library_seconds"]))
    assert bool(generated["warnings"]) == (cluster != "4xA100")
    code, out, _ = command("collective", "cost", "all-reduce", "--bytes", 16384, "--ranks", 4, "--cluster", cluster)
    assert code == 0 and "by NCCL, its latency" in out


def test_what_nobody_measured_is_priced_on_the_wire_alone(command):
    for arguments in (("broadcast", "--cluster", "8xH100"), ("all-reduce", "--cluster", "8xH100", "--nics", 1)):
        _, out, _ = command("collective", "cost", *arguments, "--bytes", 4096, "--ranks", 8, "--json")
        assert json.loads(out)["predicted"] is None


# -- `shardwise collective bench`: what it measures, what it makes of it, and what it refuses


CLUSTER = table(__file__, "CLUSTER")


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
