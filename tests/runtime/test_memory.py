"""Memory of activations that matter: longer sequences, several to a micro-batch, every recompute mode.

The classes are exact and the peak is within 5%; what each mode costs in time is printed beside what it saves.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness import summary
from harness.checks import assert_ledger, assert_memory, train
from harness.reference import Case, Outcome
from harness.space import MODELS
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.predict.memory.step import predict_bytes

SEQ = 128
LLAMA = MODELS["llama"].replace(name="llama", hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
GPT = MODELS["gpt2"].replace(name="gpt2", hidden=64, head_dim=16, ffn=256, vocab=211, max_positions=256)
QWEN3 = MODELS["qwen3"].replace(name="qwen3", hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
OLMO2 = MODELS["olmo2"].replace(hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
GEMMA2 = MODELS["gemma2"].replace(hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256, window=50)
GRIDS = (
    (OLMO2, "tp=2,micro=4,precision=fp32", 4),
    (GEMMA2, "dp=2,zero=3,micro=4", 8),
    (LLAMA, "tp=2,sp,micro=4", 4),
    (GPT, "dp=2,zero=3,micro=4", 8),
    (QWEN3, "tp=2,micro=8", 8),
    (LLAMA, "dp=2,zero=1,micro=4,precision=fp64", 16),
    (GPT, "tp=2,sp,micro=6,precision=fp32", 6),
    (LLAMA, "dp=2,tp=2,zero=2,sp,micro=4,precision=fp32", 8),
)
RECOMPUTE = ("none", "selective", "full", "input")
KINDS = tuple(product(RECOMPUTE, ("sdpa", "math"), (False, True)))
LAYOUTS = [(*GRIDS[i % len(GRIDS)], *kind) for i, kind in enumerate(KINDS)]
LAYOUTS += [(*GRIDS[(i + 3) % len(GRIDS)], *kind) for i, kind in enumerate(KINDS) if i % 2]


def build(
    model: ModelConfig, text: str, batch: int, recompute: str, attention: str, documents: bool
) -> tuple[Case, Layout]:
    layout = Layout.parse(f"{text},recompute={recompute},attention={attention}")
    return Case(model, Workload(SEQ, batch, documents), layout.precision, attention), layout


def name(value: object) -> str:
    return value.name if isinstance(value, ModelConfig) else {True: "documents", False: "plain"}.get(value, str(value))  # type: ignore[call-overload]


@pytest.mark.parametrize(("model", "text", "batch", "recompute", "attention", "documents"), LAYOUTS, ids=name)
def test_memory(model: ModelConfig, text: str, batch: int, recompute: str, attention: str, documents: bool) -> None:
    case, layout = build(model, text, batch, recompute, attention, documents)
    ranks = train(replace(case, steps=2), layout, against=blank(model))
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_what_recompute_saves_and_costs(attention: str, record_property: Callable[[str, Any], None]) -> None:
    saved = {}
    for recompute in RECOMPUTE:
        case, layout = build(LLAMA, "dp=2,zero=2,micro=8,precision=fp32", 16, recompute, attention, False)
        ranks = train(replace(case, steps=5), layout, against=blank(LLAMA))
        held, predicted = ranks[0].role.bytes, predict_bytes(unit_plan(LLAMA, layout, case.workload))
        saved[recompute] = held.saved
        summary.add(
            record_property,
            "recompute: memory and time of a step (2 blocks, 1,024 tokens, 2 ranks)",
            ("attention", "recompute", "saved", "peak", "predicted peak", "seconds a step"),
            (attention, recompute, f"{held.saved:,}", f"{held.total:,}", f"{predicted.total:,}",
             f"{max(r.seconds for r in ranks):.4f}"),
        )  # fmt: skip
    # Fused attention of short sequences saves nothing that the rest of the block does not.
    assert saved["none"] > saved["selective"] if attention == "math" else saved["none"] == saved["selective"]
    assert saved["selective"] > saved["full"] > saved["input"]


def blank(model: ModelConfig) -> Outcome:
    """No reference: distances are to zero, and nobody reads them."""
    import torch

    from shardwise.model.parameters import parameters

    zeros = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in parameters(model)}
    return Outcome([], [], zeros, zeros)
