"""Blocks in two functions beside the same blocks computed module by module by autograd, in float64."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.blocks import MODEL, MODELS, assert_same_steps, batch_of, flat_block
from harness.cases import from_table
from shardwise.decoder import Decoder
from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.modules import Batch
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cpu.attention import _ShortAttention, hidden_keys, short_attention
from shardwise.ops.gradients import WeightGradients
from shardwise.ops.limits import ATTENTION_ROWS, LONGEST_SHORT, SHORTEST, sum_chunk
from shardwise.ops.linear import end_to_end
from shardwise.ops.llama_halves import llama_halves
from shardwise.ops.table import install
from shardwise.runtime.transport.buffers import Buffer, ByteCounter, Target, add_up, wide_room


def _joined(model: ModelConfig) -> tuple[LlamaBlock, WeightGradients]:
    return flat_block(model, Options("train"), lambda block, at: install(block, llama_halves(block, at)))


def _nodes(out: Tensor) -> set[str]:
    found, waiting = set(), [out.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), MODELS, st.booleans())
def test_outputs_and_gradients(batch: int, seq: int, model: ModelConfig, later: bool) -> None:
    joined, weights = _joined(model)

    def run(x: Tensor, rows: Batch) -> Tensor:
        out = joined(x, rows)
        assert {"_BeforeBackward", "_AfterBackward"} <= _nodes(out)
        return out

    assert_same_steps(joined, weights, model, (batch, seq), later, run)


@from_table
def test_the_plan_says_which_blocks_are_fused(change: dict[str, Any], layout: str, fused: bool) -> None:
    plan = unit_plan(MODEL.replace(**change), Layout.parse(layout), Workload(8, 2))
    assert bool(plan.fused) is fused
    unit = plan.by_name["blocks.0"]
    flat = torch.zeros(unit.numel)
    lie = {p.name: flat[at : at + p.numel].view(p.shape) for at, p in zip(unit.offsets, unit.placed, strict=True)}
    for maps in (["attention.qkv.q", "attention.qkv.k", "attention.qkv.v"], ["mlp.gate_up.gate", "mlp.gate_up.up"]):
        for leaf in ("weight", "bias"):
            tensors = [lie[name] for each in maps if (name := f"blocks.0.{each}.{leaf}") in lie]
            # What is in one function lies end to end; heads that several ranks hold do not.
            assert not fused or not tensors or end_to_end(tensors) is not None
    if change.get("kv_heads") == 1 and not fused:
        assert end_to_end([lie[f"blocks.0.attention.qkv.{name}.weight"] for name in "qkv"]) is None


def test_gradients_that_wait_hold_no_graph() -> None:
    """Rotary tables, the input and its gradient go with the backward pass, though the products come later."""
    block, weights = _joined(MODEL)
    x = torch.ones(1, 3, MODEL.hidden, dtype=torch.float64).requires_grad_()
    gone = weakref.ref(x)
    with weights.split_weight_grad() as products:
        block(x, batch_of(1, 3)).sum().backward()
    del x
    assert len(products) == 4
    assert gone() is None


# -- Short attention against the same in float64, and beside what torch's own kernel saves


ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
MODEL_SHORT = ModelConfig("short", vocab=17, hidden=24, layers=1, heads=4, kv_heads=2, ffn=20, max_positions=600)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 2 * ATTENTION_ROWS + 60),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.integers(1, 24),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_output_and_gradients(
    batch: int, seq: int, heads: tuple[int, int], width: int, dtype: torch.dtype, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq, each, width) for each in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, grad = (torch.randn(shape, generator=make).to(dtype).requires_grad_() for shape in shapes)
    out = _ShortAttention.apply(q, k, v, hidden_keys(seq, q.device))
    if dtype == torch.bfloat16:
        assert torch.equal(out, _fused(q, k, v))
    torch.testing.assert_close(out.double(), _fused(q.double(), k.double(), v.double()), rtol=0, atol=ERROR[dtype])
    mine = torch.autograd.grad(out, (q, k, v), grad)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(_fused(*exact), exact, grad.double())
    for got, wanted in zip(mine, right, strict=True):
        assert got.dtype == dtype
        # A single token attends to itself alone: the gradients of its query and key are zero, the difference of terms
        # as large as the gradient that came.
        assert (got - wanted).norm() <= ERROR[dtype] * max(1.0, float(wanted.norm()), float(grad.detach().norm()))


@pytest.mark.parametrize(
    ("seq", "dtype", "documents"),
    [
        (SHORTEST, torch.float32, False),
        (SHORTEST - 1, torch.float32, False),
        (LONGEST_SHORT["float32"] + 1, torch.float32, False),
        (LONGEST_SHORT["bfloat16"], torch.bfloat16, False),
        (SHORTEST, torch.bfloat16, True),
    ],
)
def test_it_is_taken_where_it_pays_and_saves_what_torch_saves_but_the_sums(
    seq: int, dtype: torch.dtype, documents: bool
) -> None:
    ids = torch.arange(seq).remainder(17)[None]
    packed = torch.zeros_like(ids) if documents else None
    batch = Batch(ids, torch.arange(seq)[None], torch.arange(seq)[None], packed, ids, ids)
    saved: list[dict[int, int]] = []
    outs, taken = [], []
    for short in (False, True):
        torch.manual_seed(0)
        decoder = Decoder(MODEL_SHORT).to(dtype)
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        if short:
            for core in (block.attention.core for block in decoder.blocks):
                install(core, short_attention(core, OpContext("", Options("train"))))
        saved.append({})

        def pack(tensor: Tensor, into: dict[int, int] = saved[-1]) -> Tensor:
            into[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            core = decoder.blocks[0].attention
            out = core(torch.randn(1, seq, 24, dtype=dtype).requires_grad_(), batch)
            outs.append(out)
        taken.append("_ShortAttention" in _names(out))
    torch.testing.assert_close(*outs, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-6)
    assert taken == [False, SHORTEST <= seq <= LONGEST_SHORT[str(dtype)[6:]] and not documents]
    sums = seq * MODEL_SHORT.heads * 4 if taken[1] else 0
    assert sum(saved[0].values()) == sum(saved[1].values()) + sums


def _names(out: Tensor) -> str:
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return " ".join(type(node).__name__ for node in seen)


# -- Buffers whose memory comes and goes: what views see, and what is counted


CPU = torch.device("cpu")


def test_views_outlive_the_memory() -> None:
    buffer = Buffer("comm", 6, torch.float32, CPU, ByteCounter())
    view = buffer.take()[2:5].view(3, 1)
    buffer.free()
    assert buffer.tensor.untyped_storage().nbytes() == 0
    buffer.take().zero_()
    view.add_(7.0)
    assert buffer.tensor.tolist() == [0, 0, 7, 7, 7, 0]


def test_only_what_is_taken_has_memory() -> None:
    buffer = Buffer("comm", 1000, torch.bfloat16, CPU, ByteCounter())
    assert len(buffer.take(10)) == 10
    assert buffer.tensor.untyped_storage().nbytes() == 20


def test_nobody_takes_what_is_in_use() -> None:
    buffer = Buffer("comm", 4, torch.float32, CPU, ByteCounter())
    buffer.free()
    buffer.take()
    with pytest.raises(AssertionError, match="in use"):
        buffer.take()


def test_users_hold_lasting_memory_one_after_the_other() -> None:
    whole, reused, tally = torch.zeros(4), [], ByteCounter()
    two, four = (Buffer("comm", n, torch.float32, CPU, tally, whole[:n], reused.append) for n in (2, 4))
    view = two.take()[1:]
    with pytest.raises(AssertionError, match="in use"):
        two.take()
    two.free()
    four.take().fill_(3.0)
    assert (two.held, four.held, view.tolist()) == (False, True, [3.0])
    assert [len(tensor) for tensor in reused] == [2, 4]
    assert tally.total == 0, "who allocated the memory counts it"


@given(st.lists(st.tuples(st.sampled_from(["gradients", "comm"]), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_the_tally_knows_the_most_of_each_class(moves: list[tuple[str, int]], restart: int) -> None:
    tally, told = ByteCounter(), []
    buffers = {
        (kind, i): Buffer(kind, i + 1, torch.float64, CPU, tally) for kind in ("gradients", "comm") for i in range(4)
    }
    tally.changed = told.append
    most: dict[str, int] = {}
    for number, key in enumerate(moves):
        if number == restart:
            tally.restart()
            most = {}
            most |= {kind: _held(buffers, kind) for kind in ("gradients", "comm")}
        buffer = buffers[key]
        buffer.free() if buffer.held else buffer.take()
        most |= {kind: max(most.get(kind, 0), _held(buffers, kind)) for kind in ("gradients", "comm")}
        assert tally.total == sum(told) == _held(buffers, "gradients") + _held(buffers, "comm")
    assert all(tally.most[kind] == size for kind, size in most.items())


def _held(buffers: dict[tuple[str, int], Buffer], kind: str) -> int:
    return sum(b.tensor.untyped_storage().nbytes() for (k, _), b in buffers.items() if k == kind)


# -- Sums of the ranks' pieces straight into their place: every precision, in chunks or not, beside a plain sum


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.sampled_from([0, 1, 7, 1000, (1 << 17) + 3]),
    st.sampled_from([(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64)]),
    st.booleans(),
    st.integers(0, 1 << 20),
)
def test_a_sum_is_rounded_once(
    ranks: int, elements: int, dtypes: tuple[torch.dtype, torch.dtype], adds: bool, seed: int
) -> None:
    """In fp32 for bf16, in the order of the pieces."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(elements, generator=generator).to(dtypes[0]) for _ in range(ranks)]
    before = torch.randn(elements, generator=generator).to(dtypes[1])
    wide = FP64 if FP64 in dtypes else FP32
    first, *rest = [*([before] if adds else []), *pieces]
    expected = first.to(wide)
    for piece in rest:
        expected = expected + piece.to(wide)
    kept = [piece.clone() for piece in pieces]
    target = Target(before.clone(), adds)
    add_up(pieces, target, wide_room(target, ranks))
    assert torch.equal(target.tensor, expected.to(dtypes[1]))
    assert all(torch.equal(piece, was) for piece, was in zip(pieces, kept, strict=True))


@pytest.mark.parametrize(
    ("ranks", "adds", "needs"), [(1, True, False), (2, False, False), (2, True, True), (3, False, True)]
)
def test_room_is_made_for_more_than_one_addition_in_bf16(ranks: int, adds: bool, needs: bool) -> None:
    elements = 1 << 18
    room = wide_room(Target(torch.empty(elements, dtype=BF16), adds), ranks)
    assert (len(room) if room is not None else 0) == needs * sum_chunk(elements)
    assert wide_room(Target(torch.empty(elements), adds), ranks) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_overwritten_may_be_the_first_piece(ranks: int, dtype: torch.dtype) -> None:
    """As this rank's own piece of a whole gradient is, at stage 1."""
    pieces = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)]
    expected = sum((piece.float() for piece in pieces), torch.zeros(1000)).to(dtype)
    target = Target(pieces[0])
    add_up(pieces, target, wide_room(target, ranks))
    assert torch.equal(pieces[0], expected)
