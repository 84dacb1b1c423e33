"""The traps of parallel training that give wrong numbers in silence, one section each, numbered as in tests/mutation.

Each test is an ordinary case of the harness, chosen so that the mistake would show, with an assertion that it could.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.apart import Apart, listed
from harness.apart_checks import assert_as_alone, assert_predicted, blank, trained
from harness.cases import from_table, table
from harness.checks import assert_ledger, assert_memory, assert_parity, assert_replicas_equal, judge, train
from harness.expert_jobs import plain_routing
from harness.experts import settled
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.quantized_jobs import Account
from harness.reference import Case, OneDevice, global_batch, make_batch, reference, values
from harness.resume_jobs import STEPS
from harness.space import EXPERT_MODELS, MODELS, SEQ, Point, cases, point
from harness.today import some_of
from harness.trap_jobs import plain_boundaries
from shardwise.checkpoint import Checkpoint, diff
from shardwise.decoder import Decoder
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import TP
from shardwise.layout.gathers import slot_elements
from shardwise.layout.placement import kv_heads_held, width_held
from shardwise.model.config import Experts
from shardwise.model.lora import Lora
from shardwise.model.parameters import parameters


def holds(case: Case, layout: Layout) -> list[RankOutcome]:
    """Train; parity with one device, replicas alike, ledger as predicted."""
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)
    return ranks


RESUMED = 4


def resumable(text: str, job: Callable[[Layout], tuple[str, object]]) -> list:
    layout = Layout.parse(f"{text},precision=fp64")
    function, payload = job(layout)
    return run_ranks(f"harness.resume_jobs:{function}", layout.ranks, payload)


def at(*changes: dict, count: int = 0) -> pytest.MarkDecorator:
    """A test of these points, or of `count` of them, which rotate with the date: where many take their time."""
    points = [point(**change) for change in changes]
    chosen = some_of(points, count, str(changes)) if count else points
    return pytest.mark.parametrize("point", chosen, ids=lambda p: p.id)


# -- 2: a tied embedding under ZeRO-3, with a vocabulary that the ranks do not divide


@at({"model": "gpt2", "dp": 3, "zero": 3}, {"model": "qwen3", "dp": 2, "tp": 2, "zero": 3, "sp": True, "accumulate": 2})
def test_trap_02_every_row_of_a_tied_embedding_changes(point: Point) -> None:
    table = next(p for p in parameters(point.case.model) if p.name == "embedding.tokens.weight")
    assert point.case.model.tied and table.shape[0] % point.layout.ranks
    before = values(table, torch.arange(table.numel)).view(table.shape)
    assert (reference(point.case).final[table.name] != before).all(dim=1).all()
    holds(point.case, point.layout)


# -- 3: the gradient norm counts every parameter once, and clipping binds


@at(
    {"model": "mqa", "tp": 3},
    {"model": "llama", "tp": 4, "sp": True},
    {"model": "qwen3", "dp": 2, "tp": 2, "zero": 3},
    {"model": "gpt2", "dp": 2, "tp": 2, "zero": 2, "sp": True},
    {"model": "neox", "dp": 4, "zero": 1, "shard": 2},
)
def test_trap_03_the_gradient_norm_counts_each_value_once_and_binds(point: Point) -> None:
    case = replace(point.case, optimizer=replace(point.case.optimizer, clip=0.05), steps=5)
    assert min(reference(case).norms) > 2 * case.optimizer.clip
    unclipped = reference(replace(case, optimizer=replace(case.optimizer, clip=0.0)))
    ranks = holds(case, point.layout)
    assert max(abs(a - b) for a, b in zip(ranks[0].losses, unclipped.losses, strict=True)) > 1e-4


# -- 4: unequal numbers of valid tokens, down to none on a rank


@at(
    {"model": "llama", "dp": 4, "ignore": "most"},
    {"model": "neox", "dp": 3, "zero": 2, "ignore": "most", "accumulate": 2},
    {"model": "llama", "dp": 2, "tp": 2, "sp": True, "zero": 3, "ignore": "some"},
)
def test_trap_04_the_loss_is_divided_by_all_valid_tokens(point: Point) -> None:
    ranks = holds(point.case, point.layout)
    assert all(math.isfinite(loss) for rank in ranks for loss in rank.losses)


# -- 5: the logged loss on two-dimensional grids


@pytest.mark.parametrize("order", ["pp-dp-cp-tp", "pp-tp-cp-dp"])
@pytest.mark.parametrize(("dp", "tp", "sp"), [(2, 2, False), (2, 2, True), (3, 2, True)])
def test_trap_05_every_rank_logs_the_global_loss(dp: int, tp: int, sp: bool, order: str) -> None:
    chosen = point(model="llama", dp=dp, tp=tp, sp=sp, zero=1, order=order, accumulate=2)
    expected = reference(chosen.case).losses
    assert all(abs(a - b) > 1e-6 for a, b in pairwise(expected))
    for rank in train(chosen.case, chosen.layout, memory=False):
        assert rank.losses == pytest.approx(expected, rel=1e-12)


# -- 9: vocabulary-parallel cross-entropy


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ordinary", "huge", "one shard far below", "one token far above"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trap_09_vocabulary_parallel_cross_entropy(tp: int, kind: str, device: str) -> None:
    """device: whose form computes it, here always on the CPU."""
    model = MODELS["neox"]
    generator = torch.Generator().manual_seed(tp)
    width = width_held(model.vocab, tp)
    assert tp == 1 or width * tp > model.vocab, "the last shard must be padded"
    edges = [0, model.vocab - 1, *(k * width for k in range(1, tp)), *(k * width - 1 for k in range(1, tp))]
    targets = torch.tensor([[*edges, -100, 7], [*reversed(edges), -100, -100]])
    logits = torch.randn(*targets.shape, model.vocab, dtype=torch.float64, generator=generator)
    if kind == "huge":
        logits = logits.sign() * 1e4
    elif kind == "one shard far below":
        logits[..., :width] -= 1e4
    elif kind == "one token far above":
        logits[..., model.vocab // 2] += 1e4
    expected = logits.clone().requires_grad_()
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    pieces = 2 * width if kind == "ordinary" else 1 << 20
    results = run_ranks("harness.trap_jobs:cross_entropy", tp, (Layout(tp=tp), model, logits, targets, pieces, device))
    for mine, _ in results:
        assert mine == pytest.approx(loss.item(), rel=1e-12)
    gradient = torch.cat([piece for _, piece in results], -1)
    torch.testing.assert_close(gradient, expected.grad, rtol=1e-12, atol=1e-14)


# -- 10: replicated, sharded or partial: the label of every boundary, checked against one device


def _sharded(key: str, point: Point) -> tuple[int, int] | None:
    """(dim, width) along which the boundary `key` is cut over tp; None where every rank has all of it."""
    model, tp = point.case.model, point.layout.tp
    module, _, index = key.partition("[")
    if module == "head.out" or module == "head":
        return 2, model.vocab
    if module.endswith("attention.core"):
        return 2, model.heads
    linears = {"attention.qkv": ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"),
               "mlp.gate_up": ("mlp.gate_up.gate", "mlp.gate_up.up"), "mlp.up": ("mlp.up.up",)}  # fmt: skip
    for name, parts in linears.items():
        if module.endswith(f".{name}"):
            part = parts[int(index.rstrip("]"))]
            if part.endswith((".k", ".v")):
                return (2, model.kv_width) if model.kv_heads >= tp else None
            return 2, model.q_width if part.endswith(".q") else model.ffn
    return (1, SEQ) if point.layout.sp else None


def _assemble(pieces: list[Tensor], cut: tuple[int, int] | None) -> Tensor:
    if cut is not None:
        return torch.cat(pieces, cut[0]).narrow(cut[0], 0, cut[1])
    assert all(torch.equal(piece, pieces[0]) for piece in pieces), "called replicated, but ranks differ"
    return pieces[0]


def _compared(point: Point) -> list[str]:
    wanted = ("embedding", "attention_norm", "attention.qkv", "attention.core", "attention.out", "attention",
              "mlp_norm", "mlp.gate_up", "mlp.up", "mlp.down", "mlp", "head.norm", "head", "blocks.0",
              "blocks.1")  # fmt: skip
    keys = plain_boundaries(point.case)
    replicated_kv = point.case.model.kv_heads < point.layout.tp

    def chosen(key: str) -> bool:
        module = key.partition("[")[0]
        if replicated_kv and module.endswith("attention.qkv") and not key.endswith("[0]"):
            return False  # each rank holds one of several heads: no cut, no copy
        return any(module == name or module.endswith(f".{name}") for name in wanted)

    return [key for key in keys if chosen(key)]


@at(
    {"model": "llama", "tp": 2, "micro": 2},
    {"model": "llama", "tp": 2, "sp": True, "micro": 2},
    {"model": "llama", "tp": 2, "micro": 2, "attention": "math"},
    {"model": "mqa", "tp": 3, "sp": True, "attention": "math"},
    {"model": "gpt2", "tp": 2},
    {"model": "neox", "tp": 3, "sp": True},
    {"model": "qwen3", "tp": 4},
)
def test_trap_10_no_boundary_is_a_partial_sum_in_disguise(point: Point) -> None:
    whole = plain_boundaries(point.case)
    ranks = run_ranks("harness.trap_jobs:boundaries", point.layout.ranks, (point.case, point.layout))
    # Blocks that compute in two functions around their core have no boundaries inside (`ops/llama_halves.py`).
    joined = point.id.startswith("llama") and point.layout.attention == "sdpa"
    keys = [key for key in _compared(point) if key in ranks[0]]
    assert len(keys) >= (7 if joined else 20)
    gradients = 0
    for key in keys:
        cut = _sharded(key, point)
        expected, gradient = whole[key]
        torch.testing.assert_close(
            _assemble([r[key][0] for r in ranks], cut), expected, rtol=1e-10, atol=1e-12, msg=key
        )
        if gradient is not None and all(r[key][1] is not None for r in ranks):
            mine = _assemble([r[key][1] for r in ranks], cut)
            torch.testing.assert_close(mine, gradient, rtol=1e-9, atol=1e-12, msg=f"gradient of {key}")
            gradients += 1
    assert gradients >= (6 if joined else 15)


# -- 11: replicated weights that each rank uses for its own share


@at(
    {"model": "qwen3", "tp": 2},
    {"model": "qwen3", "tp": 4, "sp": True},
    {"model": "gpt2", "tp": 2, "sp": True, "zero": 1, "dp": 2},
    {"model": "neox", "tp": 3, "sp": True},
)
def test_trap_11_norm_weights_are_summed_over_tensor_ranks(point: Point) -> None:
    ranks = holds(point.case, point.layout)
    plan = unit_plan(point.case.model, point.layout, point.case.workload)
    summed = {p.name for unit in plan.units for p in unit.placed if p.sum_over == TP}
    assert summed and all("norm" in name or name.endswith("bias") or "positions" in name for name in summed)
    for name in summed:
        assert all(any(piece[0] == name for piece in rank.pieces) for rank in ranks) or point.layout.zero


# -- 12: the bias of a row-parallel map is added once


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 6])
def test_trap_12_a_row_parallel_bias_is_added_once(tp: int, sp: bool) -> None:
    chosen = point(model="neox", tp=tp, sp=sp)
    for spec in parameters(chosen.case.model):
        if spec.name.endswith(("out.bias", "down.bias")):
            assert values(spec, torch.arange(spec.numel)).abs().min() > 0
    holds(chosen.case, chosen.layout)


@pytest.mark.parametrize("tp", [2, 4, 5])
def test_trap_12_where_outputs_are_gathered_every_rank_has_all_of_them_and_each_bias_once(tp: int) -> None:
    chosen = point(model="gpt2", tp=tp, tpkind="gathered")  # 5 divides neither heads nor widths
    holds(chosen.case, chosen.layout)


# -- 13: dropout depends on the global index, not on who draws it


@at(
    {"model": "gpt2-drop", "attention": "math", "dp": 2, "recompute": "full"},
    {"model": "gpt2-drop", "attention": "math", "tp": 2, "recompute": "selective"},
    {"model": "gpt2-drop", "attention": "math", "tp": 3, "sp": True, "recompute": "input"},
    {"model": "gpt2-drop", "attention": "math", "dp": 2, "tp": 2, "sp": True, "zero": 3, "accumulate": 2},
    {"model": "gpt2", "dp": 2, "tp": 2, "sp": True, "recompute": "full"},
)
def test_trap_13_dropout_is_the_same_under_every_layout(point: Point) -> None:
    off = replace(point.case, model=point.case.model.replace(dropout=0.0, attention_dropout=0.0))
    assert abs(reference(off).losses[0] - reference(point.case).losses[0]) > 1e-3
    holds(point.case, point.layout)


# -- 14: initial weights depend on the global index


@at({"model": "qwen2", "tp": 3}, {"model": "gpt2", "dp": 2, "tp": 2, "zero": 2}, {"model": "mqa", "tp": 6})
def test_trap_14_every_layout_starts_from_the_same_weights(point: Point) -> None:
    table = {p.name: p for p in parameters(point.case.model)}
    seen: dict[str, Tensor] = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in table.items()}
    for rank in run_ranks("harness.trap_jobs:initial", point.layout.ranks, (point.case, point.layout)):
        for name, dim, start, stop, local in rank:
            whole = values(table[name], torch.arange(table[name].numel)).view(table[name].shape)
            if dim is None:
                assert torch.equal(local, whole), name
                seen[name][:] = True
                continue
            held = stop - start
            assert torch.equal(local.narrow(dim, 0, held), whole.narrow(dim, start, held)), name
            assert not local.narrow(dim, held, local.shape[dim] - held).any(), f"padding of {name}"
            seen[name].narrow(dim, start, held)[:] = True
    assert all(mask.all() for mask in seen.values())


def test_trap_14_no_two_parameters_start_alike() -> None:
    drawn = [values(p, torch.arange(64)) for p in parameters(MODELS["llama"]) if p.numel >= 64]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


# -- 15: gradient accumulation


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_trap_15_three_micro_batches_equal_one(zero: int) -> None:
    model = MODELS["qwen2"]
    case = Case(model, Workload(SEQ, 6), "fp64")
    one, three = (Layout(dp=2, zero=zero, micro=micro, precision="fp64") for micro in (3, 1))
    assert (case.workload.micro_batches(one), case.workload.micro_batches(three)) == (1, 3)
    holds(case, one)
    ledger = holds(case, three)[0].role.ledger
    counts = {row.count for row in ledger if row.op == "reduce_scatter"}
    assert counts == {0: set(), 1: {1}, 2: {3}, 3: {3}}[zero]
    blocks = [row for row in ledger if row.phase == "backward" and row.unit == "blocks.0"]
    if zero == 0:
        assert [(row.op, row.count) for row in blocks] == [("all_reduce", 1)]
    if zero == 3:
        # The last block is still in its slot when its backward starts, the first when the next micro-batch comes to it.
        gathers = {(row.unit, row.phase): row.count for row in ledger if row.op == "all_gather_into"}
        assert gathers["blocks.0", "forward"] == 1 and gathers["blocks.0", "backward"] == 3
        assert gathers["blocks.1", "forward"] == 3 and ("blocks.1", "backward") not in gathers


# -- 16: small bf16 gradients


TINY = 2.0**-9
"""1 + 2^-9 is 1 in bf16."""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_trap_16_hundreds_of_tiny_gradients_do_not_vanish(zero: int) -> None:
    count = 256
    model = MODELS["llama"].replace(vocab=5, hidden=8, heads=2, head_dim=4, kv_heads=1, ffn=6)
    layout = Layout(dp=2, zero=zero)
    case = Case(model, Workload(2, 2 * (count + 1)), "bf16")
    for rank in run_ranks("harness.trap_jobs:tiny_gradients", 2, (case, layout, count, TINY)):
        for unit, smallest, largest in rank:
            expected = 2 * (1 + count * TINY)
            assert smallest == largest == expected, unit


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_trap_16_ranks_are_summed_in_fp32(transport: str) -> None:
    for plain, added, low in run_ranks("harness.trap_jobs:small_pieces", 4, (Layout(dp=4), transport)):
        assert plain.tolist() == [259.0] * 3
        assert added.tolist() == [260.0] * 3
        assert low.tolist() == torch.full((3,), 259.0).bfloat16().tolist()


# -- 19: races between communication and computation


@at(
    {"model": "qwen3", "dp": 2, "zero": 3, "accumulate": 2},
    {"model": "llama", "dp": 2, "zero": 3, "accumulate": 3},
    {"model": "llama", "dp": 2, "zero": 2, "accumulate": 3},
    {"model": "gpt2", "dp": 2, "tp": 2, "zero": 3, "sp": True, "recompute": "input", "accumulate": 2},
    {"model": "llama", "dp": 3, "zero": 1, "accumulate": 2},
    {"model": "mqa", "dp": 4, "zero": 3, "shard": 2, "recompute": "full"},
    {"model": "llama", "dp": 4, "zero": 3, "hpz": 2, "accumulate": 2},
    {"model": "neox", "dp": 2, "tp": 2, "accumulate": 2},
    {"model": "llama", "dp": 2, "zero": 0, "precision": "bf16", "accumulate": 2},
    count=4,
)
def test_trap_19_overlap_changes_no_bit(point: Point) -> None:
    # Embedding and head share a slot, and meet where one micro-batch follows another.
    case, layout = replace(point.case, model=point.case.model.replace(layers=3)), point.layout
    run = partial(train, case, layout, memory=False)
    plain = run(overlap=False, transport="gloo")
    if case.precision == "fp64":
        assert_parity(case, layout, plain)
    runs = [run(transport="gloo")]
    runs += [run_ranks("harness.trap_jobs:delayed", layout.ranks, (case, layout, judge(case), seed)) for seed in (1, 2)]
    for before, after in (*((plain, other) for other in runs), (run(overlap=False), run())):
        for one, other in zip(before, after, strict=True):
            assert (one.losses, one.norms, one.pieces) == (other.losses, other.norms, other.pieces)


# -- 20: uneven shards, and ranks that hold nothing


@pytest.mark.parametrize(
    "layout",
    some_of(["tp=6", "tp=6,sp", "dp=6,zero=3", "dp=3,tp=2,zero=2,sp", "dp=2,tp=3,zero=3"], 2, "fewer rows"),
    ids=str,
)
@pytest.mark.parametrize("name", ["mqa", "gpt2-drop"])
def test_trap_20_fewer_rows_than_ranks(name: str, layout: str) -> None:
    model = MODELS[name].replace(vocab=5, ffn=5, hidden=7)
    split = Layout.parse(f"{layout},attention=math,precision=fp64")
    if split.tp == 6:
        assert width_held(5, 6) * 5 >= 5, "the last rank holds no row"
    holds(Case(model, Workload(SEQ, split.dp), "fp64", "math"), split)


# -- 21: fused query/key/value and gate/up weights under another layout


SAVED = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Case, Path, list]]:
    """(model, layout) -> what it trains, its checkpoint after `SAVED` steps, and two more steps by rank."""
    folder = tmp_path_factory.mktemp("saved")

    class Runs(dict[tuple[str, str], tuple[Case, Path, list]]):
        def __missing__(self, key: tuple[str, str]) -> tuple[Case, Path, list]:
            case, own = Case(MODELS[key[0]], Workload(SEQ, 12)), folder / str(len(self))
            ranks = resumable(key[1], lambda layout: ("straight", (case, layout, str(own), SAVED, SAVED + 2)))
            self[key] = case, own / f"step-{SAVED}", ranks
            return self[key]

    return Runs()


MOVES = list(permutations(("dp=1", "tp=2,sp", "dp=4,tp=2,zero=1", "dp=3,zero=3", "dp=2,tp=2,zero=3"), 2))[::3]


@pytest.mark.parametrize(("before", "after"), some_of(MOVES, 3, "moves"))
@pytest.mark.parametrize("name", ["mqa", "gpt2"])
def test_trap_21_weights_do_not_interleave(name: str, before: str, after: str, saved: dict, tmp_path: Path) -> None:
    """Every tensor of a run that was saved under one layout is, under another, what the first one had, and in place."""
    case, path, trained = saved[name, before]
    again, home = tmp_path / "again", tmp_path / "home"
    for text, source, target in ((after, path, again), (before, again / path.name, home)):
        resumable(text, lambda layout, pair=(str(source), str(target)): ("go_on", (case, layout, [pair], SAVED)))
    assert diff(Checkpoint.open(path), Checkpoint.open(home / path.name)) == []
    # Where a piece lies, the round trip alone does not say: one device, which cuts nothing, must go on alike.
    alone = resumable("dp=1", lambda layout: ("go_on", (case, layout, [(str(again / path.name), None)], SAVED + 2)))
    assert alone[0][0].losses == pytest.approx(trained[0].losses[SAVED:], rel=1e-9, abs=0)


# -- 22: a run that goes on with another number of data-parallel ranks


@pytest.mark.parametrize(("before", "after"), [("dp=4,zero=1", "dp=2,zero=3"), ("dp=2", "dp=4,zero=2")])
def test_trap_22_eight_steps_equal_four_and_four_on_other_ranks(before: str, after: str, tmp_path: Path) -> None:
    model = MODELS["gpt2-drop"]
    case = Case(model, Workload(SEQ, 8), attention="math")
    first, second = f"{before},attention=math", f"{after},attention=math"
    ranks = resumable(first, lambda layout: ("straight", (case, layout, str(tmp_path), RESUMED, STEPS)))
    pair = (str(tmp_path / f"step-{RESUMED}"), None)
    resumed = [found[0] for found in resumable(second, lambda layout: ("go_on", (case, layout, [pair], STEPS)))]
    one = resumable("dp=1,attention=math", lambda layout: ("straight", (case, layout, None, 0, STEPS)))[0]
    for step in range(STEPS):
        # In the order of the ranks, not sorted: rank r takes the r-th run of the global batch.
        taken = [
            i
            for rank in (ranks if step < RESUMED else resumed)
            for i in rank.samples[step - (step >= RESUMED) * RESUMED]
        ]
        assert taken == list(range(step * 8, step * 8 + 8)) == one.samples[step]
    together = ranks[0].losses[:RESUMED] + resumed[0].losses
    assert together == pytest.approx(ranks[0].losses, rel=1e-9, abs=0)
    assert together == pytest.approx(one.losses, rel=1e-9, abs=0)


# -- 23: replicated key/value heads


@at(
    {"model": "mqa", "tp": 2},
    {"model": "mqa", "tp": 6, "sp": True},
    {"model": "llama", "tp": 4, "accumulate": 2},
    {"model": "qwen2", "tp": 6, "attention": "math"},
    {"model": "mqa", "dp": 2, "tp": 3, "zero": 2, "accumulate": 2},
    {"model": "qwen3", "dp": 2, "tp": 4, "zero": 3},
    count=3,
)
def test_trap_23_replicated_heads_are_summed_once(point: Point) -> None:
    model, layout = point.case.model, point.layout
    assert layout.tp > model.kv_heads and kv_heads_held(model, layout.tp) == 1
    ledger = holds(point.case, layout)[0].role.ledger
    once = point.case.workload.micro_batches(layout) if layout.stage >= 2 else 1
    axes = {row.axes for row in ledger if row.phase == "backward" and row.op == "all_reduce" and row.unit == "blocks.1"}
    assert "kv" in axes
    assert {row.count for row in ledger if row.axes == "kv"} == {once}


# -- 24: weights that autograd saved, in a buffer that is used again


@pytest.mark.parametrize("recompute", some_of(["none", "selective", "full", "input"], 2, "stale"))
@pytest.mark.parametrize(("name", "tp"), [("llama", 1), ("gpt2", 1), ("qwen3", 2)])
def test_trap_24_gathered_weights_are_not_stale(name: str, tp: int, recompute: str) -> None:
    chosen = point(model=name, dp=2, tp=tp, zero=3, recompute=recompute, accumulate=2)
    case = replace(chosen.case, model=chosen.case.model.replace(layers=5))
    plan = unit_plan(case.model, chosen.layout, case.workload)
    assert max(sum(unit.slot == slot for unit in plan.units) for slot in slot_elements(plan)) >= 3, (
        "slots must be used again"
    )
    holds(case, chosen.layout)


# -- Ways in which pipelines go silently wrong, each as a test that fails when the mistake is made (`tests/mutation`)


def case_of(layout: Layout, model: str, micro_batches: int = 4) -> Case:
    batch = layout.dp * layout.micro * micro_batches
    return Case(MODELS[model].replace(layers=4), Workload(SEQ, batch), layout.precision)


# -- 1: both ends of a pipeline that hold the tied table add up its gradients, and one of them counts in the norm


@from_table
def test_trap_01_tied_embedding_at_both_ends(text: str, model: str) -> None:
    parsed = Layout.parse(f"{text},precision=fp64")
    case = case_of(parsed, model)
    assert case.model.tied
    assert min(reference(case).norms) > case.optimizer.clip, "clipping must bind, or a wrong norm goes unnoticed"
    holds(case, parsed)


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


# -- Mistakes of context parallelism that others shipped, each a small layout in which it shows (`tests/mutation/`)


LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("model", "text", "seq", "documents"), LAYOUTS, ids=[row[1] for row in LAYOUTS])
def test_trap_25_sequences_cut_over_ranks(model: str, text: str, seq: int, documents: bool) -> None:
    layout = Layout.parse(text)
    workload = Workload(seq, 2 * layout.dp, isolate_documents=documents)
    holds(Case(MODELS[model], workload, layout.precision, layout.attention), layout)


# -- Mistakes of expert parallelism that others shipped, each a small layout in which it shows (`tests/mutation/`)


def case_of_routed(model: str, layout: Layout, seq: int, accumulate: int = 1, **changes: Any) -> Case:
    config = EXPERT_MODELS[model]
    experts = Experts(**(vars(config.experts) | changes))
    workload = Workload(seq, layout.dp * layout.micro * accumulate)
    layers = max(config.layers, layout.pp * layout.virtual)
    model_config = config.replace(layers=layers, experts=experts)
    return Case(model_config, workload, "fp64", layout.attention, pool=layout.micro)


LAYOUTS_ROUTED: list[tuple[str, str, int, int, dict[str, Any]]] = table(__file__, "LAYOUTS_ROUTED")
"""(model, layout, tokens of a sequence, micro-batches, changes of the experts)."""


@pytest.mark.parametrize(
    ("model", "text", "seq", "accumulate", "changes"), LAYOUTS_ROUTED, ids=[row[1] for row in LAYOUTS_ROUTED]
)
def test_trap_17_experts_over_ranks(model: str, text: str, seq: int, accumulate: int, changes: dict[str, Any]) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of_routed(model, layout, seq, accumulate, **changes)
    assert min(reference(case).norms) > case.optimizer.clip, "clipping binds"
    holds(case, layout)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=2,ep=2,zero=2", "tp=2,ep=2,etp=1", "dp=2,tp=2,ep=2,etp=2,zero=3"])
def test_trap_17_an_expert_without_tokens_has_a_gradient_of_zero(text: str) -> None:
    """Few tokens for eight experts: in most steps some have none, and had some the step before."""
    layout = Layout.parse(f"{text},precision=fp64")
    case = replace(case_of_routed("mixtral", layout, 3), steps=6)
    plain = plain_routing(case)
    assert any(len(set(routing.chosen.tolist())) < 8 for routing in plain.values())
    holds(case, layout)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "tp=2", "dp=2,cp=2,ep=4"])
def test_trap_17_the_losses_and_loads_that_are_reported_are_those_of_all_ranks(text: str) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    case = case_of_routed("mixtral", layout, 13, 2, balance_loss=0.5, z_loss=0.05, capacity=0.7)
    plain = plain_routing(case)
    for rank in run_ranks("harness.expert_jobs:traced", layout.ranks, Training(case, layout, judge(case))):
        for name, load in rank.loads.items():
            assert sum(load.tokens) == len(plain[name].chosen)
            assert load.dropped == int((~plain[name].takes).sum()) > 0
            assert load.auxiliary_loss == pytest.approx(plain[name].auxiliary_loss, rel=1e-9)


@pytest.mark.parametrize("saved", ["dp=2,ep=2", "dp=2,tp=2,ep=2,etp=2,zero=1"])
def test_trap_17_a_checkpoint_has_all_experts(saved: str, tmp_path: Path) -> None:
    before, folder = Layout.parse(f"{saved},precision=fp64"), tmp_path / "saved"
    case = case_of_routed("mixtral", before, 12, 2)
    payload = (case, before, str(folder), 2, 4)
    expected = run_ranks("harness.resume_jobs:straight", before.ranks, payload)[0].losses[2:]
    for text in ("dp=1", "dp=4,ep=4,zero=3"):
        after, again = Layout.parse(f"{text},precision=fp64"), tmp_path / text
        targets = [(str(folder / "step-2"), str(again))]
        for (rank,) in run_ranks("harness.resume_jobs:go_on", after.ranks, (case, after, targets, 4)):
            assert rank.losses == pytest.approx(expected, rel=1e-9, abs=0)
        assert diff(Checkpoint.open(folder / "step-2"), Checkpoint.open(again / "step-2")) == []


# -- Mistakes of replicas that train apart from each other, each with a case that would show it (tests/mutation)


CASES = [
    listed(MODELS["llama"], "dp=4,zero=1,sync=local,every=2,outer=nesterov,replicas=2,precision=fp64"),
    listed(MODELS["qwen3"], "dp=2,tp=2,zero=3,sp,sync=local,every=2,precision=fp64"),
    listed(MODELS["mqa"], "dp=2,tp=2,zero=1,sync=local,every=2,moments=average,precision=fp64"),
    listed(EXPERT_MODELS["mixtral"], "dp=4,ep=2,zero=2,sync=local,every=2,outer=nesterov,replicas=2,precision=fp64"),
]


@pytest.mark.parametrize("apart", CASES, ids=lambda a: a.id)
def test_trap_30_replicas_train_as_they_would_alone(apart: Apart) -> None:
    ranks = trained(apart)
    assert_as_alone(apart, ranks)
    assert_predicted(apart, ranks)


def test_trap_30_what_packing_loses_is_sent_later() -> None:
    apart = listed(MODELS["gpt2"], "dp=2,zero=1,sync=local,every=1,outer=nesterov,outer_bits=4,precision=fp32")
    train(apart.case, apart.layout, blank(apart.case.model))
    accounts: list[list[Account]] = run_ranks("harness.apart_jobs:accounted", apart.layout.ranks, apart)
    for account in (account for rank in accounts for account in rank):
        assert account.apart <= 1e-5 * max(account.true, account.residual), account


# -- Adapters and frozen weights that would be silently wrong, numbered as in tests/mutation


def case_of_adapted(name: str, *targets: str, alpha: float = 7.0) -> Case:
    return Case(MODELS[name].replace(lora=Lora(3, alpha, targets)), Workload(12, 4), "fp64")


def holds_adapted(case: Case, text: str) -> None:
    holds(case, Layout.parse(f"{text},precision=fp64"))


@pytest.mark.parametrize("targets", [("q", "up"), ("out", "down")])
def test_trap_35_the_whole_factor_of_a_cut_map_sees_all_ranks(targets: tuple[str, ...]) -> None:
    """Under tp each rank has a part of the gradient of A beside cut outputs, and of B beside cut inputs."""
    holds_adapted(case_of_adapted("llama", *targets), "tp=2")
    holds_adapted(case_of_adapted("llama", *targets), "tp=2,dp=2,sp,zero=3")


def test_trap_35_replicated_key_heads_have_one_adapter() -> None:
    holds_adapted(case_of_adapted("mqa", "k", "v"), "tp=3")


def test_trap_35_frozen_weights_stay() -> None:
    """Norms and biases, too, with weight decay, in one device's reference as well as over ranks."""
    case = case_of_adapted("gpt2")
    before = {p.name: values(p, torch.arange(p.numel)).view(p.shape) for p in parameters(case.model)}
    after = reference(case).final
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in after if ".lora_" in name}
    holds_adapted(case, "dp=2,zero=2")
    holds_adapted(case, "pp=2,dp=2,zero=3")


