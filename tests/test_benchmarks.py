"""The tables that the documents quote are those of the committed results; benchmarks of experts run in a tiny form."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from harness.today import of_some

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/performance.md", "docs/collectives.md", "docs/pipelines.md", "docs/stragglers.md",
             "docs/offload.md")  # fmt: skip


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/table.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_quoted_tables_are_the_committed_results() -> None:
    done = table("--check", *DOCUMENTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    start = text.index("<!-- bench:speed-2 -->")
    figure = text.index("0.", start)
    changed = tmp_path / "performance.md"
    changed.write_text(text[:figure] + "9." + text[figure + 2 :])
    done = table("--check", str(changed))
    assert done.returncode == 1 and "Traceback" not in done.stderr


def tiny(tmp_path: Path, name: str, *arguments: str) -> dict:
    command = [sys.executable, f"benchmarks/{name}.py", "--tiny", *arguments, "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "out.json").read_text())


def test_the_hosts_update_beside_torchs(tmp_path: Path) -> None:
    found = tiny(tmp_path, "host_update", "--disk", str(tmp_path))
    assert {"ours", "chunks", "torch"} <= set(found["update"]) and found["threads"] == 1
    assert all(row["parameters_per_second"] > 0 for row in found["update"].values())
    assert found["update"]["torch"]["of_torch"] == 1.0
    assert found["disk"].get("read", 1) > 0 and ("write" in found["disk"] or "why_not" in found["disk"])


TORCH = ("gpu_decode", "gpu_blocks", "experts", "a step of experts", "a step of a module", "zeropp", "stragglers")
"""All start processes that import torch."""


@of_some("experts", TORCH, 1)
def test_experts_train_beside_a_dense_model(tmp_path: Path) -> None:
    found = tiny(tmp_path, "experts_train", "--steps", "2", "--seeds", "1", "--data", "README.md")
    assert {(run["model"], run["seed"]) for run in found["runs"]} == {("experts", 0), ("dense", 0)}
    assert all(0 < found["mean_validation_loss"][name] < 7 for name in ("experts", "dense"))
    # The router is what a token meets besides.
    active = found["active_parameters"]
    assert active["experts"] - active["dense"] == 8 * 16 and found["parameters"]["experts"] > active["experts"]


@of_some("zeropp", TORCH, 1)
def test_zeropp_train_beside_zero_3(tmp_path: Path) -> None:
    found = tiny(tmp_path, "zeropp_train", "--steps", "2", "--data", "README.md")["results"]
    assert len(found) == 6 and all(0 < row["mean_validation_loss"] < 7 for row in found.values())
    assert len({row["mean_validation_loss"] for row in found.values()}) == 6


@of_some("a step of experts", TORCH, 1)
def test_experts_step_beside_transformers(tmp_path: Path) -> None:
    found = tiny(tmp_path, "experts_step", "--tokens", "64", "--rounds", "2")
    (result,) = found["results"]
    assert len(result["rows"]) == 4 and all(row["same_loss"] and row["speed"] > 0 for row in result["rows"])


@of_some("a step of a module", TORCH, 1)
def test_module_step_beside_fsdp2(tmp_path: Path) -> None:
    found = tiny(tmp_path, "module_step", "--tokens", "64", "--rounds", "2")
    assert found["parameters"] < 100_000
    for result in found["results"]:
        assert len(result["rows"]) == 2 and all(row["same_loss"] and row["speed"] > 0 for row in result["rows"])


@of_some("gpu_decode", TORCH, 1)
def test_decoding_in_static_steps_and_eagerly(tmp_path: Path) -> None:
    found = tiny(tmp_path, "gpu_decode", "--without", "transformers")
    rows = {(row["name"], row["form"], row["batch"]): row for row in found["rows"]}
    assert rows.keys() == {
        ("shardwise bf16", "graphs", 1), ("shardwise bf16", "graphs", 3), ("shardwise bf16", "eager", 1),
        ("shardwise int8", "graphs", 1), ("shardwise int8", "graphs", 3),
    }  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and not row["failure"] for row in rows.values())
    assert not found["measures_gpu"] and found["ratios"]["int8 over bf16, batch 3"] > 0


@of_some("gpu_blocks", TORCH, 1)
def test_blocks_beside_a_calibration(tmp_path: Path) -> None:
    found = tiny(tmp_path, "gpu_blocks", "--seconds", "2")
    (row,) = found["rows"]
    parts = [row[name] for name in ("forward, loss and backward", "optimizer", "step")]
    assert all(min(pair) > 0 for pair in parts) and not found["measures_gpu"]
    predicted = [pair[0] for pair in parts]
    assert sum(predicted[:2]) <= 1.001 * predicted[2]


@of_some("stragglers", TORCH, 1)
def test_slow_workers_in_lockstep_and_without(tmp_path: Path) -> None:
    only = ("--syncs", "dp", "async", "--conditions", "none", "always", "--steps", "4", "--emulate", "50ms")
    found = tiny(tmp_path, "stragglers", *only, "--data", "README.md", "--svg", str(tmp_path / "curves.svg"))
    assert [(run["condition"], run["sync"]) for run in found["runs"]] == [
        ("none", "dp"), ("none", "async"), ("always", "dp"), ("always", "async"),
    ]  # fmt: skip
    for run in found["runs"]:
        assert run["curve"] and len(run["waiting"]) == 4 and 0 < run["validation_loss"] < 7
        assert run["predicted_tokens_per_s"] > 0 and (run["sync"] != "dp" or run["predicted_of_dp"] == 1.0)
    # One of four is slow: lockstep makes three times the arithmetic, rates add up to ten thirds of a worker's.
    always = {run["sync"]: run["predicted_of_dp"] for run in found["runs"] if run["condition"] == "always"}
    assert always["async"] > 1
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 8
