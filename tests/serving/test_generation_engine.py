"""The engine against `transformers`: the logits of every token, and greedy answers, under every strategy.

Sixteen requests of different lengths arrive at different turns; prompts come in chunks, pages are few enough that
sequences are computed again, some prompts begin alike, and one request is cancelled.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.answers import CLOSE, check, requests
from harness.cases import from_table, table
from harness.generation import generated, job_of, some_cases
from harness.huggingface import STEPS, pretrained
from harness.pool import run_ranks
from harness.today import some_of
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface import export
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import TP
from shardwise.layout.experts import across_axes, expert_share
from shardwise.model import ModelConfig
from shardwise.model.config import Experts
from shardwise.ops.generate_experts import own_pairs
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Command, Finished, Request, Sampling, Token

MODELS: dict[str, tuple[str, dict[str, Any]]] = table(__file__, "MODELS")
MODELS_ROUTED: dict[str, tuple[str, dict[str, Any]]] = table(__file__, "MODELS_ROUTED")
"""Name -> family, changes of its configuration; with experts."""
LAYOUTS = [
    "dp=1", "tp=2", "tp=4", "pp=2", "pp=3", "tp=2,pp=2", "dp=2,zero=3", "dp=4,zero=3", "dp=2", "dp=2,tp=2,zero=3",
    "dp=2,pp=2", "pp=3,stages=0/3/0", "cp=2", "cp=4", "tp=2,cp=2", "cp=2,pp=2", "dp=2,cp=2",
]  # fmt: skip

LAYOUTS_ROUTED = [
    "dp=1", "tp=2", "pp=2", "tp=2,ep=2", "tp=4,ep=2", "tp=2,etp=1", "dp=2,ep=2", "dp=4,ep=4", "dp=4,ep=2",
    "dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2,etp=2", "dp=2,pp=2,ep=2", "dp=2,zero=3", "dp=2,tp=2,zero=3,etp=1",
    "cp=2", "cp=2,ep=2", "tp=2,cp=2,ep=2",
]  # fmt: skip

STAGED = ["tp=2", "pp=2", "tp=2,pp=2", "dp=2,zero=3", "cp=2"]


@cache
def model_of(name: str) -> Any:
    family, changes = (MODELS | MODELS_ROUTED)[name]
    return pretrained(family, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> folder with the weights of its model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(name: str) -> Path:
        model_of(name).save_pretrained(root / name)
        return root / name

    return folder


DRAWN = [*some_cases(MODELS, LAYOUTS, 10), *some_cases(MODELS_ROUTED, LAYOUTS_ROUTED, 7)]


@pytest.mark.parametrize(("name", "layout", "index"), DRAWN, ids=str)
def test_logits_and_answers(folders: Any, name: str, layout: str, index: int) -> None:
    job = job_of(
        folders(name), layout, context=40, pages=[16, 64][index % 2], chunk=[5, 16][index // 2 % 2],
        batch=[8, 16][index // 3 % 2], reuse=index % 3 != 0, transport=["shared", "gloo"][index % 5 == 1],
    )  # fmt: skip
    asked = requests(16, random.Random(index), job.replicas)
    ranks = generated(job, asked)
    check(model_of(name), asked, ranks, job.reuse)
    if name in MODELS_ROUTED:
        assert all(rank.read < 1.3 * rank.share for rank in ranks), "a rank has read the weights of others"


@pytest.mark.parametrize("layout", some_of(STAGED, 1, "staged generation"))
def test_ranks_that_share_a_gpu(folders: Any, layout: str) -> None:
    """Tensors go through the host's memory, which is forced on CPU tensors here."""
    job = job_of(folders("llama"), layout, context=40, pages=64)
    asked = requests(8, random.Random(layout), job.replicas)
    check(model_of("llama"), asked, generated(job, asked, staged=True), job.reuse)


@pytest.mark.parametrize(("name", "layout", "page", "chunk"), [("gemma2", "cp=2", 8, 16), ("llama", "cp=4", 4, 5)])
def test_a_cache_cut_over_context_parallel_ranks(folders: Any, name: str, layout: str, page: int, chunk: int) -> None:
    """Several slots of a page per rank and one; prompts shorter and longer than a page; chunks of a single token beside
    sequences that continue; windows shorter than a page."""
    job = job_of(folders(name), layout, context=40, page=page, chunk=chunk)
    asked = requests(16, random.Random(2), 1)
    check(model_of(name), asked, generated(job, asked), True)


