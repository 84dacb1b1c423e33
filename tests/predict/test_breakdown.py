"""The terms behind an estimate add up to its totals."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.cases import table
from harness.pairs import pair
from harness.strategies import split_models
from harness.today import EVERYTHING
from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan, Workload
from shardwise.layout.units import unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.model.lora import Lora
from shardwise.model.parameters import count
from shardwise.predict import estimate, zero_table
from shardwise.predict.breakdown import Breakdown, breakdown
from shardwise.predict.memory.activations import made_items
from shardwise.predict.memory.latent_tensors import block_tensors
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.states import largest_model, least_devices, training_states, zero_sent
from shardwise.predict.recompute_modes import recompute_modes
from shardwise.predict.tensor_kinds import tensor_kinds
from shardwise.predict.traffic.ledger import forward_runs
from shardwise.report import StepReport

RUNNABLE = sorted(name for name, model in catalog().items() if not model.why_not_runnable())
TEXTS = table(__file__, "TEXTS")


def repeated(plan: UnitPlan) -> int:
    """FLOPs per token of the forward passes that a rank's ledger has in the backward pass."""
    blocks = ((plan.blueprint.part(part), forward_runs(plan, part)[1]) for part in plan.of_kind("block"))
    return sum(times * sum(op.flops_per_token(plan.workload.seq) for op in block.operations) for block, times in blocks)


def terms_of(model: ModelConfig, layout: Layout, workload: Workload, report: StepReport | None = None) -> Breakdown:
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
    if layout.recompute == "input":
        first = unit_plan(model, layout, workload)
        again = sum(repeated(replace(first, pp_rank=rank)) for rank in range(layout.pp))
    else:
        once = training_flops_per_token(model, workload.seq)
        again = hardware_flops_per_token(model, workload.seq, layout.recompute) - once
    assert flops.recompute == tokens * again
    if not model.lora:
        assert flops.matrices == 6 * tokens * flops.matrix_elements
    return terms


@settings(max_examples=200 if EVERYTHING else 4)
@example("gpt2", "dp=1", False, "adamw")
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
    terms = terms_of(get("llama-3-8b"), Layout.parse("dp=8"), Workload(4096, 8))
    each = {key: nbytes / terms.here for key, nbytes in terms.own.nbytes.items()}
    assert each == {"weights": 2, "gradients": 2, "model": 4, "first": 4, "second": 4}


def test_groups_of_a_model_with_experts() -> None:
    terms = terms_of(get("tiny-deepseek"), Layout.parse("dp=2"), Workload(64, 2))
    assert list(terms.parameters) == ["embedding", "attention", "MLP", "experts", "norms", "head"]
    adapted = get("tiny-llama").replace(lora=Lora(4))
    assert "adapters" in terms_of(adapted, Layout.parse("dp=2"), Workload(64, 2)).parameters


def test_extra_communication_of_the_stages_is_that_of_the_paper() -> None:
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


# -- The kinds of tensor parallelism side by side: bytes by hand, and every form of them in what `estimate` prints


MODEL = ModelConfig("m", vocab=64, hidden=32, layers=3, heads=4, kv_heads=2, ffn=44, max_positions=64)
CLUSTER = Cluster.parse("2xH100")
WORKLOAD = Workload(16, 2)
WIDTH = 2
"""Bytes of an activation's element."""


def test_payload_of_each_kind_is_its_table_s() -> None:
    gathered, megatron, sequence = tensor_kinds(MODEL, Layout.parse("tp=2,tpkind=gathered"), WORKLOAD, CLUSTER)
    assert [kind.name for kind in (gathered, megatron, sequence)] == [
        "tpkind=gathered", "tpkind=megatron", "tpkind=megatron,sp",
    ]  # fmt: skip
    tokens = WORKLOAD.seq * WORKLOAD.batch
    stream, inner, heads = MODEL.hidden, MODEL.ffn, MODEL.q_width + 2 * MODEL.kv_width
    loss = 3 * tokens * 4 + 8  # a maximum, a sum and a target per token; the gradient's norm
    edges = 2 * tokens * stream * WIDTH + loss
    # Each map: its outputs are gathered, and its input's gradient is summed.
    outputs, inputs = heads + stream + 2 * inner + stream, stream + MODEL.q_width + stream + inner
    assert gathered.payload["all-gather"] == MODEL.layers * tokens * outputs * WIDTH
    assert gathered.payload["all-reduce"] == MODEL.layers * tokens * inputs * WIDTH + edges
    assert gathered.payload["reduce-scatter"] == 0
    # Megatron's: two sums forward and two backward (Shoeybi et al. 2019).
    assert megatron.payload["all-reduce"] == MODEL.layers * 4 * tokens * stream * WIDTH + edges
    assert megatron.payload["all-gather"] == megatron.payload["reduce-scatter"] == 0
    assert megatron.sent < sequence.sent < gathered.sent
    assert sequence.saved < megatron.saved < gathered.saved


