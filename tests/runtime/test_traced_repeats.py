"""A trace of a module without the blocks that repeat others against a trace of the whole one."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.own_modules import GPT2_PARTS, deepseek, gemma3, gpt2, llama, mixtral, token_example
from harness.today import some_of
from harness.traced_jobs import SEQ, aligned_loss, token_loss
from shardwise.model.trace import TracedStep
from shardwise.runtime.module.trace import _Tracer, trace

GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 6
FAMILIES = {
    "llama": (partial(llama, num_hidden_layers=6), None),
    "gpt2": (partial(gpt2, n_layer=7), GPT2_PARTS),
    "gemma3": (partial(gemma3, num_hidden_layers=12, layer_types=GEMMA_LAYERS), None),
    "mixtral": (partial(mixtral, num_hidden_layers=6), None),
    "deepseek": (partial(deepseek, num_hidden_layers=7), None),
}
"""Module and list of parts."""
WIDTHS = {"gemma3": 2}
"""Blocks of the group that repeats, where it is not one."""
CASES = [
    *((name, 1, recompute, "") for name in FAMILIES for recompute in ("none", "full")),
    ("llama", 2, "full", ""), ("mixtral", 1, "full", "ep=2"), ("llama", 1, "none", "cp=2"),
    ("gemma3", 1, "none", "offload_activations=cpu"),
]  # fmt: skip
"""Family, tensor-parallel degree, recomputation, cut."""


def tracer(name: str, loss: Any, mode: str) -> _Tracer:
    build, parts = FAMILIES[name]
    torch.manual_seed(0)
    return _Tracer(build(), token_example(2, SEQ), None, None, parts, loss, (mode,))


def unordered(step: TracedStep) -> TracedStep:
    stages = step.stages
    if stages is not None:
        rows = {name: tuple(sorted(getattr(stages, name), key=str)) for name in ("tensors", "peaks", "messages")}
        stages = replace(stages, **rows)
    collectives = tuple(sorted(step.collectives, key=str))
    return replace(step, saved=tuple(sorted(step.saved)), collectives=collectives, stages=stages)


@pytest.mark.parametrize("name, tp, recompute, cut", some_of(CASES, 1, "traced repeats"))
def test_a_shortened_module_has_the_trace_of_the_whole_one(name, tp, recompute, cut) -> None:
    whole = tracer(name, aligned_loss if cut == "cp=2" else token_loss, recompute)
    short = whole.shortened()
    assert short is not None and len(short.blocks) < len(whole.blocks) and short.whole.width == WIDTHS.get(name, 1)
    one, other = (each.blueprint([tp], ["bf16"], [cut]) for each in (short, whole))
    assert replace(one, trace=None) == replace(other, trace=None)
    assert replace(one.trace, steps=()) == replace(other.trace, steps=())
    for step, full in zip(one.trace.steps, other.trace.steps, strict=True):
        assert unordered(step) == unordered(full)


class Bridged(nn.Module):
    """Blocks of which later ones read what earlier ones made, as in a U-net; or which do not all do the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for place, block in enumerate(self.blocks):
            x = block(made[-1])
            if self.kind == "scaled":
                x = x * 2
            if self.kind == "bridges" and place > 3:
                x = x + made[8 - place]
            made.append(x)
        return x


@pytest.mark.parametrize("kind", ["plain", "scaled", "bridges"])
def test_blocks_with_something_between_them_are_all_traced(kind: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model(x).sum(), len(x)

    whole = _Tracer(Bridged(kind), torch.ones(2, 8), None, ["blocks.*"], None, loss)
    short = whole.shortened()
    assert (short is not None) == (kind == "plain")
    assert trace(Bridged(kind), torch.ones(2, 8), loss=loss, blocks=["blocks.*"], tp=[1]).trace.steps


def test_blocks_that_are_named_one_by_one_are_all_traced() -> None:
    module = llama(num_hidden_layers=7)
    plan = {"model.layers.3.mlp.up_proj": "column", "model.layers.3.mlp.down_proj": "row"}
    assert _Tracer(module, token_example(2, SEQ), plan, None, None, token_loss).shortened() is None
