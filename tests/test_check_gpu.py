"""The device check reports what is wrong: losses that differ, exceptions, and what is not possible."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "check_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("check_gpu", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_gpu"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_losses_beyond_the_tolerance_fail(script: ModuleType):
    assert script.close([1.0, 2.0], [1.0, 2.0 + 1e-8], 1e-6) == "losses within 5.0e-09"
    for found, expected in (([1.0, 2.1], [1.0, 2.0]), ([1.0], [1.0, 2.0]), ([], []), ([float("nan")], [1.0])):
        with pytest.raises(AssertionError):
            script.close(found, expected, 1e-3)


def test_each_outcome_is_a_row(script: ModuleType):
    def skip() -> str:
        raise script.Skip("needs 2 devices")

    def wrong() -> str:
        raise AssertionError("losses differ")

    rows = [script.checked("a", lambda: "fine"), script.checked("b", skip), script.checked("c", wrong)]
    assert [(row.outcome, row.detail) for row in rows] == [
        ("ok", "fine"), ("skipped", "needs 2 devices"), ("failed", "AssertionError: losses differ")
    ]  # fmt: skip


def test_the_full_form_has_every_layout_model_and_precision(script: ModuleType, tmp_path: Path):
    names = [name for name, _ in script.Checks(tmp_path, "cuda", False).every()]
    assert len(names) == len(set(names))
    for model in script.MODELS:
        assert {f"losses {model} {precision}" for precision in ("fp64", "fp32", "bf16")} <= set(names)
    assert {f"ranks {model} {layout}" for model, layout in script.LAYOUTS} <= set(names)
    assert {"decode steps tiny-llama fp32", "decode steps tiny-llama bf16 int8"} <= set(names)
    assert {"resume cpu to cuda", "resume cuda to cpu", "generation", "memory compile=block"} <= set(names)
