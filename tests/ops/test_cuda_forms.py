"""Forms of CUDA on the CPU, in float64: outputs and gradients of the plain modules.

torch's backward of a fused RMSNorm exists on CUDA alone: the decoder's own takes its place here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.blocks import MODEL, MODELS, assert_same_steps, batch_of, flat_block, random
from shardwise.decoder.attention import MultiHeadLatentAttention, Rope, rotate
from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.modules import Batch, RMSNorm, rms_norm_backward
from shardwise.model import ModelConfig
from shardwise.ops import limits
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cuda import cross_entropy, halves, norm
from shardwise.ops.cuda.launch import FusedOps, Stored
from shardwise.ops.cuda.products import Chooser, Matrix
from shardwise.ops.cuda.rotary import rotate_into
from shardwise.ops.fusion import LLAMA_HALVES
from shardwise.ops.gradients import WeightGradients
from shardwise.ops.recompute import recompute
from shardwise.ops.table import TABLE, lower
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.tensor.loss import IGNORED, summed_cross_entropy
from shardwise.runtime.zero import optimizer
from shardwise.runtime.zero.optimizer import Optimizer
from shardwise.runtime.zero.update import update

CUDA = Options("train", "cuda")


@pytest.fixture(autouse=True)
def plain_norm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def backward(dy: Tensor, x: Tensor, rstd: Tensor, module: RMSNorm) -> tuple[Tensor, Tensor]:
        return rms_norm_backward(dy, x, rstd, module.weight)

    monkeypatch.setattr(norm, "norm_backward", backward)
    monkeypatch.setattr(halves, "norm_backward", backward)
    yield


def lowered(model: ModelConfig) -> tuple[LlamaBlock, WeightGradients]:
    return flat_block(model, Options("train", "cuda", fused=LLAMA_HALVES), lower)


def test_the_table_has_the_forms_for_cuda_alone() -> None:
    own = {row.kind.__name__ for row in TABLE if row.device == "cuda" and row.mode == "train"}
    assert own == {"RMSNorm", "Rope", "LlamaBlock"}
    block, _ = lowered(MODEL)
    assert "cuda" in block.forward.__module__ or "llama_halves" in block.forward.__module__


@pytest.mark.parametrize("width", [6, 4])
@pytest.mark.parametrize("back", [False, True])
def test_rotation(width: int, back: bool) -> None:
    x, angles = random(2, 5, 3, width), random(2, 5, 1, width // 2, seed=1)
    tables = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    out = torch.empty_like(x)
    rotate_into(out, x, tables, back)
    assert torch.equal(out, rotate(x.clone(), tables, back))


@pytest.mark.parametrize(("rotated", "first"), [(1.0, 0), (0.5, 0), (0.5, 2)])
def test_rotary_module(rotated: float, first: int) -> None:
    plain = Rope(MODEL.replace(head_dim=8, rotary_fraction=rotated))
    form = Rope(MODEL.replace(head_dim=8, rotary_fraction=rotated))
    lower(form, OpContext("x", CUDA))
    assert "forward" in vars(form)
    x, grad = random(2, 5, 3, 8), random(2, 5, 3, 8, seed=1)
    tables = plain.whole(torch.arange(5).expand(2, 5), torch.float64)
    mine, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = form(mine, tables, first), plain(right, tables, first)
    assert torch.equal(out, expected)
    out.backward(grad)
    expected.backward(grad)
    assert torch.equal(mine.grad, right.grad)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_module(zero_centered: bool) -> None:
    plain, form = (RMSNorm(12, 1e-5, zero_centered).double() for _ in range(2))
    plain.weight.data = form.weight.data = random(12)
    lower(form, OpContext("x", CUDA))
    assert ("forward" in vars(form)) is not zero_centered
    x, grad = random(2, 5, 12, seed=1), random(2, 5, 12, seed=2)
    mine, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = form(mine), plain(right)
    torch.testing.assert_close(out, expected)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(mine.grad, right.grad)
    torch.testing.assert_close(form.weight.grad, plain.weight.grad)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.integers(1, 12), MODELS, st.booleans(), st.booleans())
def test_blocks(count: int, seq: int, model: ModelConfig, later: bool, recomputed: bool) -> None:
    form, weights = lowered(model)

    def run(x: Tensor, batch: Batch) -> Tensor:
        return recompute(lambda x: form(x, batch), x) if recomputed else form(x, batch)

    assert_same_steps(form, weights, model, (count, seq), later, run)


def test_a_block_computed_again_leaves_out_its_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    form, _ = lowered(MODEL)
    calls: list[int] = []
    forward = halves.CudaHalves.project_down

    def counted(self: Any, product: Tensor, residual: Tensor) -> Tensor:
        out = forward(self, product, residual)
        calls.append(out.untyped_storage().nbytes())
        return out

    monkeypatch.setattr(halves.CudaHalves, "project_down", counted)
    x = random(2, 5, MODEL.hidden).requires_grad_()
    recompute(lambda x: form(x, batch_of(2, 5)), x).sum().backward()
    assert calls == [x.nbytes, x.element_size()]


class _Alone:
    def size(self, axes: Any) -> int:
        return 1


def loss_and_gradient(logits: Tensor, targets: Tensor, form: cross_entropy.LossForm | None) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = summed_cross_entropy(leaf * 1, targets, 0, logits.shape[-1], _Alone(), form=form)  # type: ignore[arg-type]
    (loss / 7).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("form", [cross_entropy.BLOCKS, cross_entropy.ONE_PASS], ids=["blocks", "kernels"])
@pytest.mark.parametrize("bytes_at_once", [1, 8 * 31 * 4, 1 << 20])
def test_loss(form: cross_entropy.LossForm, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOSS_BYTES", bytes_at_once)
    logits, targets = 9 * random(2, 5, 31), torch.arange(10).view(2, 5)
    targets[1, 2] = IGNORED
    loss, grad = loss_and_gradient(logits, targets, form)
    right = logits.clone().requires_grad_()
    expected = F.cross_entropy(right.flatten(0, 1), targets.flatten(), reduction="sum")
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, right.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", [cross_entropy.BLOCKS, None], ids=["form", "CPU"])
def test_loss_in_bf16_rounds_once_or_twice(form: cross_entropy.LossForm | None) -> None:
    logits, targets = (4 * random(1, 64, 300)).bfloat16(), torch.arange(64)[None]
    loss, grad = loss_and_gradient(logits, targets, form)
    right = logits.float().requires_grad_()
    expected = F.cross_entropy(right.flatten(0, 1), targets.flatten(), reduction="sum")
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert right.grad is not None
    torch.testing.assert_close(grad.float(), right.grad, rtol=2**-7, atol=1e-9)


def test_a_divisor_in_the_update_clips_as_a_product_before_it() -> None:
    config = OptimizerConfig(lr=1e-2)
    once = [random(40, seed=seed, dtype=torch.float32).abs() for seed in range(4)]
    twice = [tensor.clone() for tensor in once]
    once[1].mul_(0.25)
    update("adamw", once, torch.ones(()), config, 1e-2, True)
    update("adamw", twice, torch.ones(()), config, 1e-2, True, torch.tensor(4.0))
    for got, expected in zip(twice, once, strict=True):
        torch.testing.assert_close(got, expected)


def test_an_infinite_norm_divides_by_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a product with clipping's 0 does: finite gradients become 0, infinite ones NaN."""
    updater = Optimizer.__new__(Optimizer)
    updater.kind, updater._divisor = "adamw", torch.ones(())
    monkeypatch.setattr(optimizer, "divides", lambda kind, gradient: True)
    divisor = updater._clip(torch.ones(1), 0.0)
    assert divisor is not None and (torch.tensor([1.0, torch.inf]) / divisor).tolist() == pytest.approx(
        [0.0, float("nan")], nan_ok=True
    )


