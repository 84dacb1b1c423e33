"""Popular models planned for the devices that their authors serve them on: bytes of the published files, commands under
the hub's id, and what `explain` says of these."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cases import table
from shardwise.model.catalog import resolve

Command = Callable[..., tuple[int, str, str]]
MODELS = table(__file__, "MODELS")


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_copy_are_the_published_files(name: str, command: Command) -> None:
    code, out, _ = command("explain", f"vllm serve {name}", "--json")
    assert code == 0
    predicting = resolve(name).counted.predicting * 2  # in the files, and not loaded
    weights = json.loads(out)["outlook"]["weight_bytes_per_gpu"]
    assert weights + predicting == pytest.approx(MODELS[name][1], rel=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_plan_emits_loads_the_hubs_files_and_fits(
    name: str, engine: str, command: Command, tmp_path: Path
) -> None:
    cluster, file = MODELS[name][0], tmp_path / f"{engine}.sh"
    words = f"plan {name} --serve --cluster {cluster} --prompt 1000 --output 200 --concurrency 16 --emit {engine}"
    code, out, _ = command(*words.split(), "--out", str(file), "--json")
    assert code == 0
    assert json.loads(out)["ranked"][0]["bytes"] < json.loads(out)["usable_bytes"]
    text = file.read_text()
    assert name in text.partition("#!")[2].replace("# ", "").split()
    assert ("--quantization" in text) == (not resolve(name).counted.stored)
    code, out, _ = command("explain", str(file), "--cluster", cluster, "--json")
    outlook = json.loads(out)["outlook"]
    assert code == 0
    assert outlook["model"] == name
    assert outlook["longest_sequences"] >= 1
