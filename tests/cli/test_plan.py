"""`shardwise plan`: what it prints, what it says when it cannot, and that it needs no torch."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise
from harness.cases import from_table
from harness.today import some_of
from shardwise.cli.declare import read
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model.catalog import get
from shardwise.model.parameters import count
from shardwise.planner import plan
from shardwise.predict import estimate

LONG = ["plan", "llama-3.2-1b", "--cluster", "8xL4", "--seq", "131072", "--batch", "1", "--top", "2", "--fix", "tp=1"]
SMALL = ["plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "32"]


def test_the_table_and_what_is_said_about_the_winner(capsys):
    assert main([*SMALL, "--all"]) == 0
    out = capsys.readouterr().out
    for words in (
        "layouts that shardwise can run",
        "80% range",
        "tokens/s",
        "MFU",
        "best of ",
        "saved activations",
        "✓ fits",
        "bound by: ",
        "why not",
    ):
        assert words in out
    assert "matrix products" in out and "tp=" in out
    ranked = [words for line in out.splitlines() if re.match(r" ?\d+ +\w+=", line) and (words := line.split())]
    assert [int(row[0]) for row in ranked] == [*range(1, 11)] and all(Layout.parse(row[1]) for row in ranked)


@from_table
def test_the_answer_is_25_lines_and_its_next_command_is_one(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 + 4 * ("--tpot" in words or "--engine" in words), "\n".join(lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("next"))
    follows = " ".join(lines[at + 1 :]).replace(" \\", "").split()
    if follows:
        command = follows[follows.index("train") :]
        options, _ = read(command[0], command[1:])
        assert options.model == words.split()[0] and Layout.parse(options.layout).ranks > 1
        assert follows[1] == "train" or (main(follows[1:]) == 0 and Path("shardwise.sbatch").exists())


def test_a_batch_that_more_replicas_divide_is_named(capsys):
    assert main([*SMALL[:-1], "63"]) == 0
    assert "batch 63: with 64, dp=8 becomes possible" in capsys.readouterr().out
    assert main([*SMALL[:-1], "36"]) == 0
    assert "becomes possible" not in capsys.readouterr().out


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


def test_an_optimizer_with_less_state_is_planned(capsys):
    command = ["plan", "gpt2", "--cluster", "8xH100", "--seq", "512", "--batch", "8", "--fix", "dp=8,zero=0,micro=1"]
    held = []
    for kind in ("adamw", "momentum", "sgd"):
        assert main([*command, "--optimizer", kind, "--json"]) == 0
        held.append(json.loads(capsys.readouterr().out)["ranked"][0]["bytes"])
    assert [held[0]["optimizer"] - each["optimizer"] for each in held[1:]] == [
        4 * count(get("gpt2")),
        8 * count(get("gpt2")),
    ]


def test_fixed_keys_hold(capsys):
    assert main([*SMALL, "--fix", "tp=4,zero=1,recompute=full", "--by", "memory", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["ranked"]:
        layout = Layout.parse(row["layout"])
        assert (layout.tp, layout.zero, layout.recompute) == (4, 1, "full")


@pytest.mark.parametrize("by", ["cost", "pareto"])
def test_other_orders(by, capsys):
    assert main([*SMALL, "--by", by, "--why"]) == 0
    assert ("device-seconds first" in (out := capsys.readouterr().out)) == (by == "cost")
    assert "best of " in out


def test_experts_are_planned_and_their_error_is_said(capsys):
    sparse = ["plan", "mixtral-8x7b", "--cluster", "2x8xH100", "--seq", "4096", "--batch", "64", "--fix", "pp=2,cp=1"]
    assert main([*sparse, "--top", "2", "--why"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("ep=", "routing to experts", "14% off on average", "spread evenly over the experts"):
        assert words in out
    assert main([*sparse, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["ranked"][0]
    assert first["high"] / first["low"] > 1.4 and len(found["notes"]) == 3
    assert "ep" in {one["key"] for one in found["alternatives"]}
    assert main([*SMALL, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1


@pytest.mark.parametrize(
    ("model", "cluster", "fix"),
    [("deepseek-v3", "32x8xH200", "pp=8,cp=1,tp=1,micro=1,ep=32"), ("bloom-176b", "48x8xA100", "pp=12,tp=4,cp=1")],
)
def test_latent_attention_and_alibi_are_planned(model, cluster, fix, capsys):
    assert main(["plan", model, "--cluster", cluster, "--seq", "2048", "--batch", "512", "--fix", fix]) == 0
    assert "best of " in capsys.readouterr().out


def test_where_nothing_runs_here_all_are_ranked_under_a_line_that_says_so(capsys):
    alibi = ["plan", "bloom-176b", "--cluster", "8x8xH100", "--seq", "2048", "--batch", "64", "--top", "2"]
    assert main(alibi) == 0
    assert "None of these run here yet: ALiBi positions" in capsys.readouterr().out.splitlines()[0]
    assert main([*alibi, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none_runs_here"] == "ALiBi positions"
    assert all(row["not_runnable"].startswith("not runnable by `train` yet") for row in found["ranked"])


def test_a_class_of_transformers_is_planned_for_train_which_runs_it(tmp_path, capsys):
    """But not with sequences cut that its layers read one after the other."""
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
    for family, runs in (("granite", True), ("qwen3_next", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **small}))
        words = ["plan", str(tmp_path), "--cluster", "4xH100", "--seq", "128", "--batch", "16", "--fix", "cp=2"]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "None of these run" not in out and ("shardwise train" in out) == runs


def test_long_sequences_are_split_by_layouts_that_run(capsys):
    """Without tensor parallelism, only context parallelism splits one long sequence."""
    assert main([*LONG, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none_runs_here"] is None
    for row in found["ranked"]:
        layout = Layout.parse(row["layout"])
        assert layout.cp > 1 and row["not_runnable"] is None
        check_runnable(layout, get("llama-3.2-1b"), Workload(seq=131072, batch=1))


@pytest.mark.parametrize("find", ["sequence", "batch"])
def test_a_degree_that_no_layout_has_is_not_blamed_on_memory(find, capsys):
    assert main([*SMALL, "--find", find, "--fix", "cp=3"]) == 2
    told = capsys.readouterr().err
    assert "no layout with cp=3" in told and "leave cp free" in told and "does not fit" not in told


@pytest.mark.parametrize("find", some_of(["sequence", "batch", "scaling", "cluster"], 2, "what plan finds"))
def test_what_train_rejects_of_what_is_found_is_said(find, capsys):
    refusal = "not runnable by `train` yet: ALiBi positions"
    given = ["--find", find, *(["--tokens", "20B", "--deadline", "10"] if find == "cluster" else [])]
    alibi = ["plan", "bloom-176b", "--cluster", "8x8xH100", *SMALL[4:], *given, "--fix", "cp=1,micro=1,tp=8"]
    assert main(alibi) == 0
    assert refusal in " ".join(capsys.readouterr().out.split())
    assert main([*alibi, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    told = told["sizes"][-1] if find == "scaling" else told
    assert told["not_runnable"].startswith(refusal)
    assert find != "batch" or told["micro_not_runnable"].startswith(refusal)
    assert main([*SMALL, *given, "--fix", "cp=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(size["not_runnable"] is None for size in told.get("sizes", [told]))


BRIDGE = ["--engine", "megatron-bridge"]


def test_runnable_is_what_check_runnable_says(capsys):
    """Of layouts that differ in this alone, `train` takes just those of which nothing is said."""
    model = get("llama-3-8b")
    assert main([*SMALL, *BRIDGE, "--by", "pareto", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert any(Layout.parse(row["layout"]).cp > 1 for row in ranked)
    for row in ranked:
        try:
            check_runnable(Layout.parse(row["layout"]), model, Workload(seq=4096, batch=32))
        except UserError:
            assert row["not_runnable"]
        else:
            assert row["not_runnable"] is None


def test_what_train_rejects_of_another_engines_layouts_is_counted(capsys):
    asked = ["plan", "bloom-176b", "--cluster", "8x8xH100", "--seq", "2048", "--batch", "64", *BRIDGE]
    asked += ["--fix", "cp=1,micro=1,tp=8"]
    assert main([*asked, "--json"]) == 0
    rejected = sum(row["not_runnable"] is not None for row in json.loads(capsys.readouterr().out)["ranked"])
    assert rejected
    assert main(asked) == 0
    words = f"{rejected} of the {rejected} shown, the best included: not runnable by `train` yet: ALiBi positions"
    assert words in " ".join(capsys.readouterr().out.split())
    dense = ["plan", "gpt2", "--cluster", "2xH100", "--seq", "512", "--batch", "8", *BRIDGE]
    assert main(dense) == 0
    assert "`train` here runs every layout shown" in capsys.readouterr().out


def test_how_llama_405b_was_cut_is_planned(capsys):
    """126 layers on 16 ranks with 8 chunks each: the embedding and the head are stages of their own."""
    asked = ["plan", "llama-3-405b", "--cluster", "2048x8xH100", "--seq", "8192", "--batch", "2048", "--top", "1"]
    cut = "tp=8,pp=16,virtual=8,schedule=interleaved,dp=128,cp=1,micro=1,recompute=full,sp,zero=1,shard=128"
    assert main([*asked, "--fix", cut, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["ranked"][0]
    layout = Layout.parse(first["layout"])
    explicit = replace(layout, stages=(0, *(1,) * 126, 0))
    reports = [estimate("llama-3-405b", one, Workload(8192, 2048), "2048x8xH100") for one in (layout, explicit)]
    assert reports[0].roles == reports[1].roles
    peak = max(role.peak_bytes for role in reports[0].roles)
    assert first["bytes"]["total"] == pytest.approx(peak, rel=0.01)
    assert reports[0].time == pytest.approx(first["seconds"]) and first["not_runnable"] is None


def test_estimate_and_plan_use_one_capacity(capsys):
    on = ["--cluster", "8x8xH100", "--seq", "8192", "--batch", "1024"]
    cut = "dp=2,tp=4,pp=8,zero=1,sp,recompute=selective"
    assert main(["plan", "llama-3-70b", *on, "--fix", f"{cut},micro=1,schedule=1f1b"]) == 2
    assert "needs 84.1 GB per device, but 83.0 GB are usable (85.0 GB less 2.00 GB reserved)" in capsys.readouterr().err
    assert main(["estimate", "llama-3-70b", *on, "--layout", cut]) == 0
    out = capsys.readouterr().out
    assert (
        "✗ does not fit 83.0 GB" in out
        and "usable: 85.0 GB per device, less 2.00 GB for driver context and kernels" in out
    )


def test_what_one_device_lacks_is_more_devices_of_its_node_or_a_smaller_batch(capsys):
    asked = ["--seq", "8192", "--batch", "128"]
    assert main(["plan", "llama-3-8b", "--cluster", "1xA100", *asked]) == 2
    told = capsys.readouterr().err
    assert "take 2xA100-80GB-SXM" in told and "2x1x" not in told
    assert main(["plan", "llama-3-8b", "--cluster", "1xH200", *asked]) == 2
    assert "cut the batch to 4 sequences" in capsys.readouterr().err
    assert main(["plan", "llama-3-8b", "--cluster", "1xH200", "--seq", "8192", "--batch", "4"]) == 0


@pytest.mark.parametrize(
    "layout", ["dp=2,tp=4,pp=8,zero=1,sp,recompute=full", "tp=4,pp=8,cp=2,zero=1,sp,schedule=interleaved,virtual=9"]
)
def test_estimate_names_the_command_that_has_a_model_that_does_not_run(layout, capsys):
    asked = ["--cluster", "8x8xH100", "--seq", "2048", "--batch", "64"]
    assert main(["estimate", "bloom-176b", *asked, "--layout", layout]) == 2
    told = capsys.readouterr().err
    command = told[told.index("shardwise plan ") :].split()[1:]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Layout.parse(row["layout"]) for row in found["ranked"]] == [Layout.parse(layout)]


def test_a_long_search_says_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*SMALL, "--find", "cluster", "--tokens", "20B", "--deadline", "1", "--fix", "cp=1,pp=1"]) == 0
    told = capsys.readouterr().err.split("\r\033[K")
    assert told[1].startswith("8xH100-80GB-SXM: ") and told[1].endswith(" layouts") and len(told) > 3
    assert told[-1] == ""


def test_days_money_and_failures(capsys):
    run = ["--tokens", "1T", "--price", "2.5", "--mtbf", "50000", "--save", "60", "--restart", "300"]
    assert main([*SMALL, *run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["cost"] == pytest.approx(2.5 * found["run"]["device_hours"])
    assert 0.9 < found["goodput"]["share"] < 1
    assert main([*SMALL, *run]) == 0
    out = capsys.readouterr().out
    assert "device-hours" in out and "Young 1974" in out
    assert re.search(r"at most \d+ MWh \(boards at full power, PUE 1.1\)", out)


def test_energy_is_power_times_hours(capsys):
    given = ["--tokens", "20B", "--pue", "1.5", "--host-watts", "300"]
    assert main([*SMALL, *given, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["energy_kwh_at_most"] == pytest.approx(run["device_hours"] * (0.7 + 0.3) * 1.5)
    assert main([*SMALL, *given, "--mtbf", "50000", "--save", "60"]) == 0
    out = capsys.readouterr().out
    assert "300 W of a host each, PUE 1.5" in out and out.count("at most") == 2
    other = [*SMALL[:3], "8xTPU-v5p", *SMALL[4:], "--tokens", "20B"]
    assert main(other) == 0
    assert "no energy, since the power of TPU-v5p is not known" in capsys.readouterr().out
    assert main([*other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["energy_kwh_at_most"] is None


def test_the_largest_batch_and_micro_batch(capsys):
    assert main([*SMALL, "--find", "batch", "--fix", "tp=8"]) == 0
    out = capsys.readouterr().out
    assert "without accumulating gradients" in out and "largest micro-batch of a step of 32 sequences: 32" in out
    assert main([*SMALL, "--find", "batch", "--fix", "tp=1,pp=1,zero=0", "--json"]) == 2
    assert "in any batch" in capsys.readouterr().err


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
    assert "if memory were no limit" in " ".join(capsys.readouterr().out.split())


def test_the_longest_sequence_needs_no_sequence(capsys):
    asked = ["plan", "llama-3-8b", "--cluster", "8xH100", "--batch", "8", "--find", "sequence", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*asked, "--seq", "4096"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_it_answers_without_torch():
    code = f"import sys\nfrom shardwise.cli.main import main\nassert main({[*SMALL, '--json']!r}) == 0\n"
    code += "assert not {'torch', 'tokenizers', 'pyarrow'} & {name.partition('.')[0] for name in sys.modules}"
    source = str(Path(shardwise.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr


@from_table
def test_tensor_parallelism_over_slow_links_is_warned_of(cluster, fix, words, capsys):
    arguments = ["plan", "llama-3.2-1b", "--cluster", cluster, "--seq", "2048", "--batch", "16", "--fix", fix]
    assert main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("warning: tp=" in out) == bool(words)
    assert words in out and (not words or "% of the step is its communication" in out)
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == bool(words)


def test_it_says_how_attention_is_counted(capsys):
    assert main(["plan", "llama-3.2-1b", "--cluster", "8xH100", "--seq", "2048", "--batch", "16", "--why"]) == 0
    assert "MFU counts causal attention once" in " ".join(capsys.readouterr().out.split())


def test_a_plan_in_python_prints_what_the_command_prints(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    best = plan("llama-3-8b", "8xH100", seq=4096, batch=16, fix={"pp": 1, "cp": 1}, top=3)
    words = ("--cluster", "8xH100", "--seq", 4096, "--batch", 16, "--fix", "pp=1,cp=1", "--top", 3)
    code, out, _ = command("plan", "llama-3-8b", *words)
    printed, _, follows = out.partition("next (or ")
    assert code == 0 and [line.rstrip() for line in printed.splitlines()] == str(best).splitlines() and follows