def test_kinds_that_suit_nothing_are_left_out() -> None:
    assert tensor_kinds(MODEL, Layout.parse("dp=2"), WORKLOAD, CLUSTER) == []
    odd = tensor_kinds(MODEL, Layout.parse("tp=3,tpkind=gathered"), WORKLOAD, Cluster.parse("3xH100"))
    assert [kind.name for kind in odd] == ["tpkind=gathered"]  # 3 divides neither heads nor sequence


def test_estimate_prints_them_for_the_older_form(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--cluster", "2xH100", "--seq", "64", "--batch", "2"]
    assert main(["estimate", "tiny-llama", "--layout", "tp=2,tpkind=gathered", *where]) == 0
    gathered = capsys.readouterr().out
    assert "kinds of tensor parallelism" in gathered and "tpkind=megatron" in gathered
    assert main(["estimate", "tiny-llama", "--layout", "tp=2", *where]) == 0
    assert "kinds of tensor" not in capsys.readouterr().out


# -- A block's tensors followed one by one beside the closed forms of what is saved, over random models and layouts


SEED = 11


def plans(recompute: tuple[str, ...]) -> list[UnitPlan]:
    drawn = (pair(SEED, index)[0] for index in range(150))
    return [plan for plan in drawn if plan.layout.recompute in recompute and plan.local.first_blocks]


def test_a_forward_pass_leaves_what_is_saved_and_the_output() -> None:
    for plan in plans(("none", "selective")):
        s = Sizes.of(plan)
        part = plan.local.first_blocks[0]
        block, items = block_tensors(plan, s, part), made_items(plan, s, part)
        most = block.forward(saves=True)
        assert block.live.now == sum(items.values()) - items["input"] + block.stream, plan.layout
        assert most >= block.live.now


def test_a_backward_pass_leaves_the_gradient_of_the_input() -> None:
    for plan in plans(("none", "selective")):
        s = Sizes.of(plan)
        part = plan.local.first_blocks[0]
        block, items = block_tensors(plan, s, part), made_items(plan, s, part)
        block.backward(keeps_gradient=False)
        assert block.live.now == block.stream - (sum(items.values()) - items["input"]), plan.layout


def test_a_pass_that_saves_nothing_leaves_the_output() -> None:
    for plan in plans(("full", "input")):
        block = block_tensors(plan, Sizes.of(plan), plan.local.first_blocks[0])
        most = block.forward(saves=False)
        assert block.live.now == block.stream
        again = block_tensors(plan, Sizes.of(plan), plan.local.first_blocks[0])
        assert again.forward(saves=True) >= most


@pytest.mark.parametrize("keeps", [False, True])
def test_adding_to_gradients_never_needs_less(keeps: bool) -> None:
    for plan in plans(("none", "selective", "full", "input")):
        s = Sizes.of(plan)
        part = plan.local.first_blocks[0]
        first, later = (block_tensors(plan, s, part, adds=adds).backward(keeps) for adds in (False, True))
        assert first <= later


# -- Bytes of training states against the table of stages, and the questions that turn them round


PARAMS = st.floats(1.0, 1e15)


@given(PARAMS, st.integers(1, 4096), st.sampled_from([2, 4]))
def test_each_stage_shards_one_part_more(params, ranks, gradient_bytes):
    weights, gradients, optimizer = 2 * params, gradient_bytes * params, 12 * params
    expected = [
        (weights, gradients, optimizer),
        (weights, gradients, optimizer / ranks),
        (weights, gradients / ranks, optimizer / ranks),
        (weights / ranks, gradients / ranks, optimizer / ranks),
    ]
    table = zero_table(params, [ranks], gradient_bytes)
    for stage, parts in enumerate(expected):
        held = training_states(params, stage, ranks, gradient_bytes)
        assert (held.weights, held.gradients, held.optimizer) == parts
        assert table[stage][ranks] == pytest.approx(sum(parts), rel=1e-12)


@given(PARAMS, st.integers(0, 3), st.integers(1, 4096))
def test_the_largest_model_fills_the_device(device, stage, ranks):
    assert training_states(largest_model(device, stage, ranks), stage, ranks).total == pytest.approx(device)


@given(st.floats(1e6, 1e13), st.floats(1e9, 1e12))
def test_as_many_devices_as_are_needed_and_no_more(params, device):
    found = least_devices(params, device)
    assert training_states(params).total <= found * device * (1 + 1e-12)
    assert found == 1 or training_states(params).total > (found - 1) * device


@pytest.mark.parametrize(
    "call",
    [
        lambda: training_states(0),
        lambda: training_states(float("nan")),
        lambda: training_states(7e9, 4),
        lambda: training_states(7e9, 1, 0),
        lambda: least_devices(7e9, 0),
    ],
)
def test_nonsense_is_one_line(call):
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