def test_trap_35_adapters_are_scaled_and_pass_gradients() -> None:
    """Against a model whose weights are W + alpha / rank · B A: its gradient of W gives those of A and B."""
    case = case_of_adapted("llama", alpha=7.0)
    device, rows = OneDevice(case), global_batch(case, 0)
    scale, merged = 7.0 / 3, Decoder(case.model.replace(lora=None)).double()
    for name, weight in merged.named_parameters():
        weight.data = device.named[name].detach().clone()
        if (a := name.replace("weight", "lora_a")) in device.named:
            weight.data += scale * device.named[a.replace("_a", "_b")].detach() @ device.named[a].detach()
    logits, targets = merged(make_batch(case, rows, 0)), rows["targets"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (targets != -100).sum()
    loss.backward()
    expected, _ = device.step(rows, 0)
    assert abs(float(loss.detach()) - expected) < 1e-12 * expected
    fresh = OneDevice(case).named
    for name, weight in merged.named_parameters():
        if (a := name.replace("weight", "lora_a")) in fresh:
            b = a.replace("_a", "_b")
            for mine, theirs in (
                (device.grads[a], scale * fresh[b].T @ weight.grad),
                (device.grads[b], scale * weight.grad @ fresh[a].T),
            ):
                assert (mine - theirs).norm() <= 1e-11 * theirs.norm() and theirs.norm() > 0, name
    holds_adapted(case, "dp=2")


# -- Mistakes of offloading that known layouts show: each trains as in memory, bit by bit, with exact bytes and rows


DENSE = table(__file__, "DENSE")


def equal(case: Case, layout: Layout) -> None:
    plain = replace(layout, offload="none", offload_params="none", offload_activations="none")
    ranks, in_memory = train(case, layout), train(case, plain, memory=False)
    bits, expected = ([(r.losses, r.norms, r.pieces) for r in each] for each in (ranks, in_memory))
    assert bits == expected
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


@pytest.mark.parametrize("text", DENSE)
def test_trap_28_no_home_changes_a_bit(text: str) -> None:
    case = point(**{"model": "llama", "dp": 2, "accumulate": 2} | DENSE[text]).case
    case = replace(case, model=case.model.replace(layers=4), precision="fp32")
    micro = DENSE[text].get("micro", 1)
    equal(case, Layout.parse(f"dp=2,micro={micro},precision=fp32,{text}"))


def test_trap_28_routers_biases_move_in_the_state_of_their_step() -> None:
    chosen = next(p for p in cases("experts") if "deepseek" in p.id and p.layout.stage == 3 and p.layout.ranks <= 4)
    case = settled(chosen.case)
    assert judge(case).losses
    equal(case, replace(chosen.layout, offload="nvme"))