@pytest.mark.parametrize("layout", ["dp=1", "pp=2"])
def test_sequences_that_gave_their_pages_back_are_computed_again(folders: Any, layout: str) -> None:
    job = job_of(folders("llama"), layout, context=40, pages=12, chunk=16, batch=6, reuse=False)
    asked: dict[int, dict[int, list[Command]]] = {
        0: {0: [Request(n, (n, 2, 3), Sampling(max_tokens=20)) for n in range(11, 16)]}
    }
    ranks = generated(job, asked)
    assert ranks[0].preempted
    check(model_of("llama"), asked, ranks, reuse=False)


@pytest.mark.parametrize("layout", some_of(["dp=1", "tp=2", "pp=2", "cp=2", "dp=2,zero=3"], 2, "scored prompts"))
def test_prompts_are_scored(folders: Any, layout: str) -> None:
    """Prompts that begin alike, in chunks, beside others that are not scored and sequences that are computed again."""
    job = job_of(folders("llama"), layout, context=40, pages=12, chunk=5, batch=4)
    scored = {n: Sampling(max_tokens=n % 3, prompt_logprobs=True, top_logprobs=n % 4) for n in range(1, 6)}
    others = {n: Sampling(max_tokens=9) for n in range(6, 9)}
    prompts = {n: (*range(2, 12), n, *range(n)) for n in (*scored, *others)}
    listed = [Request(n, prompts[n], sampling) for n, sampling in (scored | others).items()]
    asked: dict[int, dict[int, list[Command]]] = {0: {0: [*listed[:2], *listed[5:]], 2: [*listed[2:5]]}}
    ranks = generated(job, asked, score=False)
    told = [answer for answer in ranks[0].answers if isinstance(answer, Token) and answer.prompt]
    for number, sampling in scored.items():
        answers = [answer for answer in told if answer.id == number]
        assert tuple(answer.token for answer in answers) == prompts[number][1:]
        with torch.no_grad():
            expected = model_of("llama")(torch.tensor([prompts[number]])).logits[0].double().log_softmax(-1)
        for row, answer in zip(expected, answers, strict=False):
            assert abs(answer.logprob - float(row[answer.token])) < CLOSE
            values, likeliest = row.topk(sampling.top_logprobs)
            assert [token for token, _ in answer.top] == likeliest.tolist()
            assert torch.allclose(torch.tensor([value for _, value in answer.top]).double(), values, atol=CLOSE)
        finished = next(answer for answer in ranks[0].answers if isinstance(answer, Finished) and answer.id == number)
        assert finished.reason == "length"
    assert {answer.id for answer in told} == set(scored) and ranks[0].used == 0


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "pp=2", "cp=2"])
def test_one_request_alone(folders: Any, layout: str) -> None:
    job = job_of(folders("llama"), layout, chunk=3)
    asked = requests(1, random.Random(3), job.replicas)
    check(model_of("llama"), asked, generated(job, asked), reuse=True)


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_what_was_sent_is_not_kept_for_ever(folders: Any, transport: str) -> None:
    job = job_of(folders("llama"), "pp=3", context=40, transport=transport)
    asked: dict[int, dict[int, list[Command]]] = {0: {0: [Request(1, (1, 2, 3), Sampling(max_tokens=36))], 150: []}}
    ranks = generated(job, asked)
    check(model_of("llama"), asked, ranks, reuse=False)
    # More than a hundred turns, most with a header and an activation, or with tokens for two stages.
    assert all(rank.leaving <= 18 for rank in ranks), [rank.leaving for rank in ranks]


def test_all_data_ranks_with_the_same_prompts(folders: Any) -> None:
    job = job_of(folders("qwen3"), "dp=2,zero=3", prompts="same")
    assert job.replicas == 1
    asked = requests(4, random.Random(4), 1)
    ranks = generated(job, asked)
    assert ranks[0].answers == ranks[1].answers
    check(model_of("qwen3"), asked, ranks, reuse=True)


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3", "pp=2"])
def test_a_rank_reads_its_own_share_and_no_gradients_exist(folders: Any, layout: str) -> None:
    for rank in generated(job_of(folders("llama"), layout), {0: {}, 1: {}}):
        assert rank.read < 1.3 * rank.share


