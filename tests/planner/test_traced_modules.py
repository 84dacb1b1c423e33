import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.cases import from_table
from harness.own_modules import llama, mixtral
from shardwise import Blueprint, Layout, ModelConfig, UserError, Workload, estimate, plan, trace
from shardwise.cluster import Cluster
from shardwise.errors import LayoutError
from shardwise.layout.modules import check_module_layout
from shardwise.model.blueprint_file import write_blueprint
from shardwise.model.catalog import resolve
from shardwise.model.flops import training_flops_per_sequence
from shardwise.model.parameters import count
from shardwise.planner.space import Space
from shardwise.predict.breakdown import breakdown
from shardwise.predict.time.features import EVERYTHING
from shardwise.predict.time.profiles import engine

SEQ, CLUSTER = 1024, "8xH100"
SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": SEQ,
}  # fmt: skip
SAME = resolve("tiny-llama").replace(
    name="same", vocab=32000, hidden=2048, layers=4, heads=16, kv_heads=8, ffn=5632, max_positions=SEQ, tied=False,
    head_dim=128,
)  # fmt: skip


def loss(model, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(**batch).logits.flatten(0, 1)
    return F.cross_entropy(logits.float(), batch["input_ids"].flatten(), reduction="sum"), logits.shape[0]


@pytest.fixture(scope="module")
def traced() -> Blueprint:
    with torch.device("meta"):
        module = llama(**SIZES)
    example = {"input_ids": torch.zeros(2, SEQ, dtype=torch.int64), "use_cache": False}
    return trace(module, example, loss=loss, tp=[1, 2])


@pytest.fixture(scope="module")
def file(traced, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "model.json"
    write_blueprint(traced, path)
    return path


def test_flops_are_those_of_the_configuration(traced):
    assert training_flops_per_sequence(traced, SEQ) == pytest.approx(training_flops_per_sequence(SAME, SEQ), rel=0.02)


@pytest.mark.parametrize("layout", ["dp=8,zero=1", "dp=4,tp=2,zero=3", "dp=8,recompute=full,sync=local,every=4"])
def test_estimates_are_near_those_of_the_configuration(traced, layout):
    """Products and state are the same; other software saves more, and launches more kernels."""
    workload = Workload(seq=SEQ, batch=64)
    one, other = (estimate(model, layout, workload, CLUSTER) for model in (traced, SAME))
    (mine,), (theirs,) = one.roles, other.roles
    for name in ("parameters", "optimizer"):
        assert getattr(mine.bytes, name) == pytest.approx(getattr(theirs.bytes, name), rel=0.001)
    assert one.timing["parts"]["matmul"] == pytest.approx(other.timing["parts"]["matmul"], rel=0.1)
    for name in ("optimizer", *["outer"] * ("local" in layout)):
        assert one.timing["parts"][name] == pytest.approx(other.timing["parts"][name], rel=0.01)
    assert one.timing["parts"]["memory"] > other.timing["parts"]["memory"]
    if "full" not in layout:
        assert mine.bytes.saved > theirs.bytes.saved


@pytest.mark.parametrize(
    "layout",
    ["dp=4,pp=2,zero=1,micro=2", "dp=4,pp=2,schedule=interleaved,virtual=2,micro=2", "dp=4,pp=2,schedule=zb-h1,zero=3",
     "dp=2,tp=2,pp=2,micro=4"],
)  # fmt: skip
def test_pipelines_are_near_those_of_the_configuration(traced, layout):
    workload = Workload(seq=SEQ, batch=64)
    one, other = (estimate(model, layout, workload, CLUSTER) for model in (traced, SAME))
    for mine, theirs in zip(one.roles, other.roles, strict=True):
        assert mine.bytes.parameters == theirs.bytes.parameters and mine.bytes.optimizer == theirs.bytes.optimizer
        messages = [[row for row in role.ledger if row.op in ("send", "recv")] for role in (mine, theirs)]
        assert messages[0] == messages[1]
    for part in ("matmul", "pipeline", "optimizer"):
        assert one.timing["parts"][part] == pytest.approx(other.timing["parts"][part], rel=0.01)
    assert one.timing["parts"]["bubble"] > 0


@pytest.fixture(scope="module")
def mixture() -> Blueprint:
    with torch.device("meta"):
        module = mixtral(**SIZES | {"num_local_experts": 8, "num_hidden_layers": 2})
    example = {"input_ids": torch.zeros(2, SEQ, dtype=torch.int64), "use_cache": False}
    return trace(module, example, loss=loss, tp=[1], cuts=["", "ep=8", "cp=2,ep=8"])


def test_flops_of_experts_are_those_of_their_rows(mixture):
    (blocks,) = (part for part in mixture.trace.step(1, "bf16", "none", "ep=8").operations if len(part.parts) == 2)
    products = [op for op in blocks.operations if op.name == "_grouped_mm"]
    assert sum(op.count * op.flops[0] for op in products) == 3 * 2 * (2 * SEQ * 2) * 3 * 2048 * 5632
    for op in products:
        assert math.prod(pair[1] for pair in op.sizes) * 2 == op.flops[1]


@pytest.mark.parametrize("layout", ["dp=8,zero=1,recompute=full", "dp=8,ep=8,zero=3", "dp=4,cp=2,ep=8", "dp=4,pp=2"])
def test_terms_of_a_traced_module_add_up(mixture, traced, layout):
    model, layout, workload = (mixture if "ep" in layout else traced), Layout.parse(layout), Workload(seq=SEQ, batch=64)
    report = estimate(model, layout, workload, CLUSTER)
    held = max(report.roles, key=lambda role: role.peak_bytes).bytes
    terms = breakdown(model, layout, workload, Cluster.parse(CLUSTER), report)
    assert sum(term.nbytes for term in terms.saved) == held.saved
    assert terms.own.total == held.parameters + held.gradients + held.optimizer
    assert sum(terms.parameters.values()) == count(model) and len(terms.states) == 4
    flops = terms.flops
    assert flops.matrices + flops.attention == 64 * training_flops_per_sequence(model, SEQ)
    assert 0.2 < flops.recompute / (flops.matrices + flops.attention) < 0.34 or layout.recompute == "none"


@pytest.mark.parametrize("fixed", [{"cp": 1, "ep": 8}, {"cp": 2, "ep": 8}])
def test_experts_and_sequences_that_are_spread_are_searched(mixture, fixed):
    workload = Workload(seq=SEQ, batch=64)
    best = plan(mixture, CLUSTER, workload, fix=fixed, top=3)
    for one in best.ranked:
        report = estimate(mixture, one.layout, workload, CLUSTER)
        assert {key: getattr(one.layout, key) for key in fixed} == fixed and report.time == pytest.approx(one.seconds)
        assert one.held == report.roles[0].bytes and best.not_runnable(one) is None
    assert report.timing["parts"]["experts"] > 0 and (report.timing["parts"]["tensor"] > 0) == (fixed["cp"] > 1)


def test_pipelines_are_searched(traced):
    workload = Workload(seq=SEQ, batch=64)
    best = plan(traced, CLUSTER, workload, fix={"pp": 2}, top=5)
    for one in best.ranked:
        report = estimate(traced, one.layout, workload, CLUSTER)
        assert one.layout.pp == 2 and report.time == pytest.approx(one.seconds)
        assert one.held == max((role.bytes for role in report.roles), key=lambda held: held.total)
        assert best.not_runnable(one) is None


def test_the_best_layouts_fit_are_ranked_and_can_be_split(traced):
    workload = Workload(seq=SEQ, batch=64)
    best = plan(traced, CLUSTER, workload, top=20, by="fastest")
    seconds = [one.seconds for one in best.ranked]
    assert len(seconds) == 20 and seconds == sorted(seconds)
    for one in best.ranked:
        check_module_layout(one.layout)
        report = estimate(traced, one.layout, workload, CLUSTER)
        assert report.time == pytest.approx(one.seconds)
        assert report.roles[0].bytes == one.held and one.held.total <= best.usable
        assert best.not_runnable(one) is None
    assert 0.2 < best.utilisation(best.winner) < 0.8


def test_every_candidate_can_be_split(traced):
    """Also where the engine has pipelines, context parallelism and offloading."""
    from shardwise.cluster import Cluster
    from shardwise.planner.runnable import space_for

    assert engine("shardwise").features != EVERYTHING
    space, none_runs = space_for(traced, Cluster.parse(CLUSTER), Workload(seq=SEQ, batch=16), "megatron-bridge", {})
    assert isinstance(space, Space) and not none_runs
    layouts = [
        frame.layout(row, sharding, order)
        for frame in space.frames
        for row in frame.rows
        for sharding in frame.shardings
        for order in frame.orders
    ]
    assert {layout.pp for layout in layouts} == {1, 2, 4}
    assert {layout.tp for layout in layouts} == {1, 2} and {layout.recompute for layout in layouts} == {"none", "full"}
    for layout in layouts:
        check_module_layout(layout)


@from_table
def test_what_split_cannot_run_is_not_planned(traced, fixed, message):
    with pytest.raises(UserError, match=message):
        plan(traced, CLUSTER, Workload(seq=SEQ, batch=64), fix=fixed)


def test_a_model_that_does_not_fit_says_by_how_much(traced):
    with pytest.raises(UserError, match=r"does not fit 1xRTX-4090.*the leanest layout .* needs .* per device"):
        plan(traced, "1xRTX-4090", Workload(seq=SEQ, batch=64), reserve=20e9)


def test_files_stand_for_models(traced, file):
    workload = Workload(seq=SEQ, batch=64)
    assert estimate(str(file), "dp=8,zero=3", workload, CLUSTER) == estimate(traced, "dp=8,zero=3", workload, CLUSTER)
    with pytest.raises(LayoutError, match="ep=2 was not traced, of cuts the trace has none: "):
        estimate(str(file), "dp=8,ep=2", workload, CLUSTER)


def test_sequence_parallelism_is_planned_where_it_was_traced(traced):
    """It saves less, and communicates about as long as that of the same model with a configuration."""
    workload = Workload(seq=SEQ, batch=64)
    assert plan(traced, CLUSTER, workload, fix={"sp": True}).ranked[0].layout.sp
    both = replace(traced.trace, steps=tuple(replace(s, cut=c) for c in ("", "cp=2") for s in traced.trace.steps))
    assert plan(replace(traced, trace=both), CLUSTER, workload, fix={"sp": True, "cp": 2}).ranked[0].layout.sp
    whole, cut, same = (
        estimate(model, layout, workload, CLUSTER)
        for model, layout in ((traced, "dp=4,tp=2"), (traced, "dp=4,tp=2,sp"), (SAME, "dp=4,tp=2,sp"))
    )
    assert cut.roles[0].bytes.saved < 0.9 * whole.roles[0].bytes.saved
    assert cut.timing["parts"]["tensor"] == pytest.approx(same.timing["parts"]["tensor"], rel=0.2)
    with pytest.raises(LayoutError, match="sp does not go with pp=2 for a user's module yet: leave sp out"):
        estimate(traced, "dp=2,tp=2,sp,pp=2", workload, CLUSTER)


def test_a_module_without_shards_says_why():
    model = trace(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), {"0": "column", "1": "row"}, tp=[2]
    )
    with pytest.raises(LayoutError, match="Sequential has no predictions for sequence parallelism: sp cuts the stream"):
        estimate(model, "tp=2,sp", Workload(seq=1, batch=8))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    start = "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", start, *words], capture_output=True, text=True, timeout=120)


