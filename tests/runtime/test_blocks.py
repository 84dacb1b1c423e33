"""Blocks in two functions beside the same blocks computed module by module by autograd, in float64."""

import weakref
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.cases import from_table
from shardwise.decoder.llama import LlamaBlock
from shardwise.decoder.modules import Batch
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.fused import end_to_end
from shardwise.ops.gradients import GradSlot, WeightGradients, bind_grad_slot
from shardwise.ops.llama_halves import llama_halves
from shardwise.ops.table import install

MODEL = ModelConfig("joined", vocab=17, hidden=24, layers=1, heads=4, kv_heads=2, ffn=20, max_positions=64)


def _block(model: ModelConfig) -> LlamaBlock:
    make = torch.Generator().manual_seed(0)
    block = LlamaBlock(model, "blocks.0", 0).double()
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=make, dtype=torch.float64) / 3
    return block


def _joined(model: ModelConfig) -> tuple[LlamaBlock, WeightGradients, dict[str, GradSlot]]:
    """The same block with its weights end to end as in a flat buffer, and its gradients too."""
    block, places = _block(model), {}
    named = sorted(block.named_parameters(), key=lambda pair: pair[1].dim(), reverse=True)
    flat = torch.zeros(2, sum(p.numel() for _, p in named), dtype=torch.float64)
    at = 0
    for name, parameter in named:
        held, gradient = (row[at : at + parameter.numel()].view(parameter.shape) for row in flat)
        held.copy_(parameter.data)
        parameter.data = held
        places[name] = GradSlot(gradient)
        bind_grad_slot(parameter, places[name])
        at += parameter.numel()
    weights = WeightGradients()
    at = OpContext("blocks.0", Options("train"), "blocks.0", weights=weights)
    install(block, llama_halves(block, at))
    return block, weights, places


def _batch(batch: int, seq: int) -> Batch:
    index = torch.arange(seq).expand(batch, seq).contiguous()
    return Batch(index, index, index, None, index, index)


def _nodes(out: Tensor) -> set[str]:
    found, waiting = set(), [out.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([2, 6]),
    st.sampled_from(["none", "qkv"]),
    st.booleans(),
)
def test_outputs_and_gradients(
    batch: int, seq: int, heads: tuple[int, int], width: int, bias: str, later: bool
) -> None:
    model = MODEL.replace(heads=heads[0], kv_heads=heads[1], head_dim=width, bias=bias)
    plain, (joined, weights, places) = _block(model), _joined(model)
    for step in range(2):  # the second adds to the first
        make = torch.Generator().manual_seed(step)
        x, grad = (torch.randn(batch, seq, model.hidden, generator=make, dtype=torch.float64) for _ in range(2))
        mine, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(right, _batch(batch, seq))
        expected.backward(grad)
        out = joined(mine, _batch(batch, seq))
        assert {"_BeforeBackward", "_AfterBackward"} <= _nodes(out)
        torch.testing.assert_close(out, expected)
        if later:
            with weights.split_weight_grad() as products:
                out.backward(grad)
            assert len(products) == 4
            with torch.no_grad():
                for product in products:
                    product.add()
        else:
            out.backward(grad)
        torch.testing.assert_close(mine.grad, right.grad)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(places[name].view, parameter.grad, msg=name)


@from_table
def test_the_plan_says_which_blocks_are_fused(change: dict[str, Any], layout: str, fused: bool) -> None:
    plan = unit_plan(MODEL.replace(**change), Layout.parse(layout), Workload(8, 2))
    assert plan.fuses_blocks is fused
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
    block, weights, _ = _joined(MODEL)
    x = torch.ones(1, 3, MODEL.hidden, dtype=torch.float64).requires_grad_()
    gone = weakref.ref(x)
    with weights.split_weight_grad() as products:
        block(x, _batch(1, 3)).sum().backward()
    del x
    assert len(products) == 4
    assert gone() is None
