import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from harness.today import EVERYTHING
from shardwise.model.parameters import count_parts
from shardwise.model.shapes import reader, reading
from shardwise.predict import estimate

ROOT = Path(__file__).parents[2]
ROWS = [
    json.loads(line)
    for line in lzma.decompress(Path(__file__).with_name("published_models.jsonl.xz").read_bytes()).splitlines()
]
KINDS = {"windows": ("gemma3_text", "window"), "latent": ("deepseek_v2", "latent"), "linear": ("qwen3_next", "linear")}
"""Kind of attention -> (family, kind of cache)."""


@pytest.mark.skipif(not EVERYTHING, reason="records classes of transformers: make test-all")
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_becomes_a_planned_family_by_one_command(kind, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    family, cache = KINDS[kind]
    out = tmp_path / "families.json"
    command = [sys.executable, str(ROOT / "benchmarks/record_families.py"), family, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    recorded = json.loads(out.read_text())
    others = {name: data for name, data in reading.families().items() if name != family}
    monkeypatch.setattr(reader, "families", lambda: {**others, **recorded})
    monkeypatch.setattr(reader, "_record", lambda *_: pytest.fail("it is read from the data"))
    rows = [row for row in ROWS if reader.language_model(row["config"], "")[0] == family and "text_parameters" in row]
    assert rows
    for row in rows:
        model = reader.read_shapes(row["config"], row["name"], row["name"], "recorded")
        assert count_parts(model)[::2] == (row["text_parameters"], row["active_text_parameters"])
        assert model.counted is not None and cache in {each.kind for each in model.counted.caches}
        assert estimate(model, "dp=8", seq=512, batch=8, cluster="8xH100").time
