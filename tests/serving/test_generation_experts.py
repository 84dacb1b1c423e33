"""Generation with experts under every way to split them: logits and answers of Mixtral, Qwen3-MoE and DeepSeek-V2 and
V3 as `transformers` computes them."""

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.answers import check, requests
from harness.cases import from_table
from harness.generation import Script, some_cases
from harness.huggingface import pretrained
from harness.pool import run_ranks
from harness.today import some_of
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import TP
from shardwise.layout.experts import across_axes, expert_share
from shardwise.model import ModelConfig
from shardwise.model.config import Experts
from shardwise.ops.generate_experts import own_pairs
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Command, Request, Sampling

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 3, "num_local_experts": 4},
    "qwen3_moe": {"num_hidden_layers": 3, "num_experts": 8},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
"""Family -> changes of its configuration."""
MIXED = ModelConfig(
    "mixed", vocab=53, hidden=24, layers=3, heads=4, kv_heads=2, ffn=42, max_positions=64,
    experts=Experts(8, 3, 14, dense_layers=1),
)  # fmt: skip
LAYOUTS = [
    "dp=1", "tp=2", "pp=2", "tp=2,ep=2", "tp=4,ep=2", "tp=2,etp=1", "dp=2,ep=2", "dp=4,ep=4", "dp=4,ep=2",
    "dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2,etp=2", "dp=2,pp=2,ep=2", "dp=2,zero=3", "dp=2,tp=2,zero=3,etp=1",
    "cp=2", "cp=2,ep=2", "tp=2,cp=2,ep=2",
]  # fmt: skip


@cache
def model_of(name: str) -> Any:
    return pretrained(name, **MODELS[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(name: str) -> Path:
        model_of(name).save_pretrained(root / name)
        return root / name

    return folder


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "ep" in layout or "etp" in layout])
def test_every_pair_goes_once_to_a_rank_that_has_its_expert(layout: str) -> None:
    """Ranks of a replica divide its pairs, those that share an expert have the same ones, and weights are where the
    unit plan has them."""
    split, e = Layout.parse(layout), MIXED.experts
    assert e is not None
    mesh, chosen = Mesh.of(split, MIXED), torch.stack([torch.randperm(8)[:3] for _ in range(5)])
    boxes = {}
    for rank in range(split.ranks):
        plan = unit_plan(MIXED, split, Workload(), rank=rank)
        experts = [p for unit in plan.units for p in unit.placed if p.kind == "expert"]
        boxes[rank] = experts[0].box if experts else None
    for stage in range(split.pp):
        for replica in range(split.dp * split.cp):
            at = {"pp": stage, "dp": replica // split.cp, "cp": replica % split.cp}
            done: Counter[int] = Counter()
            for rank in mesh.group(TP, mesh.rank(**at)):
                share = expert_share(split, e.count, mesh.index(TP, rank))
                order, counts = own_pairs(chosen, share)
                done.update(order.tolist())
                owners = mesh.group(across_axes(split), rank)
                assert len(owners) == share.across and len(counts) == share.across * share.count
                starts = counts.cumsum(0) - counts
                for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
                    (first, last), *_ = boxes[owners[number // share.count]]
                    expert = first // MIXED.hidden + number % share.count
                    assert last - first == share.count * MIXED.hidden
                    assert (chosen.flatten()[order[start : start + count]] == expert).all()
            assert done == dict.fromkeys(range(chosen.numel()), split.expert_tp)


@pytest.mark.parametrize(("name", "layout", "index"), some_cases(MODELS, LAYOUTS, 7), ids=lambda value: str(value))
def test_logits_and_answers(folders: Any, name: str, layout: str, index: int) -> None:
    folder = folders(name)
    job = ServingJob(
        weights_in(folder)[0], Layout.parse(f"{layout},precision=fp32"), str(folder), context=40, page=4,
        pages=[16, 64][index % 2], chunk=[5, 16][index // 2 % 2], batch=[8, 16][index // 3 % 2], reuse=index % 3 != 0,
        transport=["shared", "gloo"][index % 5 == 1],
    )  # fmt: skip
    asked = requests(16, random.Random(index), job.replicas)
    ranks = run_ranks("harness.generation:generate", job.layout.ranks, Script(job, asked))
    check(model_of(name), asked, ranks, job.reuse)
    assert all(rank.read < 1.3 * rank.share for rank in ranks), "a rank has read the weights of others"


@pytest.mark.parametrize("layout", some_of(["dp=2,ep=2", "dp=2,pp=2,ep=2", "dp=2,tp=2,ep=4"], 1, "an idle replica"))
def test_a_replica_without_requests_serves_the_experts_of_others(folders: Any, layout: str) -> None:
    folder = folders("deepseek_v3")
    job = ServingJob(weights_in(folder)[0], Layout.parse(f"{layout},precision=fp32"), str(folder), page=4, chunk=3)
    asked: dict[int, dict[int, list[Command]]] = {0: {}, 1: {2: [Request(7, (1, 2, 3, 4), Sampling(max_tokens=6))]}}
    ranks = run_ranks("harness.generation:generate", job.layout.ranks, Script(job, asked))
    check(model_of("deepseek_v3"), asked, ranks, reuse=True)


@pytest.mark.parametrize(("precision", "quantize"), [("bf16", "none"), ("bf16", "int8"), ("fp32", "int8")])
def test_narrow_weights(folders: Any, precision: str, quantize: str) -> None:
    """Expected are errors of a rounding: of each weight by at most 1/254 of its row's largest, or of bf16's."""
    folder = folders("qwen3_moe")
    job = ServingJob(
        weights_in(folder)[0], Layout.parse(f"tp=2,ep=2,precision={precision}"), str(folder), page=4, quantize=quantize
    )
    prompt = tuple(range(1, 13))
    asked: dict[int, dict[int, list[Command]]] = {0: {0: [Request(1, prompt, Sampling(max_tokens=1))]}}
    ranks = run_ranks("harness.generation:generate", 2, Script(job, asked))
    with torch.no_grad():
        expected = model_of("qwen3_moe")(torch.tensor([prompt])).logits[0]
    found = torch.stack([ranks[0].logits[1][place].float() for place in range(len(prompt))])
    # A router's close choice may fall differently: so does a token's whole feed-forward part then.
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.1 and errors.min() > 0


@from_table
def test_splits_of_experts_that_generation_has_not(layout: str, words: str) -> None:
    model = MIXED.replace(experts=Experts(12, 3, 14))
    if not words:
        ServingJob(model, Layout.parse(layout), "nowhere")
        return
    with pytest.raises(UserError, match=words) as error:
        ServingJob(model, Layout.parse(layout), "nowhere")
    assert "\n" not in str(error.value)
