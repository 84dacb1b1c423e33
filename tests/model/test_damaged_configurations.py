"""Published configurations with fields that are missing, of a wrong type, or of an impossible size: a model, or one
line."""

import json
import lzma
import random
import re
from pathlib import Path

import pytest

from harness.cases import from_table
from harness.today import EVERYTHING, seed
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.model.caches import cache_json
from shardwise.model.huggingface import read_fields
from shardwise.model.parameters import count_parts
from shardwise.model.shapes.reader import language_model
from shardwise.model.shapes.reading import families

ROWS = [
    row
    for row in map(
        json.loads, lzma.decompress(Path(__file__).with_name("published_models.jsonl.xz").read_bytes()).splitlines()
    )
    if language_model(row["config"], "")[0] in families()
]
WRONG = [
    "x", "", "8", None, -1, 0, 3, 7, 1.5, True, False, [], {}, [1, 2], [None], ["full_attention"], {"a": 1}, 10**12,
    10**30, 10**400, float("nan"), float("inf"),
]  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip
SHAPES = re.compile("size|num|layer|head|dim|rank|expert|quant|config|group|bits|window|pattern|types|model_type")


def paths(data, prefix=()):
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


def damaged(rand: random.Random, config: dict) -> dict:
    config = json.loads(json.dumps(config))
    for _ in range(rand.choice((1, 1, 2, 3))):
        all_paths = [path for path in paths(config) if SHAPES.search(path[-1])]
        if not all_paths:
            break
        *outer, name = rand.choice(all_paths)
        inside = config
        for key in outer:
            inside = inside[key]
        if rand.random() < 0.25:
            del inside[name]
        else:
            inside[name] = rand.choice(WRONG)
    return config


@pytest.mark.parametrize("part", range(40 if EVERYTHING else 4))
def test_a_damaged_configuration_is_a_model_or_one_line(part):
    rand = random.Random(1000 * seed() + part)
    for _ in range(10):
        row = rand.choice(ROWS)
        config = damaged(rand, row["config"])
        try:
            model = read_fields(config, "damaged")
            count_parts(model)
            cache_json(model)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 700, config
        except Exception as error:
            raise AssertionError(f"{row['name']}: {config}") from error


@from_table
def test_what_is_wrong_is_named(config, match, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["list", "models", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert re.search(match, line) and line.count("\n") == 1


def test_a_class_that_cannot_be_built_is_named_with_the_reason(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"model_type": "ctrl", "n_embd": -8, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["list", "models", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "transformers cannot build ctrl: " in line and "-8" in line and line.count("\n") == 1
