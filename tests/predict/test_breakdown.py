"""The terms behind an estimate add up to its totals."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.cases import table
from harness.strategies import split_models
from harness.today import EVERYTHING
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.model.lora import Lora
from shardwise.model.parameters import count
from shardwise.predict import estimate
from shardwise.predict.breakdown import Breakdown, breakdown
from shardwise.predict.memory.states import zero_sent
from shardwise.predict.recompute_modes import recompute_modes
from shardwise.report import StepReport

RUNNABLE = sorted(name for name, model in catalog().items() if not model.why_not_runnable())
TEXTS = table(__file__, "TEXTS")


def terms_of(model: ModelConfig, layout: Layout, workload: Workload, report: StepReport | None = None) -> Breakdown:
    """A breakdown, checked against the estimate of the same step."""
    cluster = Cluster.parse(f"{layout.ranks}xH100")
    report = report or estimate(model, layout, workload, cluster)
    terms = breakdown(model, layout, workload, cluster, report)
    held = max(report.roles, key=lambda role: role.peak_bytes).bytes
    arrays = dict(terms.own.nbytes)
    assert (arrays.pop("weights"), arrays.pop("gradients")) == (held.parameters, held.gradients)
    assert sum(arrays.values()) == held.optimizer
    assert sum(term.nbytes for term in terms.saved) == held.saved
    assert sum(terms.parameters.values()) == count(model)
    flops, tokens = terms.flops, workload.seq * workload.batch
    assert flops.matrices + flops.attention == tokens * training_flops_per_token(model, workload.seq)
    mode = "full" if layout.recompute == "input" else layout.recompute
    again = hardware_flops_per_token(model, workload.seq, mode) - training_flops_per_token(model, workload.seq)
    assert flops.recompute == tokens * again
    if not model.lora:
        assert flops.matrices == 6 * tokens * flops.matrix_elements
    return terms


@settings(max_examples=200 if EVERYTHING else 4)
@given(st.sampled_from(RUNNABLE), st.sampled_from(TEXTS), st.booleans(), st.sampled_from(["adamw", "momentum", "sgd"]))
def test_the_sums_are_those_of_the_estimate(name: str, text: str, isolate: bool, optimizer: str) -> None:
    layout = Layout.parse(text)
    workload = Workload(512, 8 * layout.dp, isolate_documents=isolate, optimizer=optimizer)
    try:
        report = estimate(get(name), layout, workload, Cluster.parse(f"{layout.ranks}xH100"))
    except UserError:
        report = None
    assume(report)
    terms_of(get(name), layout, workload, report)


@settings(max_examples=200 if EVERYTHING else 10)
@given(split_models())
def test_the_sums_of_random_models(case: tuple[ModelConfig, Layout, Workload]) -> None:
    terms_of(*case)


def test_16_bytes_per_parameter() -> None:
    """2 + 2 + 4 + 4 + 4 with one micro-batch, whose gradients stay in bf16."""
    terms = terms_of(get("llama-3-8b"), Layout.parse("dp=8"), Workload(4096, 8))
    each = {key: nbytes / terms.here for key, nbytes in terms.own.nbytes.items()}
    assert each == {"weights": 2, "gradients": 2, "model": 4, "first": 4, "second": 4}


def test_groups_of_a_model_with_experts() -> None:
    terms = terms_of(get("tiny-deepseek"), Layout.parse("dp=2"), Workload(64, 2))
    assert list(terms.parameters) == ["embedding", "attention", "MLP", "experts", "norms", "head"]
    adapted = get("tiny-llama").replace(lora=Lora(4))
    assert "adapters" in terms_of(adapted, Layout.parse("dp=2"), Workload(64, 2)).parameters


def test_extra_communication_of_the_stages_is_that_of_the_paper() -> None:
    """With one micro-batch in one precision: stages 0 to 2 send 2 P (n-1)/n, stage 3 half as much again."""
    model, layout = get("tiny-llama"), Layout.parse("dp=4,precision=fp32")
    terms = terms_of(model, layout, Workload(64, 4))
    plain = terms.states[0].sent
    for one in terms.states:
        # The two blocks whose weights are still there when backward begins are not gathered again.
        assert one.sent / plain == pytest.approx(zero_sent(one.stage) / 2, rel=0.0 if one.stage < 3 else 0.25)


def test_recompute_modes_save_less_and_compute_more() -> None:
    modes = recompute_modes(get("llama-3-8b"), Layout.parse("dp=8,zero=2"), Workload(4096, 8), Cluster.parse("8xH100"))
    assert [mode.name for mode in modes] == ["none", "selective", "full", "input"]
    assert [mode.added for mode in modes] == sorted(mode.added for mode in modes)
    assert [mode.saved for mode in modes] == sorted((mode.saved for mode in modes), reverse=True)
    assert all(mode.seconds for mode in modes)