def test_products_of_a_decode_step_are_timed_with_what_is_around_them() -> None:
    weight, around, seen = torch.randn(6, 4), FusedOps(torch.ones(4), 1e-5, gate=1), []
    matrix = Matrix(Stored(weight, None, None), torch.float32, Chooser(kernels=False))
    matrix.before = lambda: around
    matrix.with_ops = lambda x, ops, tile: seen.append((ops, tile)) or x  # type: ignore[method-assign]
    Chooser._pass([matrix], torch.randn(1, 4), None)
    assert seen and all(ops is around and tile is None for ops, tile in seen)


def test_latent_attention_takes_the_forms() -> None:
    from shardwise.model.catalog import get

    model = get("tiny-deepseek").replace(attention_dropout=0.0, dropout=0.0)
    plain, form = (MultiHeadLatentAttention(model, "a").double() for _ in range(2))
    for seed, (one, other) in enumerate(zip(plain.parameters(), form.parameters(), strict=True)):
        one.data = random(*one.shape, seed=seed) / 3
        other.data = one.data.clone()
    for module in form.modules():
        if type(module) in (RMSNorm, Rope):
            lower(module, OpContext("x", CUDA))
    x = random(2, 6, model.hidden)
    torch.testing.assert_close(form(x, batch_of(2, 6)), plain(x, batch_of(2, 6)))
