"""The command under "The same on the command line" prints the page's numbers: each is run as it stands."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture
from studio_visitor import make_run

from shardwise.cli.main import main
from shardwise.report.step_report import StepReport
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.studio.data import collectives, memory, pipelines, plan, runs, tokens


@pytest.fixture
def printed(capsys: CaptureFixture[str]) -> Any:
    """Run a command line, several joined by &&; returns what each prints as JSON."""

    def printed(command: str) -> list[Any]:
        answers = []
        for part in command.split(" && "):
            program, *words = shlex.split(part)
            assert program == "shardwise" and main([*words, "--json"]) == 0, part
            answers.append(json.loads(capsys.readouterr().out))
        return answers

    return printed


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"batch": "64", "prompt": "100", "output": "32"},
        {"model": "llama-3-8b", "cluster": "4xH100", "a": "tp=2,dp=2", "b": "pp=4", "batch": "3", "link": "50.25"},
        {"model": "tiny-llama", "cluster": "2xH100", "prompt": "9", "output": "4", "precision": "fp32"},
        {"model": "llama-3-8b", "cluster": "2xH100", "layers": "5", "hidden": "2048", "ffn": "3000", "heads": "16"},
    ],
    ids=["first", "batch", "link", "fp32", "sizes"],
)
def test_tokens_are_generate_compare(state: dict[str, str], printed: Any) -> None:
    view, spent = tokens.data(state), tokens.spent(state)
    commands = {name: how.command for name, how in view.how.items() if how.command}
    assert printed(commands.pop("zero"))
    trained = view.tables["trained"].columns
    if "link" not in state:  # which estimate has no option for
        (step,) = printed(commands.pop("trained"))
        assert step["time"] == trained["step"][-1]
    assert set(commands.values()) == {spent.how["spent"].command}
    (found,) = printed(spent.how["spent"].command)
    columns, so_far = view.tables["compared"].columns, spent.tables["spent"].columns
    metrics = {row["name"]: row["values"] for row in [*view.more["metrics"], *spent.more["metrics"]]}
    ones = found["predicted"]["strategies"]
    assert columns["strategy"] == [one["layout"] for one in ones]
    for i, one in enumerate(ones):
        side, token, held = "AB"[i], one["token"], one["bytes"]
        for heading, value in {
            "a step sends": one["round"]["ring_bytes"]["total"], "for blocks": one["round"]["ring_bytes"]["blocks"],
            "weights": held["weights"], "of them gathered": held["gathered_buffers"],
            "cache at the end": held["cache_at_end"], "prompt": one["prompt"]["seconds"],
            "first token": token["first"]["seconds"], "token half-way": token["middle"]["seconds"],
            "last token": token["last"]["seconds"], "80% from": token["middle"]["low"], "to": token["middle"]["high"],
        }.items():  # fmt: skip
            assert columns[heading][i] == value, heading
        step = "a step" if "batch" in state else "a token"
        assert metrics[f"A device sends for {step}"][i] == one["round"]["ring_bytes"]["total"]
        assert metrics["Weights of a device"][i] == held["weights"]
        assert metrics[f"Time of {step}"][i] == token["middle"]["seconds"]
        words = [" ".join(chapter["sentences"]) for chapter in view.more["chapters"]]
        for chapter, said in {
            4: format_time(token["middle"]["seconds"]), 5: format_bytes(one["round"]["ring_bytes"]["total"]),
            6: format_share(trained["of the step"][i]),
        }.items():  # fmt: skip
            assert said in words[chapter]
        assert view.tables["shares"].columns["takes"][len(ones) + i] == trained["step"][i]
        if trained["strategy"][i] == one["training"]["layout"]:
            assert trained["step"][i] == one["training"]["seconds"]
            assert trained["its reduction takes"][i] == one["training"]["block"]["reduce"]
        # Bytes and seconds so far are both of all sequences.
        assert so_far[f"{side} sends"][0] == one["round"]["ring_bytes"]["total"]
        assert so_far[f"{side} takes"][int(state.get("output", 256)) - 1] == token["last"]["seconds"]


@pytest.mark.parametrize(
    "state",
    [
        {"batch": "8"},
        {"model": "tiny-llama", "cluster": "2x2xH100", "tp": "2", "zero": "3", "seq": "64", "batch": "4", "sp": "1"},
        {"model": "tiny-llama", "cluster": "1xH100", "seq": "64", "batch": "4", "recompute": "full", "zero": "1"},
        {"layers": "5", "heads": "64"},
    ],
    ids=["first", "sharded", "one", "sizes"],
)
def test_memory_is_estimate(state: dict[str, str], printed: Any) -> None:
    view = memory.data(state)
    (found,) = printed(view.how["devices"].command)
    roles, columns = StepReport.from_json(found).roles, view.tables["devices"].columns
    assert columns["peak"] == [role.peak_bytes for role in roles]
    assert columns["gradients"] == [role.bytes.gradients for role in roles]
    assert not any("nothing over" in step or " 1 ranks" in step for step in view.how["devices"].steps)


@pytest.mark.parametrize(
    "state", [{"by": "memory"}, {"fix": "tp=2,zero=1"}, {"layers": "5"}], ids=["by", "fix", "sizes"]
)
def test_plans_are_plan(state: dict[str, str], printed: Any) -> None:
    view = plan.data({"model": "llama-3-8b", "cluster": "8xH100", "seq": "4096", "batch": "64"} | state)
    (found,) = printed(view.how["ranked"].command)
    columns = view.tables["ranked"].columns
    assert len(columns["layout"]) > 10
    for heading, key in (("layout", "layout"), ("step", "seconds"), ("MFU", "mfu"), ("80% from", "low")):
        assert columns[heading] == [row[key] for row in found["ranked"]]


@pytest.mark.parametrize(
    "state",
    [
        {"ranks": "3", "micro": "6", "hop": "0.123456789"},
        {"a": "interleaved", "b": "zb-v", "virtual": "3", "ranks": "2", "micro": "4", "F": "1.23456789", "W": "0"},
    ],
    ids=["hop", "chunks"],
)
def test_pipelines_are_simulate(state: dict[str, str], printed: Any) -> None:
    view = pipelines.data(state)
    columns = view.tables["compared"].columns
    together = printed(view.how["compared"].command)
    assert columns["step"] == [one["makespan_s"] for one in together]
    assert columns["bubble over ideal"] == [one["bubble_over_ideal"] for one in together]
    curve = pipelines.curve(state)
    assert curve.how["curve"].command == view.how["compared"].command
    micros, *bubbles = curve.tables["curve"].columns.values()
    here = list(micros).index(view.state["micro"])
    assert [each[here] for each in bubbles] == columns["bubble of the total"]
    for side, one in zip("ab", together, strict=True):
        assert [one] == printed(view.how[side].command)
        assert view.tables[side].columns["idle"] == [rank["idle_s"] for rank in one["by_rank"]]
        assert view.tables[side].columns["activations held"] == [rank["peak"]["held"] for rank in one["by_rank"]]


def test_collectives_are_show_and_cost(printed: Any) -> None:
    state = {"collective": "broadcast", "algorithm": "chain", "ranks": "5", "segments": "3", "root": "2"}
    state |= {"cluster": "8xH100", "bytes": "1000"}
    view, costs = collectives.data(state), collectives.costs(state)
    (shown,) = printed(view.how["rounds"].command)
    rounds, frames = view.tables["rounds"].columns, shown["frames"]
    transfers = [(frame["round"] + 1, t["src"], t["dst"]) for frame in frames for t in frame["transfers"]]
    assert list(zip(rounds["round"], rounds["from"], rounds["to"], strict=True)) == transfers
    (found,) = printed(costs.how["costs"].command)
    assert costs.tables["costs"].columns["time"] == [one["seconds"] for one in found["algorithms"]]
    assert costs.more["crossovers"] == found["crossovers"]


def test_runs_are_compare(tmp_path: Path, printed: Any) -> None:
    make_run(tmp_path / "a run", steps=1)
    view = runs.data({"run": "a run"}, tmp_path)
    (found,) = printed(view.how["ledger"].command)
    assert found["equal_ledger"] is view.more["equal_ledger"] is True
    (tmp_path / "a run" / "reports" / "predicted.json").unlink()
    assert runs.data({"run": "a run"}, tmp_path).how["ledger"].command == "", "there is nothing to compare with"


def test_growth_is_estimate(printed: Any) -> None:
    """The step of the layout that the plan has is `estimate`'s; before the lines meet computing is longer."""
    view = plan.data({"cluster": "4x8xH100", "fix": "tp=8,zero=3,pp=1,cp=1"})
    columns, (found,) = view.tables["growth"].columns, printed(view.how["growth"].command)
    at = columns["layout"].index(view.more["best"])
    assert columns["step"][at] == found["time"] and columns["devices"][at] == 32
    assert columns["computing"] == sorted(columns["computing"], reverse=True)
    longer = [sent > made for sent, made in zip(columns["communication"], columns["computing"], strict=True)]
    meets = view.more["meets"]
    assert meets and longer == [devices > meets for devices in columns["devices"]]
