"""`--slow` and `--emulate` on the command line: what `estimate` says of them, and one line for what cannot be."""

import json

import pytest

ESTIMATE = "estimate llama-3-8b --layout dp=8,zero=3 --cluster 8xH100 --seq 4096 --batch 8"


def test_estimate_says_what_a_step_waits_for(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(*ESTIMATE.split(), "--slow", "rank=1,factor=3", "--slow", "rank=2,factor=2")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "it waits for the slowest of 8 ranks" in " ".join(out.split())
    assert any(line.startswith("slow ranks  ") for line in out.splitlines())


def test_the_json_has_the_parts(command):
    code, out, _ = command(*ESTIMATE.split(), "--slow", "rank=1,factor=3", "--emulate", "2s", "--json")
    report = json.loads(out)
    parts = report["timing"]["parts"]
    assert code == 0 and parts["emulated"] == 2.0 and parts["stragglers"] == pytest.approx(4.0)
    assert report["time"] == pytest.approx(sum(parts.values()))
