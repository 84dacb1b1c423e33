"""`shardwise plan`: what it prints, what it says when it cannot, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.layout import Layout

SMALL = ["plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "32"]


def test_the_table_and_what_is_said_about_the_winner(capsys):
    assert main([*SMALL, "--top", "3"]) == 0
    out = capsys.readouterr().out
    for words in (
        "legal layouts",
        "80% range",
        "tokens/s",
        "MFU",
        "best: ",
        "saved activations",
        "✓ fits",
        "binds: ",
        "why not",
    ):
        assert words in out
    assert "matrix products" in out and "tp=" in out
    ranked = [line.split() for line in out.splitlines() if line[:2] in ("1 ", "2 ", "3 ")]
    assert [row[0] for row in ranked] == ["1", "2", "3"] and all(Layout.parse(row[1]) for row in ranked)


def test_json_has_the_same(capsys):
    assert main([*SMALL, "--top", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranked"]) == 4 and found["considered"] > found["fitting"] > 4
    first = found["ranked"][0]
    assert first["low"] < first["seconds"] < first["high"]
    assert sum(first["parts"].values()) == pytest.approx(first["seconds"])
    assert first["bytes"]["total"] <= found["usable_bytes"]
    assert first["tokens_per_second"] == pytest.approx(32 * 4096 / first["seconds"])
    assert {row["key"] for row in found["alternatives"]} >= {"tp", "zero"}


def test_fixed_keys_hold(capsys):
    assert main([*SMALL, "--fix", "tp=4,zero=1,recompute=full", "--by", "memory", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["ranked"]:
        layout = Layout.parse(row["layout"])
        assert (layout.tp, layout.zero, layout.recompute) == (4, 1, "full")


@pytest.mark.parametrize("by", ["cost", "pareto"])
def test_other_orders(by, capsys):
    assert main([*SMALL, "--by", by]) == 0
    assert ("device-seconds first" in (out := capsys.readouterr().out)) == (by == "cost")
    assert "best: " in out


def test_days_money_and_failures(capsys):
    run = ["--tokens", "1T", "--price", "2.5", "--mtbf", "50000", "--save", "60", "--restart", "300"]
    assert main([*SMALL, *run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["cost"] == pytest.approx(2.5 * found["run"]["device_hours"])
    assert 0.9 < found["goodput"]["share"] < 1
    assert main([*SMALL, *run]) == 0
    out = capsys.readouterr().out
    assert "device-hours" in out and "Young 1974" in out


def test_the_other_way_round(capsys):
    assert main([*SMALL, "--find", "sequence", "--fix", "recompute=full"]) == 0
    assert "tokens fit 8xH100" in capsys.readouterr().out
    assert main([*SMALL, "--find", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "llama-3-8b"
    assert main([*SMALL, "--find", "cluster", "--tokens", "20B", "--deadline", "1", "--fix", "cp=1"]) == 0
    assert "cheapest: " in capsys.readouterr().out
    assert (
        main(["plan", "llama-3-8b", "--cluster", "2x8xH100", "--seq", "4096", "--batch", "32", "--find", "scaling"])
        == 0
    )
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MODEL": "llama-3-405b"}, "does not fit 8xH100-80GB-SXM"),
        ({"--cluster": "8xH101"}, "did you mean H100"),
        ({"--cluster": "125000x8xH100"}, "1,000,000 devices"),
        ({"--cluster": "4xcpu"}, "no constants of time for CPU"),
        ({"--cluster": "0xH100"}, "counts must lie between"),
        ({"--batch": "7", "--fix": "dp=8"}, "take a batch that is a multiple of 8"),
        ({"--batch": "-1"}, "must be positive integers"),
        ({"--seq": "0"}, "must be positive integers"),
        ({"--top": "0"}, "--top must be a positive integer"),
        ({"--fix": "tp=5"}, "leave tp free"),
        ({"--engine": "megatron-brige"}, "did you mean megatron-bridge"),
        ({"--reserve": "lots"}, "give a size"),
        ({"--reserve": "900GB"}, "reserved"),
        ({"--tokens": "many"}, "give a number of tokens"),
        ({"--price": "2"}, "--price needs --tokens"),
        ({"--mtbf": "100"}, "--mtbf and --save belong together"),
        ({"--find": "cluster"}, "--deadline is for --find cluster"),
        ({"--find": "cluster", "--deadline": "3"}, "needs --tokens"),
        ({"--find": "cluster", "--deadline": "-3", "--tokens": "1T"}, "positive number of days"),
        ({"--find": "cluster", "--deadline": "3", "--tokens": "1e18", "--fix": "tp=8,cp=1,zero=0"}, "no cluster of"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(change, words, capsys):
    arguments = {"--cluster": "8xH100", "--seq": "4096", "--batch": "8", **change}
    model = arguments.pop("MODEL", "llama-3-8b")
    assert main(["plan", model, *(word for pair in arguments.items() for word in pair)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_it_answers_without_torch():
    code = f"import sys\nfrom shardwise.cli.main import main\nassert main({[*SMALL, '--json']!r}) == 0\n"
    code += "assert not {'torch', 'tokenizers', 'pyarrow'} & {name.partition('.')[0] for name in sys.modules}"
    source = str(Path(shardwise.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
