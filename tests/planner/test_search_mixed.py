"""Blocks with experts and latent attention: their parameters are the model's, and their memory a dense block's where
they are no more than that."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.model.parameters import count, parameters
from shardwise.planner.bounds import places
from shardwise.planner.exact import rank_plan
from shardwise.planner.space import EVEN, held_by, weighed
from shardwise.predict.memory.engine_bytes import dense_blocks
from shardwise.predict.memory.step import predict_bytes
from shardwise.report.step_report import Bytes

SPARSE = ("mixtral-8x7b", "deepseek-v3")


def held(model: ModelConfig, text: str, seq: int = 512, batch: int = 1 << 12) -> list[Bytes]:
    """Of the ranks of a pipeline that can be the fullest."""
    layout, workload = Layout.parse(text), Workload(seq, batch)
    ranks = places(model, weighed(model.layers, layout.pp, EVEN), layout.pp, layout.schedule)
    return [predict_bytes(rank_plan(model, layout, workload, place, "nccl")) for place in ranks]


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("ep", [1, 8])
def test_without_a_pipeline_a_rank_has_its_share_of_the_model(name, ep):
    model = get(name)
    (all_of_it,) = held(model, "dp=8")
    (one,) = held(model, f"dp=8,ep={ep}")
    experts = sum(p.numel for p in parameters(model) if ".experts." in p.name)
    assert all_of_it.parameters == 2 * count(model)
    assert one.parameters == 2 * (count(model) - experts + experts // ep)
    assert one.optimizer == 12 * (count(model) - experts + experts // ep)


def test_states_of_experts_are_sharded_over_the_ranks_that_hold_the_same_ones():
    model = get("mixtral-8x7b")
    (one,) = held(model, "dp=16,ep=8,zero=1")
    experts = model.layers * 8 * 3 * model.hidden * model.experts.ffn
    dense = count(model) - experts
    assert one.optimizer == pytest.approx(12 * (dense / 16 + experts / 8 / 2), rel=1e-6)
    (apart,) = held(model, "dp=16,ep=8,zero=1,shard=4")
    assert apart.optimizer == pytest.approx(12 * (dense / 4 + experts / 8 / 2), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.sampled_from([1, 2, 4]), st.data())
def test_the_ranks_of_a_pipeline_have_all_blocks(layers, dense, virtual, data):
    """Blocks with and without experts, over all places of a pipeline."""
    pp = data.draw(st.integers(1, layers))
    virtual = virtual if layers % (pp * virtual) == 0 else 1
    model = get("tiny-llama").replace(layers=layers, experts=Experts(4, 2, 64, dense_layers=dense))
    stages = weighed(layers, pp * virtual, EVEN)
    without = [sum(dense_blocks(model, stages, pp, place)) for place in range(pp)]
    assert sum(without) == min(dense, layers)
    assert all(0 <= few <= all_of_it for few, all_of_it in zip(without, held_by(stages, pp), strict=True))


@pytest.mark.parametrize("text", ["dp=8", "dp=4,tp=2,sp,zero=1", "dp=2,tp=2,pp=2,sp,zero=2", "dp=2,pp=4,zero=3"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_expert_for_every_token_is_a_dense_block_that_routes(text, recompute):
    """As many weights but for the router's. Saved are rows and outputs of the expert in place of activation and
    product, which are computed again."""
    dense = get("llama-3.2-1b")
    sparse = dense.replace(name="sparse", experts=Experts(1, 1, dense.ffn))
    router = dense.layers * dense.hidden
    for plain, mixed in zip(held(dense, f"{text},recompute={recompute}"),
                            held(sparse, f"{text},recompute={recompute}"), strict=True):  # fmt: skip
        assert 0 <= mixed.parameters - plain.parameters <= 4 * router * 1.01
        assert mixed.optimizer - plain.optimizer <= 12 * router * 1.01
        assert recompute == "none" or mixed.saved == plain.saved


def test_a_pipeline_behind_blocks_without_experts_can_be_fullest_later():
    model = get("deepseek-v3")
    assert places(model, weighed(model.layers, 32, EVEN), 32, "1f1b") == [0, 1, 2, 31]
    assert places(model, weighed(model.layers, 2, EVEN), 2, "1f1b") == [0, 1]
    assert places(get("mixtral-8x7b"), (4,) * 8, 8, "1f1b") == [0, 1, 7]
    assert places(get("mixtral-8x7b"), (3, 4, 4, 5, 5, 4), 6, "1f1b") == [0, 1, 3, 5]
    ends = held(model, "dp=8,tp=4,pp=32,sp,ep=32,zero=1,recompute=full")
    parameters = [end.parameters for end in ends]
    assert parameters[2] > 1.3 * parameters[1]


@pytest.mark.parametrize("stages", ["2/2/2/2/2/2/2/2", "1/2/2/2/2/2/2/0", "2/2/2/2/2/2/2/1", "4/4/4/4", "3/4/4/3"])
@pytest.mark.parametrize("dense", [1, 2, 3, 5])
def test_the_fullest_rank_behind_them_depends_on_its_first_chunk(stages, dense):
    """It is the first one that has experts in all of its blocks, where these outweigh the table of rank 0."""
    counts = tuple(map(int, stages.split("/")))
    experts = Experts(8, 8, 4096, dense_layers=dense)
    model = ModelConfig("random", 1000, 1024, sum(counts), 16, 1024, 4096, experts=experts)
    order = "interleaved,virtual=2" if len(counts) == 8 else "1f1b"
    layout = Layout.parse(f"pp=4,stages={stages},schedule={order}")
    totals = [predict_bytes(rank_plan(model, layout, Workload(1024, 8), place, "nccl")).total for place in range(4)]
    assert totals.index(max(totals)) in places(model, counts, 4, layout.schedule)


def test_capacity_is_what_tokens_choose():
    model = get("mixtral-8x7b")
    two, four = (held(model.replace(experts=Experts(8, active, 14336)), "dp=8,ep=8,zero=1")[0] for active in (2, 4))
    rows = 512 * 2
    # rows, outputs, gate and up; choices and orders
    inner = rows * ((2 * 14336 + 2 * 4096) * 2 + 3 * 8) * model.layers
    assert four.saved - two.saved == pytest.approx(inner, rel=0.01)
