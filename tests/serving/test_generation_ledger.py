"""The ledger that the engine observes in each turn is the one that was predicted, row by row, for every strategy."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from harness.pool import run_ranks
from harness.today import EVERYTHING
from harness.turn_jobs import Followed, Script, Seen
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import DP, PP, TP
from shardwise.layout.experts import across_axes, experts_across
from shardwise.layout.gathers import generating_uses, slot_elements
from shardwise.layout.serving import lockstep_axes, replicas_in_step
from shardwise.layout.unit import Gather
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention
from shardwise.ops.cpu.products import FbgemmInt8
from shardwise.predict.memory.serving import ServingSetup, page_bytes, passing_bytes, weight_bytes
from shardwise.predict.traffic.serving import ForwardPass, Routed, mixtures_of, steady_gathers, turn_ledger
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow
from shardwise.serving.messages import Cancel, Command, Request, Sampling

LLAMA = ModelConfig("m", vocab=53, hidden=24, layers=4, heads=4, kv_heads=2, ffn=42, max_positions=64)
TIED = LLAMA.replace(name="tied", tied=True, layers=3)
GPT = ModelConfig(
    "g", vocab=53, hidden=24, layers=2, heads=4, ffn=40, max_positions=64, norm="layernorm", positions="learned",
    activation="gelu", gated=False, bias="all", tied=True,
)  # fmt: skip
OLMO2 = LLAMA.replace(name="o", norm_placement="post", qk_norm=True, qk_norm_scope="all heads")
GEMMA2 = TIED.replace(
    name="g2", activation="gelu_tanh", norm_placement="both", norm_zero_centered=True, score_softcap=2.0,
    logit_softcap=3.0, window=5, full_attention_every=2, scaled_embedding=True,
)  # fmt: skip
LATENT = ModelConfig(
    "mla", vocab=53, hidden=24, layers=2, heads=4, ffn=42, max_positions=64,
    latent_attention=LatentAttention(q_rank=11, kv_rank=9, nope_head_dim=5, rope_head_dim=4, v_head_dim=3),
)  # fmt: skip

MIXED = LLAMA.replace(
    name="mixed", experts=Experts(4, 2, 10, shared=1, dense_layers=1, router_bias=True, scoring="sigmoid")
)

CASES = [
    ("tp=2", LLAMA), ("tp=4", TIED), ("dp=2,zero=3", LLAMA), ("dp=2,zero=3", TIED), ("dp=3,zero=3", GPT),
    ("tp=2,dp=2,zero=3", TIED), ("pp=2", LLAMA), ("pp=3", TIED), ("tp=2,pp=2", LLAMA), ("dp=2", LLAMA),
    ("dp=2,tp=2", GPT), ("dp=4,zero=3,shard=2", LLAMA), ("tp=4,precision=fp32", LLAMA), ("dp=1", LLAMA),
    ("cp=2", LLAMA), ("tp=2,cp=2", GEMMA2), ("cp=2,pp=2,precision=fp32", TIED), ("cp=4,dp=2", GPT),
    ("tp=2", OLMO2), ("tp=4", OLMO2), ("tp=2,pp=2", OLMO2), ("tp=2", GEMMA2), ("dp=2,zero=3", GEMMA2),
    ("tp=4", LATENT), ("tp=2,cp=2", LATENT), ("dp=2,zero=3", LATENT), ("pp=2,precision=fp32", LATENT),
    ("tp=2", MIXED), ("tp=4,ep=2", MIXED), ("dp=2,ep=2", MIXED), ("dp=2,tp=2,ep=4", MIXED), ("dp=4,ep=2", MIXED),
    ("dp=2,tp=2,ep=2,etp=2", MIXED), ("dp=2,pp=2,ep=2", MIXED), ("dp=2,zero=3", MIXED), ("dp=2,tp=2,zero=3", MIXED),
    ("cp=2,ep=2", MIXED),
]  # fmt: skip
JOB = {"context": 32, "batch": 3, "page": 4, "chunk": 4}
SAMPLE = CASES if EVERYTHING else [CASES[i] for i in (0, 3, 5, 8, 15, 20, 24, 28, 30, 33, 35)]


def request(number: int, prompt: int, output: int) -> Request:
    return Request(number, tuple(range(1, prompt + 1)), Sampling(max_tokens=output))


def scored(number: int, prompt: int, output: int) -> Request:
    sampling = Sampling(max_tokens=output, prompt_logprobs=True, top_logprobs=number)
    return Request(number, tuple(range(1, prompt + 1)), sampling)


def asked(own: bool, replicas: int) -> dict[int, dict[int, list[Command]]]:
    """Prompts of several chunks and of one, one that comes while others are answered, one that is cancelled, and
    two that are scored."""
    first: dict[int, list[Command]] = {
        1: [request(1, 9, 4), request(2, 3, 12)],
        5: [scored(3, 5, 3)],
        7: [Cancel(2)],
        8: [scored(4, 7, 0), request(5, 2, 6)],
    }
    second: dict[int, list[Command]] = {2: [request(1, 4, 5)]}
    return {0: first, 1: second} if own and replicas > 1 else {0: first}


def turns_of(rank: int, everyone: list[list[Seen]], layout: Layout, mesh: Mesh, own: bool) -> Iterator[ForwardPass]:
    """A rank's turns as `ForwardPass`s. What the first rank of its replica heard reaches it in the turn of the same
    number."""
    axes = lockstep_axes(layout)
    first = mesh.group(TP if own and replicas_in_step(layout) > 1 else axes, mesh.group(PP, rank)[0])[0]
    for index, one in enumerate(everyone[rank]):
        earlier = index - (layout.pp - 1)
        known, known_top = (everyone[rank][earlier].rows, everyone[rank][earlier].top) if earlier >= 0 else (0, 0)
        phase = "prefill" if one.prefill else "decode"
        heard = everyone[first][index].heard
        yield ForwardPass(phase, one.tokens, one.rows, known, heard, one.top, known_top)


def without_phase(ledger: tuple[LedgerRow, ...]) -> Counter[tuple]:
    """Rows by what they move: control goes round before a rank knows which phase its turn is of."""
    rows: Counter[tuple] = Counter()
    for row in ledger:
        rows[(row.op, row.axes, row.unit, row.dtype, row.elements)] += row.count
    return rows


@pytest.mark.parametrize("prompts", ["own", "same"])
@pytest.mark.parametrize(("text", "model"), SAMPLE, ids=lambda value: value if isinstance(value, str) else value.name)
def test_every_turn_moves_what_was_predicted(text, model, prompts):
    layout = Layout.parse(text)
    if prompts == "same" and (layout.stage < 3 or layout.shard):
        return
    own = prompts == "own"
    replicas = layout.dp if own else 1
    script = Script(model, text, asked(own, replicas), JOB | {"prompts": prompts})
    told = run_ranks("harness.turn_jobs:follow", layout.ranks, script)
    for rank, one in enumerate(told):
        _check_rank(rank, [each.turns for each in told], model, layout, own)
        _check_bytes(one, unit_plan(model, layout, Workload(), rank=rank))


def routed_of(number: int, rank: int, everyone: list[list[Seen]], plan: UnitPlan) -> dict[str, Routed]:
    """Pairs of each mixture in a turn, from what all tokens have chosen."""
    if experts_across(plan.layout) == 1:
        return {}
    peers = plan.mesh.group(across_axes(plan.layout), rank)
    held = plan.model.experts.count // plan.layout.ep
    first = peers.index(rank) * held

    def taken(part: str) -> int:
        return sum(sum(everyone[peer][number].choices[part][first : first + held]) for peer in peers)

    own = everyone[rank][number].choices
    return {part: Routed(sum(own[part]), taken(part)) for part in own}


def first_gathers(plan: UnitPlan) -> tuple[Gather, ...]:
    """What the first turn gathers, which finds all slots empty."""
    first, _ = generating_uses(plan, "decode")
    return tuple(gather for use in first for gather in use.gathers) if plan.layout.stage == 3 else ()


def _check_rank(rank: int, everyone: list[list[Seen]], model: ModelConfig, layout: Layout, own: bool) -> None:
    plan, mesh = unit_plan(model, layout, Workload(), rank=rank), Mesh.of(layout, model)
    in_step = [everyone[other] for other in mesh.group(lockstep_axes(layout) + PP, rank)]
    gathered, decoded = first_gathers(plan), 0
    turns = list(turns_of(rank, everyone, layout, mesh, own))
    for number, (one, turn) in enumerate(zip(everyone[rank], turns, strict=True)):
        # Where one of the ranks in step has something to do, all gather weights.
        routed = routed_of(number, rank, everyone, plan) if one.active else {}
        predicted = turn_ledger(plan, turn, gathered if one.active else (), own, routed)
        assert not one.active or experts_across(layout) == 1 or sorted(routed) == mixtures_of(plan)
        assert one.active or not any(other[number].tokens for other in in_step)
        assert without_phase(one.ledger) == without_phase(predicted), f"rank {rank}, turn {number + 1}: {turn}"
        assert {row.phase for row in one.ledger if row.unit.startswith("blocks.") and one.tokens} <= {turn.phase}
        gathered = steady_gathers(plan) if one.active else gathered
        decoded += turn.phase == "decode" and one.tokens > 0
    assert decoded >= 3 or mesh.index(DP, rank) > 1


def _check_bytes(told: Followed, plan: UnitPlan) -> None:
    """What a rank holds is what `serving_fit` counts."""
    slots = sum(slot_elements(plan).values()) if plan.layout.stage == 3 else 0
    assert told.weights == weight_bytes(plan) and told.slots == slots * DTYPE_BYTES[plan.layout.dtype]
    assert told.cache == 3 * 32 // 4 * page_bytes(plan, 4)
    assert told.passing <= passing_bytes(plan, ServingSetup(**JOB))


@pytest.mark.parametrize(
    ("model", "split"), [(LLAMA, "tp=2"), (LATENT, "tp=2"), (MIXED, "tp=2,ep=2")], ids=["m", "mla", "mixed"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_int8_takes_the_bytes_that_were_predicted(precision, model, split):
    model, layout = model.replace(hidden=32, head_dim=0, ffn=64), Layout.parse(f"{split},precision={precision}")
    script = Script(model, str(layout), asked(True, 1), JOB | {"quantize": "int8"})
    for rank, told in enumerate(run_ranks("harness.turn_jobs:follow", layout.ranks, script)):
        plan = unit_plan(model, layout, Workload(), rank=rank)
        predicted = weight_bytes(plan, weights="int8", cpu=True)
        if precision == "fp32":
            assert told.weights == predicted
        elif FbgemmInt8.serves(torch.bfloat16, torch.device("cpu")):
            setup = ServingSetup(**JOB, weights="int8")
            assert told.weights == predicted and told.passing <= passing_bytes(plan, setup)
        else:
            assert told.weights <= predicted
