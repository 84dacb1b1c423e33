"""`shardwise calibrate network`: two real ranks from end to end, and mistakes that are told before anything starts."""

import io
import json
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

from shardwise.cli import collective_bench
from shardwise.cli.main import main
from shardwise.cluster import Cluster, Link
from shardwise.runtime.measure import probes
from shardwise.runtime.transport import bench
from shardwise.schedule import Algorithm, build
from shardwise.schedule.choose import choose
from shardwise.schedule.network import Network
from shardwise.schedule.price import price

TINY = ("--ranks", "2", "--sizes", "1KiB,4KiB,32MiB", "--rounds", "3")
"""The largest takes long enough, and often enough, to tell a bandwidth on a busy host too."""


@pytest.fixture
def calibrate(command):
    return partial(command, "calibrate", "network")


def test_two_ranks_make_a_cluster_file_that_predicts(ranks_command, capfd, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('devices_per_node = 4\ndevice = "CPU"\n[inter]\nalpha = 1e-5\nbandwidth = 1e9\n')
    code, out, err = ranks_command("calibrate", "network", *TINY, "--out", file, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["held_back"]["sizes"] == [4096] and result["sizes"] == [32 << 20]
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in result["figures"].values())
    cluster = Cluster.parse(str(file))
    # What the file said before stays.
    assert cluster.devices_per_node == 4 and cluster.inter.alpha == 1e-5
    assert cluster.intra.reads and cluster.intra.speeds[0].nbytes == 32 << 20
    # On a busy host a latency may not show beside the noise: it is then zero.
    alpha = result["figures"].get("intra.alpha", {"value": 0.0})
    assert cluster.intra.alpha == pytest.approx(alpha["value"], rel=1e-3)
    text = file.read_text()
    assert "cores" in text.splitlines()[0] and "calibrate network --ranks 2" in cluster.intra.source
    capfd.readouterr()
    assert main(["collective", "cost", "all-reduce", "--bytes", "1MB", "--ranks", "2", "--cluster", str(file)]) == 0
    cheapest = choose("all-reduce", 1e6, 2, cluster)[0]
    assert cheapest.name in capfd.readouterr().out and cheapest.price.seconds > 0


def measured(args, algorithms, sizes, *limits):
    """What ranks would have measured on a busy host with links of 10 µs and 1 GB/s."""
    link = Link(1e-5, 1e9)
    network = Network.of(replace(Cluster.parse(f"{args.ranks}xcpu"), intra=link), args.ranks)

    def seconds(algorithm: Algorithm, size: int) -> list[float]:
        once = price(build(algorithm.collective, algorithm.name, args.ranks), network, size).seconds
        return [factor * once for factor in (1.0, 1.0, 1.5, 9.0)]

    cells = [
        {
            "collective": collective,
            "bytes": size,
            "rows": [
                {"algorithm": a.name, "transport": "sends", "options": {}, "seconds": seconds(a, size)}
                for a in algorithms
                if a.collective == collective
            ],
        }
        for collective in dict.fromkeys(a.collective for a in algorithms)
        for size in sizes
    ]
    return {"wanted": len(cells), "cells": cells}, None


def test_tables_name_figures_and_what_was_held_back(calibrate, monkeypatch, tmp_path):
    monkeypatch.setattr(collective_bench, "measure", measured)
    file = tmp_path / "here.toml"
    sizes = ",".join(f"{4**k}KiB" for k in range(7))
    code, out, _ = calibrate("--ranks", 4, "--transport", "sends", "--sizes", sizes, "--out", file)
    assert code == 0 and f"--cluster {file}" in out and "80% interval" in out
    assert "all-to-all" in out and "of 15 cells" in out  # five collectives have several algorithms, three sizes each
    assert "took 1.25 times the quickest one. Other programs" in out and "# Of the rounds" in file.read_text()
    assert not Cluster.parse(str(file)).intra.reads and Cluster.parse(str(file)).devices_per_node == 4


def erratic(args, algorithms, sizes, *limits):
    """As `measured`, but that what takes how long has nothing to do with what is done."""
    told, failure = measured(args, algorithms, sizes)
    for at, row in enumerate(row for cell in told["cells"] for row in cell["rows"]):
        row["seconds"] = [seconds * (1, 40, 3, 15)[at % 4] for seconds in row["seconds"]]
    return told, failure


def test_figures_that_their_own_check_calls_useless_are_not_written(calibrate, monkeypatch, tmp_path):
    monkeypatch.setattr(collective_bench, "measure", erratic)
    file = tmp_path / "here.toml"
    words = ("--ranks", 4, "--transport", "sends", "--sizes", ",".join(f"{4**k}KiB" for k in range(7)), "--out", file)
    code, out, err = calibrate(*words)
    assert code == 1 and "median error" in out and "written" not in out and not file.exists()
    announced, refused = err.splitlines()
    assert refused.startswith(f"shardwise: error: {file} is not written: the median error") and "--force" in refused
    code, out, err = calibrate(*words, "--force")
    assert code == 0 and f"--cluster {file}" in out and file.exists() and err.splitlines() == [announced]
    code, out, _ = calibrate(*words[:-2], "--json")
    assert code == 0 and json.loads(out)["held_back"]["median_error"] > 0.4


def test_a_cell_ends_when_its_two_quickest_rounds_agree():
    assert not bench.settled([[1.0]], 0.1) and not bench.settled([[2.0, 1.0], [1.0, 1.05]], 0.1)
    assert bench.settled([[2.0, 1.0, 1.09], [1.0, 9.0, 1.05]], 0.1)
    parts = bench.parts_of_time([(5, 1000), (5, 1000), (10, 100_000_000)])
    assert parts[-1] == 1.0 and parts[0] == pytest.approx(parts[1] / 2) and parts[1] < 0.1


@pytest.mark.parametrize(("jitter", "limit", "rounds"), [(0.0, 60.0, 2), (0.5, 60.0, 7), (0.5, 1e-9, 2)])
def test_rounds_end_when_they_agree_or_when_time_is_over(monkeypatch, jitter, limit, rounds):
    """One rank, whose calls take invented times: each round half as long again as the one before, or as long."""
    ring = [("all-reduce", "ring")]
    job = bench.BenchJob(
        timeout=5.0, out="", algorithms=ring, sizes=[64], transports=["sends"], rounds=7, limit=limit, settled=0.1
    )
    asked = []

    def interleave(calls, most, go_on):
        so_far = [[] for _ in calls]
        while len(so_far[0]) < most and go_on(so_far):
            for seconds in so_far:
                seconds.append(1.0 * (1 + jitter) ** len(seconds))
        asked.append(len(so_far[0]))
        return so_far

    monkeypatch.setattr(bench, "interleave", interleave)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bench.TransportBench(job)._cell("all-reduce", 16, "a cell", 0.5)
    finally:
        dist.destroy_process_group()
    assert asked == [rounds]


def test_it_says_at_first_how_long_it_takes(calibrate, monkeypatch):
    def interrupted(args, *_):
        assert args.limit == 12.5 and args.settled > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(collective_bench, "measure", interrupted)
    _, _, err = calibrate("--ranks", 2, "--seconds", 12.5)
    first = err.splitlines()[0]
    assert "17 sizes on 2 ranks" in first and "up to 7 rounds" in first and "at most about 12.5 s" in first


# -- `shardwise calibrate device`


@pytest.fixture
def calibrate_device(command, monkeypatch):
    """Run `shardwise calibrate device ...` on small shapes."""
    usual = probes.usual_job

    def tiny(*args):
        return replace(
            usual(*args),
            axes=[[8, 64]] * 3,
            widths=[16],
            lengths=[16, 32],
            tokens=8,
            sizes=[1024, 4096],
            updated=1 << 18,
        )

    monkeypatch.setattr(probes, "usual_job", tiny)
    return partial(command, "calibrate", "device", "--device", "cpu", "--seconds", 0.3)


STEP = ("--seq", 64, "--batch", 8, "--layout")


def test_a_measured_machine_has_times(calibrate_device, command, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('devices_per_node = 2\ndevice = "CPU"\n[inter]\nalpha = 1e-5\nbandwidth = 1e9\n')
    code, out, _ = calibrate_device("--ranks", 2, "--out", file)
    assert code == 0 and "matrix products" in out and "all-gather" in out and f"--cluster {file}" in out
    cluster = Cluster.parse(str(file))
    # What the file said before stays; the link that nobody had measured is that of the messages.
    assert cluster.inter.bandwidth == 1e9 and cluster.intra.bandwidth
    assert cluster.host.link_bandwidth and cluster.host.adamw_rate and cluster.host.memory_bytes is None
    assert "AdamW" in out and "disk" in out
    assert cluster.device.kind == "cpu" and "calibrate device --device cpu --ranks 2" in cluster.device.source

    code, out, _ = command("estimate", "tiny-llama", *STEP, "dp=2,zero=1,precision=fp32", "--cluster", file)
    assert code == 0 and "as shardwise-cpu runs it" in out and "part of a step" in out
    code, out, _ = command("estimate", "tiny-llama", *STEP, "pp=2,precision=fp32", "--cluster", file, "--json")
    report = json.loads(out)
    assert report["time"] == pytest.approx(sum(report["timing"]["parts"].values())) and report["timing"]["low"] > 0
    code, out, _ = command("estimate", "tiny-llama", *STEP, "dp=2,compile=block", "--cluster", file)
    assert code == 0 and "no time of a step: the time of compile=block is not modelled" in " ".join(out.split())


def test_one_rank_is_told_as_json(calibrate_device):
    code, out, _ = calibrate_device("--json")
    told = json.loads(out)
    assert code == 0 and told["device"]["measured"]["family"] == "CPU"
    assert {sample["what"] for sample in told["samples"]} >= {"product", "attention", "pass", "copy"}


def test_estimate_says_what_is_missing(command):
    code, out, _ = command("estimate", "tiny-llama", *STEP, "dp=2", "--cluster", "2xcpu")
    assert code == 0 and "no time of a step: measure this machine with `shardwise calibrate device" in " ".join(
        out.split()
    )


def test_explain_times_the_engines_that_have_a_profile(command):
    rest = ("--model", "llama-3-8b", "--cluster", "8xH100", "--seq", 4096, "--batch", 8, "--json")
    code, out, _ = command(
        "explain", "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --bf16", *rest
    )
    report = json.loads(out)["outlook"]["report"]
    assert code == 0 and report["timing"]["engine"] == "megatron-core" and report["time"] > 0


# -- `shardwise calibrate topology`: from the text of nvidia-smi to a file that `plan` reads


PAIR = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPHB\t0-63\nGPU1\tNV12\t X \tPHB\t0-63\nNIC0\tPHB\tPHB\t X \n"


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "topo.txt"
    file.write_text(PAIR)
    return str(file)


def test_the_file_that_it_prints_is_one_that_plan_reads(table, tmp_path, capsys):
    assert main(["calibrate", "topology", table, "--device", "A100-80GB-PCIe"]) == 0
    printed = capsys.readouterr().out
    assert "# NV12: 1 pair of GPUs, over 12 NVLinks" in printed
    out = tmp_path / "node.toml"
    assert main(["calibrate", "topology", table, "--device", "A100-80GB-PCIe", "--out", str(out)]) == 0
    assert out.read_text() == printed and f"--cluster {out}" in (told := capsys.readouterr().out)
    assert "300 GB/s a device" in told
    assert Cluster.parse(str(out)).intra.bandwidth == 300e9
    assert main(["plan", "llama-3.2-1b", "--cluster", str(out), "--seq", "1024", "--batch", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranked"]


def test_standard_input_and_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)\n" + PAIR))
    assert main(["calibrate", "topology", "-", "--nodes", "2", "--nic-gbits", "400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "2x2xH100-PCIe" and found["paths"] == {"NV12": 1}
    assert (found["inter"]["bandwidth"], found["shared_nics"]) == (50e9, 1), "one NIC for two GPUs"
