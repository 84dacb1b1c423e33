"""`shardwise calibrate network`: two real ranks from end to end, and mistakes that are told before anything starts."""

from __future__ import annotations

import json
from functools import partial

import pytest

from shardwise.cli import collective_bench
from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.schedule.choose import choose

TINY = ("--ranks", "2", "--sizes", "1KiB,4KiB,32MiB", "--rounds", "3")
"""The largest takes long enough, and often enough, to tell a bandwidth on a busy host too."""


@pytest.fixture
def calibrate(command):
    """Run `shardwise calibrate network ...`."""
    return partial(command, "calibrate", "network")


def test_two_ranks_make_a_cluster_file_that_predicts(calibrate, capfd, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('devices_per_node = 4\ndevice = "CPU"\n[inter]\nalpha = 1e-5\nbandwidth = 1e9\n')
    code, out, err = calibrate(*TINY, "--out", file, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["held_back"]["sizes"] == [4096] and result["sizes"] == [32 << 20]
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in result["figures"].values())
    cluster = Cluster.parse(str(file))
    # What the file said before stays.
    assert cluster.devices_per_node == 4 and cluster.inter.alpha == 1e-5
    assert cluster.intra.reads and cluster.intra.speeds[0].nbytes == 32 << 20
    assert cluster.intra.alpha == pytest.approx(result["figures"]["intra.alpha"]["value"], rel=1e-3)
    text = file.read_text()
    assert "cores" in text.splitlines()[0] and "calibrate network --ranks 2" in cluster.intra.source
    capfd.readouterr()
    assert main(["collective", "cost", "all-reduce", "--bytes", "1MB", "--ranks", "2", "--cluster", str(file)]) == 0
    cheapest = choose("all-reduce", 1e6, 2, cluster)[0]
    assert cheapest.name in capfd.readouterr().out and cheapest.price.seconds > 0


def measured(args, algorithms, sizes):
    """What ranks would have measured, had every byte of a collective taken 100 ps, and the collective 10 µs,
    on a busy host."""

    def seconds(size: int) -> list[float]:
        return [factor * (1e-5 + size * 1e-10) for factor in (1.0, 1.0, 1.5, 9.0)]

    cells = [
        {
            "collective": collective,
            "bytes": size,
            "rows": [
                {"algorithm": a.name, "transport": "sends", "options": {}, "seconds": seconds(size)}
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", 1), "--ranks 1: between 2 and"),
        (("--ranks", 2, "--rounds", 0), "--rounds must be a positive integer"),
        (("--ranks", 2, "--sizes", "1KB,4KB"), "three sizes or more"),
        (("--ranks", 2, "--sizes", "1KB,4XB,8KB"), "--sizes 4XB: give a size"),
        (("--ranks", 2, "--out", "here.json"), "ends in .toml"),
        (("--ranks", 2, "--out", "nowhere/here.toml"), "there is no directory nowhere"),
        (("--ranks", 2, "--out", "broken.toml"), "broken.toml is not valid TOML"),
        (("--ranks", 2, "--out", "/proc/here.toml"), "cannot write /proc/here.toml"),
    ],
)
def test_mistakes_are_told_before_anything_starts(calibrate, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("nodes = [")
    monkeypatch.setattr(collective_bench, "measure", lambda *_: pytest.fail("ranks were started"))
    code, _, err = calibrate(*argv)
    assert code == 2 and words in err and err.count("\n") == 1
