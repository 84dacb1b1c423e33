"""A model whose state is more than a memory limit trains inside it when the state is on disk, with the same losses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import memory_limit
from harness.today import EVERYTHING

LIMIT_MB = 580
PLAIN = "micro=2,precision=fp32"
AWAY = f"zero=3,{PLAIN},offload=nvme,offload_params=nvme,offload_activations=cpu"


def limited(tmp_path: Path, layout: str, mb: int) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 3000)
    out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    command = [sys.executable, str(Path(memory_limit.__file__)), layout, str(mb), str(out), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not EVERYTHING, reason="three trainings of a minute in all: make test-all")
def test_a_model_larger_than_a_limit_trains_inside_it(tmp_path: Path) -> None:
    free = limited(tmp_path, PLAIN, 4 * LIMIT_MB)
    assert free["peak"] > LIMIT_MB << 20, free
    inside = limited(tmp_path, AWAY, LIMIT_MB)
    assert inside["losses"] == free["losses"] and len(free["losses"]) == 3, (inside, free)
    assert inside["peak"] < LIMIT_MB << 20, inside
    if free["grouped"]:
        killed = limited(tmp_path, PLAIN, LIMIT_MB)
        assert not killed["losses"] and "SIGKILL" in killed["error"], killed
