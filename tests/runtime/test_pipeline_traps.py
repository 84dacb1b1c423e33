"""Ways in which pipelines go silently wrong, each as a test that fails when the mistake is made (`tests/mutation`)."""

from itertools import pairwise
from pathlib import Path

import pytest

from harness.cases import from_table
from harness.checks import assert_ledger, assert_parity, assert_replicas_equal, train
from harness.pool import run_ranks
from harness.reference import Case, reference
from harness.space import MODELS, SEQ
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload


def case_of(layout: Layout, model: str, micro_batches: int = 4) -> Case:
    batch = layout.dp * layout.micro * micro_batches
    return Case(MODELS[model].replace(layers=4), Workload(SEQ, batch), layout.precision)


def holds(text: str, model: str) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of(layout, model)
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)


# -- 1: both ends of a pipeline that hold the tied table add up its gradients, and one of them counts in the norm


@from_table
def test_trap_01_tied_embedding_at_both_ends(text: str, model: str) -> None:
    parsed = Layout.parse(f"{text},precision=fp64")
    case = case_of(parsed, model)
    assert case.model.tied
    assert min(reference(case).norms) > case.optimizer.clip, "clipping must bind, or a wrong norm goes unnoticed"
    holds(text, model)


# -- 5, 18: every rank logs the loss of the whole batch, wherever the last stage is


@from_table
def test_trap_05_18_every_rank_logs_the_global_loss_of_a_pipeline(text: str) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of(layout, "llama")
    expected = reference(case).losses
    assert all(abs(a - b) > 1e-6 for a, b in pairwise(expected))
    for rank in train(case, layout, memory=False):
        assert rank.losses == pytest.approx(expected, rel=1e-12)


# -- 21: state goes from a pipeline to any other layout and back


@pytest.mark.parametrize("text", ["dp=2,pp=2,zero=1", "dp=2,tp=2,pp=2,sp,zero=3,virtual=2,schedule=interleaved"])
def test_trap_21_a_pipeline_is_saved_as_it_would_be_without(text: str, tmp_path: Path) -> None:
    folders = []
    for index, words in enumerate((text, "tp=2")):
        layout = Layout.parse(f"{words},precision=fp64")
        case = Case(MODELS["qwen3"].replace(layers=4), Workload(SEQ, 8))
        run_ranks("harness.resume_jobs:straight", layout.ranks, (case, layout, str(tmp_path / str(index)), 2, 2))
        folders.append(tmp_path / str(index) / "step-2")
    piped, whole = map(Checkpoint.open, folders)
    assert piped.manifest.tensors.keys() == whole.manifest.tensors.keys()
    assert diff(piped, piped) == []
    # Other sums round otherwise: what must agree is where every element is, so the values to the last digits.
    for name in piped.manifest.tensors:
        assert piped.read(name) == pytest.approx(whole.read(name), rel=1e-6, abs=1e-9), name


# -- 19: messages and reductions in whatever order they come


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_trap_19_without_overlap_a_pipeline_gives_the_same_bits(transport: str) -> None:
    layout = Layout.parse("dp=2,pp=2,zero=2,schedule=zb-h1,precision=fp32")
    case = case_of(layout, "llama")
    found = [train(case, layout, overlap=each, transport=transport, memory=False) for each in (True, False)]
    assert [rank.losses for rank in found[0]] == [rank.losses for rank in found[1]]
    assert [rank.pieces for rank in found[0]] == [rank.pieces for rank in found[1]]