def test_commands_need_no_torch(file):
    done = command("estimate", str(file), "--layout", "dp=8,zero=3", "--cluster", CLUSTER, "--batch", "64", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["workload"]["seq"] == SEQ
    done = command("plan", str(file), "--cluster", CLUSTER, "--batch", "64", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranked"][0]["not_runnable"] is None


@from_table
def test_bad_input_is_one_line_and_code_2(file, words, message):
    done = command("plan", str(file), "--cluster", CLUSTER, "--batch", "64", *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_damaged_files_are_one_line(tmp_path):
    path = tmp_path / "model.json"
    for text in ('{"format": "shardwise blueprint", ', '{"format": "shardwise blueprint", "name": "x"}'):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            estimate(str(path), "dp=1", Workload(seq=1, batch=1))
        assert "\n" not in str(caught.value)


def test_a_module_that_was_not_traced_has_no_numbers():
    plain = Blueprint("plain", 0, ())
    for question in (lambda w: estimate(plain, "dp=1", w), lambda w: plan(plain, CLUSTER, w)):
        with pytest.raises(UserError, match="was not traced"):
            question(Workload(seq=1, batch=1))


def test_configurations_are_not_taken_for_traces():
    assert isinstance(SAME, ModelConfig) and not isinstance(SAME, Blueprint)
    assert Layout.parse("dp=2").ranks == 2
