"""DeepSpeed and accelerate train with emitted files, and DeepSpeed resumes an exported checkpoint, where they are
installed: `.venv/engines` of `make parsers`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 1800
"""Seconds: DeepSpeed compiles its operators on the first run."""


def evaluated(script: str, expression: str) -> str:
    code = f"import runpy; made = runpy.run_path('docs/{script}.py'); print({expression})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": "src:tests"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(("engine", "layout"), [("deepspeed", "dp=2,zero=2"), ("accelerate", "dp=2,zero=3,grads=fp32")])
def test_an_engine_trains_with_the_predicted_bytes(engine: str, layout: str) -> None:
    pytest.importorskip(engine)
    row = evaluated("emit_runs", f"made['row']({engine!r}, {layout!r})")
    assert row.count("(=)") == 3, row


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_resumes_an_exported_checkpoint(stage: int) -> None:
    pytest.importorskip("deepspeed")
    assert float(evaluated("export_runs", f"next(made['differences']([({stage}, 'DeepSpeed')]))")) < 1e-6