def test_seeds_decide_what_is_drawn_whatever_the_layout_and_whatever_else_is_served(folders: Any) -> None:
    answers: list[dict[int, list[int]]] = []
    for layout, seeds in (("dp=1", (1, 2, 1, 3)), ("tp=2", (1, 2)), ("pp=2", (1, 2, 3)), ("cp=2", (1, 2))):
        first: list[Command] = [
            Request(number, (3, 1, 2), Sampling(max_tokens=20, temperature=1.0, top_p=0.95, seed=chosen))
            for number, chosen in enumerate(seeds)
        ]
        ranks = generated(job_of(folders("llama"), layout), {0: {0: first}})
        found: dict[int, list[int]] = {number: [] for number in range(len(seeds))}
        for answer in ranks[0].answers:
            if isinstance(answer, Token):
                found[answer.id].append(answer.token)
        answers.append(found)
    one, two, three, four = answers
    assert one[0] == one[2] == two[0] == three[0] and one[1] == two[1] == three[1] != one[0] and one[3] == three[2]
    assert (four[0], four[1]) == (one[0], one[1])
    assert len({token for tokens in one.values() for token in tokens}) > 10


def test_a_checkpoint_serves_under_other_layouts_than_it_was_trained_under(folders: Any, tmp_path: Path) -> None:
    source = folders("llama")
    model, _ = weights_in(source)
    trained = Layout.parse("dp=2,tp=2,zero=3,precision=fp32")
    run_ranks("harness.huggingface:load_train_save", 4, (source, model, trained, tmp_path))
    export(Checkpoint.open(tmp_path / f"step-{STEPS}"), tmp_path / "out", dtype="float32", max_shard_bytes=10**9)
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    asked = requests(3, random.Random(5), 1)
    for layout in ("tp=4", "pp=2", "dp=1"):
        ranks = generated(job_of(tmp_path, layout, reuse=False), asked)
        check(theirs, asked, ranks, reuse=False)
        assert all(rank.read < 1.3 * rank.share for rank in ranks)


@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "pp=2", "dp=2,zero=3", "cp=2"])
def test_in_bf16_the_error_is_at_most_twice_that_of_transformers(folders: Any, layout: str) -> None:
    job = job_of(folders("qwen3"), layout, "bf16", chunk=16)
    asked = requests(4, random.Random(6), job.replicas)
    ranks = generated(job, asked)
    exact, rounded = model_of("qwen3"), copy.deepcopy(model_of("qwen3")).bfloat16()
    ours, theirs = [], []
    for request in (each for turns in asked.values() for turn in turns.values() for each in turn):
        assert isinstance(request, Request)
        ids = torch.tensor([request.prompt])
        with torch.no_grad():
            right, near = exact(ids).logits[0], rounded(ids).logits[0]
        for rank in ranks:
            for place, row in rank.logits.get(request.id, {}).items():
                if place < len(request.prompt):
                    ours.append((row - right[place]).norm())
                    theirs.append((near[place] - right[place]).norm())
    assert len(ours) > 20
    assert torch.stack(ours).norm() < 2 * torch.stack(theirs).norm()


# -- Generation with experts under every way to split them


MIXED = ModelConfig(
    "mixed", vocab=53, hidden=24, layers=3, heads=4, kv_heads=2, ffn=42, max_positions=64,
    experts=Experts(8, 3, 14, dense_layers=1),
)  # fmt: skip


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS_ROUTED if "ep" in layout or "etp" in layout])
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


@pytest.mark.parametrize("layout", some_of(["dp=2,ep=2", "dp=2,pp=2,ep=2", "dp=2,tp=2,ep=4"], 1, "an idle replica"))
def test_a_replica_without_requests_serves_the_experts_of_others(folders: Any, layout: str) -> None:
    job = job_of(folders("deepseek_v3"), layout, chunk=3)
    asked: dict[int, dict[int, list[Command]]] = {0: {}, 1: {2: [Request(7, (1, 2, 3, 4), Sampling(max_tokens=6))]}}
    check(model_of("deepseek_v3"), asked, generated(job, asked), reuse=True)


@pytest.mark.parametrize(("precision", "quantize"), [("bf16", "none"), ("bf16", "int8"), ("fp32", "int8")])
def test_narrow_weights(folders: Any, precision: str, quantize: str) -> None:
    """Expected are errors of a rounding: of each weight by at most 1/254 of its row's largest, or of bf16's."""
    job = job_of(folders("qwen3_moe"), "tp=2,ep=2", precision, quantize=quantize)
    prompt = tuple(range(1, 13))
    asked: dict[int, dict[int, list[Command]]] = {0: {0: [Request(1, prompt, Sampling(max_tokens=1))]}}
    ranks = generated(job, asked)
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
