"""Other libraries as second oracles: torch's FSDP2, DTensor and pipelining, transformers on one device in float64, and
transformers' expert parallelism, train the same model alike."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cases import from_table, table
from harness.checks import assert_parity, train
from harness.expert_oracles import alone
from harness.huggingface import pretrained
from harness.pool import run_ranks
from harness.reference import Case
from harness.space import MODELS, SEQ, Point, point
from harness.today import LIBRARIES, of_some, some_of
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.huggingface import from_huggingface

FSDP = (
    point(model="llama", dp=2, zero=3),
    point(model="gpt2", dp=2, zero=3, recompute="full", attention="math"),
    point(model="neox", dp=2, zero=2, documents=True),
    point(model="qwen2", dp=2, zero=3, precision="fp32"),
)
TENSOR = (
    point(model="llama", tp=2, micro=2),
    point(model="llama", tp=2, sp=True, micro=2, precision="fp32"),
    point(model="neox", tp=2, accumulate=2, attention="math", documents=True),
)
PIPELINES = table(__file__, "PIPELINES")
"""(layout, model, whether documents are kept apart); gpt2 and qwen3 have tied tables."""


@of_some("FSDP2", LIBRARIES, 2)
@pytest.mark.parametrize("point", some_of(FSDP, 2, "beside FSDP2"), ids=lambda p: p.id)
def test_fsdp2_agrees(point: Point) -> None:
    oracle = run_ranks("harness.oracles:fsdp", 2, point.case)[0]
    assert_parity(point.case, point.layout, train(point.case, point.layout, against=oracle, memory=False), oracle)


@of_some("DTensor", LIBRARIES, 2)
@pytest.mark.parametrize("point", some_of(TENSOR, 1, "beside DTensor"), ids=lambda p: p.id)
def test_dtensor_agrees(point: Point) -> None:
    # DTensor's row-parallel style cannot cut an odd width.
    model = point.case.model
    case = replace(point.case, model=model.replace(ffn=model.ffn + model.ffn % 2))
    oracle = run_ranks("harness.oracles:tensor_parallel", 2, case)[0]
    assert_parity(case, point.layout, train(case, point.layout, against=oracle, memory=False), oracle)


@of_some("torch's pipelines", LIBRARIES, 2)
@pytest.mark.parametrize(("schedule", "name", "documents"), some_of(PIPELINES, 3, "beside torch's pipelines"))
def test_torch_pipelining_agrees(schedule: str, name: str, documents: bool) -> None:
    layout = Layout.parse(f"pp=2,schedule={schedule},precision=fp64")
    case = Case(MODELS[name].replace(layers=4), Workload(SEQ, 4 * layout.micro, isolate_documents=documents))
    oracle = run_ranks("harness.oracles:pipeline", 2, (case, layout))[0]
    assert_parity(case, layout, train(case, layout, against=oracle, memory=False), oracle)


def _from(folder: Path) -> ModelConfig:
    model = from_huggingface(folder)
    return model.replace(experts=model.experts and replace(model.experts, balance_loss=0.0))


IN_FLOAT64 = table(__file__, "IN_FLOAT64")


@pytest.mark.parametrize(("name", "text"), some_of(IN_FLOAT64, 3, "transformers in float64"))
def test_transformers_in_float64_agrees_to_twelve_digits(name: str, text: str, tmp_path: Path) -> None:
    pretrained(name).save_pretrained(tmp_path)
    layout = Layout.parse(f"{text},precision=fp64")
    losses, expected = (
        run_ranks("harness.expert_oracles:ours", 2, (tmp_path, _from(tmp_path), layout))[0],
        alone(tmp_path),
    )
    assert len(set(losses)) == len(losses) == len(expected)
    assert losses == pytest.approx(expected, rel=1e-12, abs=0)


SHARDED, SPLIT = {"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "enable_expert_parallel": True, "ep_size": 2}


@of_some("transformers' experts", LIBRARIES, 2)
@pytest.mark.parametrize(("text", "options"), [("dp=2,ep=2,zero=3", SHARDED), ("tp=2,ep=2", SPLIT)])
@from_table
def test_expert_parallelism_of_transformers_agrees(
    name: str, sizes: dict[str, int], text: str, options: dict[str, int], tmp_path: Path
) -> None:
    pretrained(name, vocab_size=56, **sizes).save_pretrained(tmp_path)
    model, layout = _from(tmp_path), Layout.parse(f"{text},precision=fp32")
    mine = run_ranks("harness.expert_oracles:ours", 2, (tmp_path, model, layout))
    theirs = run_ranks("harness.expert_oracles:theirs", 2, (tmp_path, options))
    assert mine[0] == mine[1] and len(set(mine[0])) == len(mine[0])
    assert mine[0] == pytest.approx(theirs[0], rel=1e-5, abs=0)


def test_the_oracle_would_notice_other_data() -> None:
    case = point(model="llama", dp=2, zero=3).case
    oracle = run_ranks("harness.oracles:fsdp", 2, case)[0]
    other = Layout.parse("tp=2,micro=2,precision=fp64")
    shuffled = type(case)(MODELS["llama"], Workload(SEQ, 2), "fp64", ignore="none")
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(shuffled, other, train(shuffled, other, against=oracle, memory=False), oracle)
