"""`estimate`, `plan` and `plan --serve` answer for every published configuration that is a language model's."""

import json
import lzma
from pathlib import Path

import pytest

from harness.cases import from_table
from harness.today import EVERYTHING, seed
from shardwise.cli.main import main
from shardwise.layout import Workload
from shardwise.layout.legality import valid_tp
from shardwise.model.huggingface import read_fields
from shardwise.model.parameters import count_parts
from shardwise.model.shapes.reader import language_model
from shardwise.model.shapes.reading import families
from shardwise.planner import plan
from shardwise.planner.serving import plan_serving
from shardwise.predict import estimate

FILE = Path(__file__).parents[1] / "model/published_models.jsonl.xz"
UNKNOWN = {"snowflake-arctic-base", "moonshotai/Kimi-K3"}
"""Models whose class transformers lacks, and whose tensors no family of another name has."""
ROWS = [
    row
    for row in map(json.loads, lzma.decompress(FILE.read_bytes()).splitlines())
    if row["name"] not in UNKNOWN and language_model(row["config"], "")[0] in families()
]
SAMPLE = ROWS if EVERYTHING else [ROWS[(seed() * 20 + i) % len(ROWS)] for i in range(20)]


def test_all_but_a_few_published_models_are_read():
    assert len(ROWS) >= 132


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["name"])
def test_every_command_answers_for_a_published_model(row):
    model = read_fields(row["config"], row["name"])
    total, _, active = count_parts(model)
    if "text_parameters" in row:
        # A decoder here has the corrections of DeepSeek-V3's router as parameters, its class as buffers.
        more = 58 * 256 if row["name"] in ("deepseek_v3", "nvidia/DeepSeek-V3.1-NVFP4") else 0
        # Its class ties the head by default; text_config and the files have one.
        more += 131_072 * 5_120 if row["name"] == "Mistral-Small-3.2-24B-Instruct-2506" else 0
        assert total == row["text_parameters"] + more
        assert active == (row["active_text_parameters"] or row["text_parameters"]) + more
    seq = min(1024, model.max_positions)
    layout = f"dp=8{',attention=math' if model.attention_dropout else ''}"
    report = estimate(model, layout, seq=seq, batch=64, cluster="8xH100")
    assert report.time is not None and report.time > 0
    nodes = 64 if total > 4e11 else 8
    # Without these a search takes up to 20 s.
    fixed = {"micro": 1, "zero": 1, "schedule": "1f1b", "tp": max(tp for tp in valid_tp(model) if 8 % tp == 0)}
    best = plan(model, f"{nodes}x8xH200", Workload(seq=seq, batch=8 * nodes), fix=fixed, top=1)
    assert best.winner.seconds > 0
    served = plan_serving(
        model, f"{4 if nodes > 8 else 1}x8xH200", Workload(prompt=100, output=20, concurrency=4), top=1
    )
    assert served.winner.tokens_per_second > 0


@from_table
def test_headlines_of_models_with_experts_have_the_active_parameters(words, capsys):
    assert main(words.format("openai/gpt-oss-20b").split()) == 0
    assert "20.9B parameters (4.19B active)" in " ".join(capsys.readouterr().out.split())


def test_weights_of_files_are_named_by_their_own_format(capsys):
    words = "plan openai/gpt-oss-20b --cluster 1xH100 --serve --prompt 100 --output 20 --concurrency 4"
    assert main(words.split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "dp=1 in mxfp4 on 1 device" in text and "int4" not in text and "int8" not in text
    assert main([*words.split(), "--why"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "its files are in mxfp4-g32, 4.25 bits per weight with scales" in text
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranked"][0]["weights"] == "mxfp4"
