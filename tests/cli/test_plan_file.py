"""`plan --out FILE`, and `train --plan FILE`: the row's model, layout and step, where this machine can run it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.command_line import mistake
from shardwise.errors import UserError

Command = Callable[..., tuple[int, str, str]]
PLAN = ("plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "8k", "--batch", "64", "--optimizer", "momentum")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from shardwise.cli.main import main

    file = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*PLAN, "--top", "3", "--out", str(file), "--json"]) == 0
    data: dict[str, Any] = json.loads(file.read_text())
    return data


@pytest.fixture
def plan(written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shardwise.cli.plan_file.cuda_memory", lambda: [])
    Path("plan.json").write_text(json.dumps(written))
    return Path("plan.json")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the runs that `train` would start."""
    requests: list[dict[str, Any]] = []

    def train(**request: Any) -> None:
        requests.append(request)
        raise UserError("enough")

    monkeypatch.setattr("shardwise.api.train", train)
    return requests


def test_a_row_is_trained_where_its_gpus_are(
    command: Command, plan: Path, written: dict[str, Any], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.cli.plan_file.cuda_memory", lambda: [80 << 30] * 8)
    mistake(command("train", "--plan", plan, "--data", "stdlib"), "enough")
    mistake(command("train", "--plan", plan, "--data", "stdlib", "--row", 3, "--steps", 5), "enough")
    first, third = asked
    assert (first["layout"], third["layout"]) == (written["ranked"][0]["layout"], written["ranked"][2]["layout"])
    assert (third["device"], third["steps"], third["model"].name) == ("cuda", 5, "llama-3-8b")
    workload = third["workload"]
    assert (workload.seq, workload.batch, workload.optimizer) == (8192, 64, "momentum")


def test_devices_that_are_not_here(
    command: Command, plan: Path, written: dict[str, Any], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "--plan", plan, "--data", "stdlib")
    mistake(command(*words), "row 1 needs 8 GPUs of 8xH100-80GB-SXM, and this machine has no GPU", "shardwise launch")
    monkeypatch.setattr("shardwise.cli.plan_file.cuda_memory", lambda: [1])
    mistake(command(*words), "has 1 GPU:", "--device cpu")
    mistake(command(*words, "--device", "cpu"), "enough")
    plan.write_text(json.dumps(written | {"nodes": 2}))
    mistake(command(*words), "which is 2 machines", "shardwise launch")
    assert len(asked) == 1


def test_launch_takes_a_plan(command: Command, plan: Path) -> None:
    words = ("launch", "--slurm", "--cluster", "8xH100", "--out", "job", "--json", "--", "train", "--plan", plan)
    code, out, err = command(*words, "--data", "text.txt", "--out", "runs/x")
    assert code == 0 and json.loads(out)["ranks"] == 8, err


def test_mistakes(command: Command, plan: Path, written: dict[str, Any]) -> None:
    def with_(**changes: Any) -> tuple[int, str, str]:
        plan.write_text(json.dumps(written | changes))
        return command("train", "--plan", plan, "--data", "stdlib")

    mistake(command("train", "--plan", plan, "--row", 4), "the plan has rows 1 to 3, not 4")
    mistake(command("train", "--plan", plan, "--row", 0), "the plan has rows 1 to 3, not 0")
    mistake(command("train", "tiny-llama", "--plan", plan), "MODEL is decided by --plan")
    mistake(command("train", "--plan", plan, "--seq", 8), "--seq is decided by --plan")
    mistake(command("train", "--plan", plan, "--resume", "x"), "--resume is decided by --plan")
    mistake(with_(format="other"), "plan.json is no plan: write one with shardwise plan")
    mistake(with_(ranked=3), "plan.json is a damaged plan")
    mistake(with_(workload={"seq": -1}), "plan.json: workload: seq must be")
    rejected = [written["ranked"][0] | {"not_runnable": "no decoder here has it"}]
    mistake(with_(ranked=rejected), "row 1,", "does not run: no decoder here has it")
    mistake(command(*PLAN[:6], "--batch", 64, "--find", "sequence", "--out", "x"), "--out writes a training plan")
