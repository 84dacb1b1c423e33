"""Predicted memory of the CUDA forms, against a dry run that takes them on fake tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.cases import table
from harness.space import MODELS
from shardwise.decoder import modules
from shardwise.decoder.modules import RMSNorm
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.ops.context import OpContext
from shardwise.ops.cuda import halves, norm
from shardwise.ops.cuda.cross_entropy import LossForm
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.dryrun import _observe
from shardwise.runtime.pipeline import stages
from shardwise.runtime.tensor import lowering

LLAMA = MODELS["llama"].replace(hidden=96, heads=6, kv_heads=2, head_dim=16, ffn=264, layers=3)
MODEL_OF = {
    "llama": LLAMA,
    "biased": LLAMA.replace(bias="qkv"),
    "qwen3": MODELS["qwen3"].replace(hidden=96, head_dim=16, ffn=264, layers=3),
    "gpt2": MODELS["gpt2"].replace(hidden=96, head_dim=16, ffn=264, layers=3, max_positions=256),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    def forward(x: Tensor, module: RMSNorm) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=wide)

    def backward(dy: Tensor, x: Tensor, rstd: Tensor, module: RMSNorm) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(module.weight)

    def context_of(*arguments: Any) -> OpContext:
        context = plain(*arguments)
        return replace(context, options=replace(context.options, device="cuda"))

    plain = lowering.context_of
    for place in (norm, halves):
        monkeypatch.setattr(place, "norm_forward", forward)
        monkeypatch.setattr(place, "norm_backward", backward)
    monkeypatch.setattr(lowering, "context_of", context_of)
    kernels = LossForm(lambda rows, at, wide: rows.new_empty(len(rows), dtype=wide), lambda *arguments: None)
    monkeypatch.setattr(stages, "loss_form", lambda *arguments: kernels)
    modules._scalar.cache_clear()
    yield FakeTensorMode()
    modules._scalar.cache_clear()


@pytest.mark.parametrize("vocab", [1500, 60], ids=["peak in the loss", "peak in a block"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODEL_OF)
def test_saved_tensors_and_peak(name: str, recompute: str, precision: str, vocab: int, cuda: FakeTensorMode) -> None:
    layout = Layout.parse(f"micro=3,recompute={recompute},precision={precision}")
    plan = unit_plan(MODEL_OF[name].replace(vocab=vocab), layout, Workload(seq=256, batch=3), backend="nccl")
    observed, predicted = _observe(plan, 0, cuda).bytes, predict_bytes(plan)
    for kind in ("parameters", "gradients", "optimizer", "saved", "comm"):
        assert getattr(predicted, kind) == getattr(observed, kind), kind
    assert predicted.total == pytest.approx(observed.total, rel=0.002)


MEASURED = table(__file__, "MEASURED")
"""(model, tokens of a sequence, sequences, recompute, compile, peak in GB) by `benchmarks/gpu.py` on one H100, torch
2.11, 2026-11-23."""


@pytest.mark.parametrize(("name", "seq", "micro", "recompute", "compiled", "peak"), MEASURED)
def test_peaks_measured_on_a_device(
    name: str, seq: int, micro: int, recompute: str, compiled: str, peak: float
) -> None:
    layout = Layout(micro=micro, recompute=recompute, compile=compiled)
    plan = unit_plan(get(name), layout, Workload(seq=seq, batch=micro), backend="nccl")
    assert predict_bytes(plan).total == pytest.approx(peak * 1e9, rel=0.01)
