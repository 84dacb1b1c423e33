"""Mistakes of expert parallelism that others shipped, each a small layout in which it shows (`tests/mutation/`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cases import table
from harness.checks import assert_ledger, assert_parity, assert_replicas_equal, judge, train
from harness.expert_jobs import plain_routing
from harness.jobs import Training
from harness.pool import run_ranks
from harness.reference import Case, reference
from harness.space import EXPERT_MODELS
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload
from shardwise.model.config import Experts


def case_of(model: str, layout: Layout, seq: int, accumulate: int = 1, **changes: Any) -> Case:
    """A case in float64. changes: of the model's experts."""
    config = EXPERT_MODELS[model]
    experts = Experts(**(vars(config.experts) | changes))
    workload = Workload(seq, layout.dp * layout.micro * accumulate)
    layers = max(config.layers, layout.pp * layout.virtual)
    model_config = config.replace(layers=layers, experts=experts)
    return Case(model_config, workload, "fp64", layout.attention, pool=layout.micro)


LAYOUTS: list[tuple[str, str, int, int, dict[str, Any]]] = table(__file__, "LAYOUTS")
"""(model, layout, tokens of a sequence, micro-batches, changes of the experts)."""


@pytest.mark.parametrize(("model", "text", "seq", "accumulate", "changes"), LAYOUTS, ids=[row[1] for row in LAYOUTS])
def test_trap_17_experts_over_ranks(model: str, text: str, seq: int, accumulate: int, changes: dict[str, Any]) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of(model, layout, seq, accumulate, **changes)
    assert min(reference(case).norms) > case.optimizer.clip, "clipping binds"
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=2,ep=2,zero=2", "tp=2,ep=2,etp=1", "dp=2,tp=2,ep=2,etp=2,zero=3"])
def test_trap_17_an_expert_without_tokens_has_a_gradient_of_zero(text: str) -> None:
    """Few tokens for eight experts: in most steps some have none, and had some the step before."""
    layout = Layout.parse(f"{text},precision=fp64")
    case = replace(case_of("mixtral", layout, 3), steps=6)
    plain = plain_routing(case)
    assert any(len(set(routing.chosen.tolist())) < 8 for routing in plain.values())
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_replicas_equal(ranks)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "tp=2", "dp=2,cp=2,ep=4"])
def test_trap_17_the_losses_and_loads_that_are_reported_are_those_of_all_ranks(text: str) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of("mixtral", layout, 13, 2, balance_loss=0.5, z_loss=0.05, capacity=0.7)
    plain = plain_routing(case)
    for rank in run_ranks("harness.expert_jobs:traced", layout.ranks, Training(case, layout, judge(case))):
        for name, load in rank.loads.items():
            assert sum(load.tokens) == len(plain[name].chosen)
            assert load.dropped == int((~plain[name].takes).sum()) > 0
            assert load.auxiliary_loss == pytest.approx(plain[name].auxiliary_loss, rel=1e-9)


@pytest.mark.parametrize("saved", ["dp=2,ep=2", "dp=2,tp=2,ep=2,etp=2,zero=1"])
def test_trap_17_a_checkpoint_has_all_experts(saved: str, tmp_path: Path) -> None:
    before, folder = Layout.parse(f"{saved},precision=fp64"), tmp_path / "saved"
    case = case_of("mixtral", before, 12, 2)
    payload = (case, before, str(folder), 2, 4)
    expected = run_ranks("harness.resume_jobs:straight", before.ranks, payload)[0].losses[2:]
    for text in ("dp=1", "dp=4,ep=4,zero=3"):
        after, again = Layout.parse(f"{text},precision=fp64"), tmp_path / text
        targets = [(str(folder / "step-2"), str(again))]
        for (rank,) in run_ranks("harness.resume_jobs:go_on", after.ranks, (case, after, targets, 4)):
            assert rank.losses == pytest.approx(expected, rel=1e-9, abs=0)
        assert diff(Checkpoint.open(folder / "step-2"), Checkpoint.open(again / "step-2")) == []
