"""Error feedback beside qgz: over any number of steps, sent sums and residuals make up the true sum, bit by bit as in
NumPy; checkpoints carry residuals from layout to layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.jobs import Training
from harness.pool import run_ranks
from harness.quantized import GRADIENT_POINTS, rounded
from harness.quantized_jobs import Account, FedBack, Summed, numbers
from harness.reference import Case
from harness.space import MODELS
from harness.today import QUANTIZED, of_some, some_of
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.wire import BLOCK, packed_bytes
from shardwise.model import ModelConfig
from shardwise.runtime.checkpointing import RESIDUAL
from shardwise.runtime.zero.quantized import pack, unpack

STEPS = 4
LAYOUTS = ["dp=2,zero=1", "dp=3,zero=2", "dp=6,zero=3,hpz=2", "dp=6,zero=3,hpz=3"]


class NumpyResiduals:
    """Sums with error feedback in NumPy. given: step -> the gradient of every rank, a row for each rank's interval."""

    def __init__(self, ranks: int, near: int, elements: int) -> None:
        self.near, self.groups = near, ranks // near
        self.first = np.zeros((ranks, ranks, elements), np.float32)
        self.second = np.zeros((ranks, self.groups if self.groups > 1 else 0, elements), np.float32)

    def step(self, given: list[np.ndarray]) -> np.ndarray:
        """Each rank's interval of the sum."""
        ranks, near = range(len(given)), self.near
        sent = [[_fed(self.first[rank, to], given[rank][to]) for to in ranks] for rank in ranks]
        found = []
        for to in ranks:
            sums = [_added([sent[f * near + k][to] for k in range(near)]) for f in range(self.groups)]
            if self.groups > 1:  # the near rank at this place packs it again
                sums = [_fed(self.second[f * near + to % near, to // near], total) for f, total in enumerate(sums)]
            found.append(_added(sums))
        return np.array(found)

    def folded(self) -> np.ndarray:
        """Residuals of all ranks, by interval."""
        total = self.first.sum(0, dtype=np.float64)
        for rank, pieces in enumerate(self.second):
            for group, piece in enumerate(pieces):
                total[group * self.near + rank % self.near] += piece
        return total


def _fed(residual: np.ndarray, values: np.ndarray) -> np.ndarray:
    due = residual + values
    sent = rounded(due)
    residual[:] = due - sent
    return sent


def _added(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("text", LAYOUTS)
def test_trap_27_true_sums_are_what_was_sent_and_what_is_left(text: str) -> None:
    layout = Layout.parse(f"{text},qgz,feedback,precision=fp32")
    asked = Summed(MODELS["llama"].replace(hidden=50), layout, "blocks.0", seed=len(text), adds=False, steps=STEPS)
    unit = unit_plan(asked.model, layout, Workload(8, layout.dp)).by_name["blocks.0"]
    account = NumpyResiduals(layout.dp, layout.hpz or layout.dp, unit.shard_numel)
    ranks: list[FedBack] = run_ranks("harness.quantized_jobs:fed_back", layout.dp, asked)
    true, sent = np.zeros((2, layout.dp, unit.shard_numel))
    for step in range(STEPS):
        given = [
            numbers(replace(asked, seed=asked.seed + step), rank, unit.padded).numpy().reshape(layout.dp, -1)
            for rank in range(layout.dp)
        ]
        sums = np.array([rank.sums[step].numpy() for rank in ranks])
        assert np.array_equal(sums, account.step(given)), step
        true += np.array(given, np.float64).sum(0)
        sent += sums
    for rank, found in enumerate(ranks):
        assert np.array_equal(found.first.numpy().reshape(layout.dp, -1), account.first[rank])
        assert np.array_equal(found.second.numpy().reshape(-1, unit.shard_numel), account.second[rank])
    folded = np.array([rank.folded.numpy() for rank in ranks])
    assert np.allclose(folded, account.folded(), rtol=1e-5, atol=1e-6 * np.abs(folded).max())
    # Every rank rounds sums of its gradients and residuals to fp32.
    assert np.abs(true - sent - folded).max() <= 1e-6 * STEPS * layout.dp * np.abs(true).max()
    assert np.abs(true - sent).max() > 1e-3 * np.abs(true).max()


@of_some("errors", QUANTIZED, 2)
@pytest.mark.parametrize("point", some_of(GRADIENT_POINTS, 3, "error feedback"), ids=lambda p: p.id)
def test_trap_27_every_gradient_of_a_training_is_accounted_for(point) -> None:
    layout = replace(point.layout, qgz=True, feedback=True)
    asked = Training(point.case, layout, None, transport=dict(point.choices).get("transport", "shared"))  # type: ignore[arg-type]
    ranks: list[list[Account]] = run_ranks("harness.quantized_jobs:accounted", layout.ranks, asked)
    accounts = [account for rank in ranks for account in rank]
    for account in accounts:
        assert account.apart <= 1e-5 * max(account.true, account.residual), account
    # Not much of it: micro-batches without a gradient, where all labels are ignored, send what was left.
    assert any(account.residual > 1e-5 * account.true for account in accounts)


def test_errors_of_two_hundred_steps_do_not_add_up() -> None:
    """Relative errors of the sum of 200 steps: as large as a single step's without feedback, a fourteenth with it."""
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(16 * BLOCK, generator=generator) for _ in range(200)]
    true = torch.stack(steps).double().sum(0)
    errors = []
    for residual in (None, torch.zeros(16 * BLOCK)):
        packed = torch.zeros(packed_bytes(16 * BLOCK, 4), dtype=torch.uint8)
        sent, again = torch.zeros(16 * BLOCK, dtype=torch.float64), torch.empty(16 * BLOCK)
        for step in steps:
            pack(step, 4, packed, residual)
            unpack(packed, 4, again)
            sent += again
        errors.append(float((sent - true).norm() / true.norm()))
    assert errors[0] == pytest.approx(0.126, rel=0.1) and errors[1] == pytest.approx(0.126 / 200**0.5, rel=0.1)


MODEL = ModelConfig(
    "fed", vocab=59, hidden=29, layers=4, heads=3, kv_heads=3, head_dim=6, ffn=41, max_positions=16, tied=True
)
CASE = Case(MODEL, Workload(seq=12, batch=12), precision="fp32")
STORED = ("dp=2,zero=1,micro=3", "dp=4,zero=3,hpz=2", "dp=4,zero=2,shard=2", "dp=2,pp=2,zero=3")


def saved(text: str, folder: Path, words: str = "qgz,feedback") -> Checkpoint:
    layout = Layout.parse(f"{text},{words},precision=fp32")
    run_ranks("harness.resume_jobs:straight", layout.ranks, (CASE, layout, str(folder), 2, 2))
    return Checkpoint.open(folder / "step-2")


def resaved(source: Checkpoint, text: str, folder: Path, words: str = "qgz,feedback", steps: int = 2) -> Checkpoint:
    """It as another layout saves it again, before it goes on."""
    layout = Layout.parse(f"{text},{words},precision=fp32")
    payload = (CASE, layout, [(str(source.folder), str(folder))], steps)
    run_ranks("harness.resume_jobs:go_on", layout.ranks, payload)
    return Checkpoint.open(folder / "step-2")


def residuals(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.tensors if name.startswith(f"{RESIDUAL}/")]


@of_some("residuals", QUANTIZED, 2)
@pytest.mark.parametrize("text", some_of(STORED, 2, "stored residuals"))
def test_trap_27_residuals_go_from_layout_to_layout(text: str, tmp_path: Path) -> None:
    source = saved(text, tmp_path / "a")
    assert len(residuals(source)) == len(source.tensors) // 4
    assert all(np.abs(source.read(name)).max() > 0 for name in residuals(source))
    for index, to in enumerate((text, STORED[STORED.index(text) - 1])):
        assert diff(source, resaved(source, to, tmp_path / f"b{index}", steps=3)) == [], to


def test_a_layout_without_feedback_drops_residuals_and_one_with_it_starts_at_zero(tmp_path: Path) -> None:
    source = saved(STORED[1], tmp_path / "a")
    without = resaved(source, "dp=3,zero=2", tmp_path / "b", "qgz")
    assert {difference.tensor for difference in diff(source, without)} == set(residuals(source))
    again = resaved(without, STORED[3], tmp_path / "c")
    assert residuals(again) == residuals(source)
    assert not any(again.read(name).any() for name in residuals(again))
