"""The program of docs/your_own_model.md runs as it is, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cases import table
from shardwise.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your_own_model.md").read_text(encoding="utf-8")
BATCH = table(__file__, "BATCH")
pytestmark = pytest.mark.usefixtures("leftovers")


def test_the_loop_of_the_page_trains_and_saves(tmp_path):
    program = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    assert len([line for line in program.splitlines() if line]) <= 12
    (tmp_path / "train.py").write_text(BATCH + program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # Two ranks print, now and then on one line.
    losses = [float(loss) for loss in re.findall(r"loss=([\d.]+)", done.stdout)]
    assert len(losses) == 20 and len(set(losses)) == 10
    assert re.findall(r"tokens=(\d+)", done.stdout) == [str(2 * 4 * 15)] * 20
    names = Checkpoint.open(tmp_path / "checkpoints" / "step-10").tensors
    assert "model/model.layers.1.self_attn.q_proj.weight" in names and "first/lm_head.weight" in names
