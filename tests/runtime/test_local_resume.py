"""Checkpoints of `sync=local`: a resumed run is the one that was not interrupted, bit by bit; other layouts, and those
in lockstep, continue from them and the other way round."""

from pathlib import Path

import numpy as np
import pytest

from harness.cases import table
from harness.pool import run_ranks
from harness.reference import Case
from harness.today import RESUMED, of_some, some_of
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.config import Experts

MODEL = ModelConfig(
    "apart", vocab=59, hidden=29, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=41, max_positions=16, tied=True,
    qk_norm=True, dropout=0.1,
)  # fmt: skip
EXPERTS = MODEL.replace(experts=Experts(4, 2, 13, balance_loss=0.02))
LAYOUTS = table(__file__, "LAYOUTS")

TRAPS = ("dp=2,every=2,outer=nesterov", "dp=2,every=2,outer=nesterov,outer_bits=8,precision=fp32")


def layout(text: str) -> Layout:
    known = [word.partition("=")[0] for word in text.split(",")]
    sync = ",sync=local" if "every" in known else ""
    return Layout.parse(f"{text}{sync}{'' if 'precision' in known else ',precision=fp64'}")


def trained(text: str, folder: Path, steps: list[int], source: Path | None = None) -> Checkpoint:
    """The checkpoint after the last of some steps, each of which is saved."""
    parsed = layout(text)
    case = Case(EXPERTS if parsed.ep > 1 else MODEL, Workload(seq=12, batch=12), parsed.precision)
    run_ranks("harness.resume_jobs:stops", parsed.ranks, (case, parsed, source and str(source), str(folder), steps))
    return Checkpoint.open(folder / f"step-{steps[-1]}")


def kinds(checkpoint: Checkpoint) -> set[str]:
    return {name.partition("/")[0] for name in checkpoint.tensors}


@of_some("rounds", RESUMED, 2)
@pytest.mark.parametrize("text", some_of(LAYOUTS, 2, "interrupted rounds"))
def test_an_interrupted_run_ends_as_an_undisturbed_one(text: str, tmp_path: Path) -> None:
    assert_resumes(text, tmp_path)


@pytest.mark.parametrize("text", TRAPS)
def test_trap_30_a_resumed_run_has_all_that_replicas_share(text: str, tmp_path: Path) -> None:
    assert_resumes(text, tmp_path)


def assert_resumes(text: str, tmp_path: Path) -> None:
    """After two outer steps, so that momentum and errors count; saved once more at once, the state is as it was."""
    straight = trained(text, tmp_path / "straight", [4, 8])
    resumed = trained(text, tmp_path / "resumed", [8], tmp_path / "straight" / "step-4")
    assert diff(straight, resumed) == []
    again = trained(text, tmp_path / "again", [4], tmp_path / "straight" / "step-4")
    if layout(text).independent != 3:  # three equal numbers over three may round
        assert diff(Checkpoint.open(tmp_path / "straight" / "step-4"), again) == []
    parsed = layout(text)
    expected = {"model", "first", "second", *["outer"] * (parsed.outer == "nesterov")}
    assert kinds(again) - {"residual"} == expected | ({"outer_error"} if parsed.outer_bits else set())
    if parsed.outer == "nesterov":
        assert all(np.abs(again.read(name)).max() > 0 for name in again.tensors if name.startswith("outer/"))


def test_other_replicas_and_lockstep_continue_from_it_and_the_other_way_round(tmp_path: Path) -> None:
    two = trained("dp=4,zero=1,replicas=2,every=2,outer=nesterov,outer_bits=8", tmp_path / "two", [4])
    four = trained("dp=4,every=2,outer=nesterov,outer_bits=8", tmp_path / "four", [4], tmp_path / "two" / "step-4")
    assert diff(two, four) == []
    plain = trained("dp=2,zero=3", tmp_path / "plain", [4], tmp_path / "four" / "step-4")
    assert {difference.tensor.partition("/")[0] for difference in diff(four, plain)} == {"outer", "outer_error"}
    local = trained("dp=2,pp=2,every=2,outer=nesterov,outer_bits=4", tmp_path / "local", [4], tmp_path / "plain/step-4")
    assert kinds(local) == kinds(two)
    assert {name.partition("/")[0] for name in (d.tensor for d in diff(plain, local))} == {"outer", "outer_error"}
    assert not any(local.read(name).any() for name in local.tensors if name.startswith("outer"))


def test_trap_30_a_resumed_run_continues_from_the_weights_that_were_saved(tmp_path: Path) -> None:
    """Lockstep to rounds: the first outer step starts from the checkpoint, not from initial weights."""
    plain = trained("dp=2", tmp_path / "plain", [4])
    local = trained("dp=2,every=2,outer=nesterov", tmp_path / "local", [4, 6], tmp_path / "plain" / "step-4")
    name = "model/embedding.tokens.weight"
    before, after = plain.read(name), local.read(name)
    assert 0 < np.abs(after - before).max() < 0.5 * np.abs(before).max()
