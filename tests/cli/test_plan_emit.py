"""`plan --emit`: the best layout that an engine expresses, as its file."""

import json
from dataclasses import replace

import pytest

from harness.today import EVERYTHING
from shardwise.cli.show.explain_table import CODE_KEYS
from shardwise.interop import read
from shardwise.interop.writing.writer import WRITERS, why_not_written
from shardwise.layout import Layout
from shardwise.layout.keys import defaults
from shardwise.model.catalog import get
from shardwise.predict.time.profiles import ENGINES

TRAIN = ("plan", "llama-3-8b", "--cluster", "8xH100", "--seq", 4096, "--batch", 64)
SERVE = ("plan", "llama-3-8b", "--cluster", "8xH100", "--serve", "--prompt", 1024, "--output", 256, "--concurrency", 64)


def test_the_winner_is_written(command, tmp_path):
    path = tmp_path / "train.sh"
    code, out, _ = command(*TRAIN, "--emit", "torchrun", "--out", path, "--json")
    data = json.loads(out)
    assert code == 0 and data["emitted"]["why_not_the_best"] is None
    assert data["emitted"]["layout"] == data["ranked"][0]["layout"] == str(read([str(path)]).layout)


def test_what_the_engine_cannot_express_is_not_ranked(command, tmp_path):
    path = tmp_path / "ds.json"
    asked = (*TRAIN, "--engine", "shardwise", "--fix", "zero=1,tp=2")
    code, out, err = command(*asked, "--emit", "deepspeed", "--out", path, "--json")
    assert code == 0, err
    ranked = [Layout.parse(row["layout"]) for row in json.loads(out)["ranked"]]
    assert read([str(path)], 8).layout.tp == 2 and json.loads(out)["emitted"]["why_not_the_best"] is None
    assert not any(why_not_written(WRITERS["deepspeed"], layout, get("llama-3-8b")) for layout in ranked)
    _, out, _ = command(*asked, "--json")
    free = [Layout.parse(row["layout"]) for row in json.loads(out)["ranked"]]
    assert any(why_not_written(WRITERS["deepspeed"], layout, get("llama-3-8b")) for layout in free)


def test_a_server_is_written(command):
    code, out, err = command(*SERVE, "--emit", "sglang", "--json")
    data = json.loads(out)
    assert code == 0, err
    best = data["ranked"][0]
    assert f"--max-running-requests {best['sequences_of_a_replica']}" in data["emitted"]["text"]


@pytest.mark.parametrize("engine", ["torchtitan", "accelerate", "transformers"])
def test_an_engine_is_planned_by_its_own_profile_and_gets_the_values_that_it_has(command, engine):
    code, out, err = command(*TRAIN, "--emit", engine, "--json")
    data = json.loads(out)
    assert code == 0, err
    best, written = (Layout.parse(text) for text in (data["ranked"][0]["layout"], data["emitted"]["layout"]))
    assert data["engine"] == WRITERS[engine].profile and written == replace(best, grads="fp32")
    rows = {row["engine"]: row for row in data["by_engine"]}
    assert set(rows) == {name for name, writer in WRITERS.items() if not writer.serves}
    assert rows[engine]["seconds"] == pytest.approx(data["ranked"][0]["seconds"], rel=1e-9)
    # FSDP2 as it comes is no faster than torchtitan's of the same version, nor than Megatron-Core.
    assert rows["torchtitan"]["seconds"] >= rows["accelerate"]["seconds"] > rows["megatron"]["seconds"]


def test_each_engine_says_what_it_cannot_express(command):
    code, out, err = command(*TRAIN, "--fix", "zero=1,cp=2", "--emit", "megatron", "--why")
    assert code == 0 and "the layout that is written, under each engine's profile" in out, err
    _, out, _ = command(*TRAIN, "--fix", "zero=1,cp=2", "--emit", "megatron", "--json")
    cannot = {row["engine"]: row["cannot"] for row in json.loads(out)["by_engine"]}
    # DeepSpeed gets its own kind of context parallelism.
    assert cannot.pop("megatron") == cannot.pop("torchrun") == cannot.pop("deepspeed") == ""
    assert all(cannot.values()) and cannot["accelerate"] == "not zero=1: FSDP shards parameters and gradients, too"


def test_an_engine_that_is_written_for_is_a_name_of_its_profile(command):
    code, out, _ = command(*TRAIN, "--engine", "deepspeed", "--json")
    assert code == 0 and json.loads(out)["engine"] == WRITERS["deepspeed"].profile == "unknown"


@pytest.mark.parametrize("engine", ["torchtitan", "transformers", "accelerate"])
def test_experts_are_written_for_engines_whose_measured_version_had_none(command, engine):
    step = ("--seq", "4096", "--batch", "8", "--top", "1", "--emit", engine, "--json")
    code, out, err = command("plan", "qwen3-30b-a3b", "--cluster", "8xB200", *step)
    assert code == 0, err
    found = json.loads(out)
    assert found["engine"] == "unknown" and found["emitted"]["text"]


def test_a_model_that_an_engine_has_not_is_an_error_before_the_search(command):
    code, _, err = command("plan", "gpt2", "--cluster", "4xH100", "--emit", "torchtitan")
    assert code == 2 and err.startswith("shardwise: error: torchtitan cannot express gpt2: it has models of its own")


SMALL = ("qwen3-0.6b", "--cluster", "2xRTX-4090")
STEP = ("--seq", 4096, "--batch", 8)
LOAD = ("--serve", "--prompt", 2000, "--output", 500, "--concurrency", 512)
SOFTWARE = tuple(dict.fromkeys([*ENGINES, *WRITERS]))
EVERY = 1 if EVERYTHING else 4


@pytest.mark.parametrize("engine", WRITERS)
def test_what_a_plan_emits_fits_where_explain_reads_it(command, engine, tmp_path):
    """Whatever software is planned for: a device is nearly full, and kinds of software differ in what they need."""
    serves, files = WRITERS[engine].serves, 0
    asked = LOAD if serves else STEP
    for software in SOFTWARE if serves else SOFTWARE[list(WRITERS).index(engine) % EVERY :: EVERY]:
        words = ("plan", *SMALL, *asked, "--top", 1, "--engine", software, "--emit", engine, "--json")
        code, out, err = command(*words)
        if code:
            assert f" does not {'serve' if serves else 'train'}" in err or "no layout that fits will do" in err
            continue
        plan, files = json.loads(out), files + 1
        layout, path = Layout.parse(plan["emitted"]["layout"]), tmp_path / plan["emitted"]["file"]
        path.write_text(plan["emitted"]["text"])
        told = [f"--{key}={getattr(layout, key)}" for key in WRITERS[engine].left if key in CODE_KEYS]
        step = () if serves else (*STEP, *told)
        code, out, err = command("explain", path, "--model", SMALL[0], *SMALL[1:], *step, "--json")
        assert code == 0, (software, err)
        found = json.loads(out)
        left = defaults(*(key for key in WRITERS[engine].left if key not in CODE_KEYS))
        assert found["layout"] == str(replace(layout, **left)), software
        if not serves:
            assert found["outlook"]["report"]["room"]["state"] == plan["ranked"][0]["memory"] == "fits", software
            continue
        served = found["served"]
        assert found["outlook"]["cache_tokens"] >= served["sequences"] * served["length"], software
    assert files >= (4 if serves else 18 // EVERY)
