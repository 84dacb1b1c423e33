"""`shardwise calibrate device`: two ranks make a file with which `estimate` and `explain` say how long a step takes."""

import json
from dataclasses import replace
from functools import partial

import pytest

from shardwise.cluster import Cluster
from shardwise.runtime.measure import probes


@pytest.fixture
def calibrate(command, monkeypatch):
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


def test_a_measured_machine_has_times(calibrate, command, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('devices_per_node = 2\ndevice = "CPU"\n[inter]\nalpha = 1e-5\nbandwidth = 1e9\n')
    code, out, _ = calibrate("--ranks", 2, "--out", file)
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


def test_one_rank_is_told_as_json(calibrate):
    code, out, _ = calibrate("--json")
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
    assert code == 0 and report["timing"]["engine"] == "megatron-bridge" and report["time"] > 0
