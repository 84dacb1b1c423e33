"""Frozen bases in fewer bits: products, gradients, pieces of a rank, and NF4 as bitsandbytes has it."""

import hashlib
import json

import pytest
import torch
import torch.nn.functional as F
from beside_bitsandbytes import RECORDED, matrix
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.decoder.bases import FrozenBase, quantized
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.adapters import stored
from shardwise.model.catalog import get
from shardwise.model.lora import BASES, Lora, scale_elements, stored_columns
from shardwise.ops import limits
from shardwise.ops.linear import narrow_input_gradient, narrow_linear
from shardwise.runtime.zero.flat_unit import BaseValues

F64 = torch.float64


@given(
    st.sampled_from(sorted(BASES)), st.integers(1, 9), st.integers(1, 12), st.integers(1, 8), st.integers(1, 40),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_blocks_give_the_whole_product_and_its_gradient(base, outputs, inputs, rows, dense, adds, seed):
    torch.manual_seed(seed)
    inputs *= 64 if base == "nf4" else 1
    numbers, scales = quantized(base, [torch.randn(outputs, inputs, dtype=F64)], F64)
    form = FrozenBase(base, inputs)
    x = torch.randn(rows, 2, inputs, dtype=F64, requires_grad=True)
    bias = torch.randn(outputs, dtype=F64) if adds else None
    y = F.linear(x, form.dense(numbers, scales, F64), bias)
    dy, before = torch.randn_like(y), torch.randn(rows * 2, inputs, dtype=F64)
    y.backward(dy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DENSE", dense)
        product = narrow_linear(x.detach(), form, numbers, scales, bias)
        flat = dy.reshape(-1, outputs)
        dx = narrow_input_gradient(flat, form, numbers, scales, before.clone() if adds else None)
    torch.testing.assert_close(product, y.detach(), rtol=1e-12, atol=1e-12)
    expected = x.grad.reshape(-1, inputs) + (before if adds else 0)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)


@given(st.sampled_from(sorted(BASES)), st.integers(1, 4), st.integers(0, 300), st.integers(0, 299), st.integers(0, 99))
def test_a_ranks_piece_is_that_of_the_whole_matrix(base, across, left, top, seed):
    """Rows from anywhere, inputs too, but for NF4 in whole blocks; scales at an odd byte of a buffer."""
    torch.manual_seed(seed)
    outputs, left = 300, {"nf4": left // 64 * 64, "fp8": left}.get(base, 0)
    inputs = left + across * 64
    numbers, scales = quantized(base, torch.randn(outputs, inputs).split(128), torch.float32)
    whole = FrozenBase(base, inputs).dense(numbers, scales, F64)
    held = (top, outputs), (stored_columns(base, left), numbers.shape[1])
    beside = scales[top:] if base == "int8" else torch.cat((scales[:1], scales))[1:]
    part = FrozenBase(base, inputs).at(held)
    piece = part.dense(numbers[top:, held[1][0] :], beside, F64, 0, outputs)
    assert torch.equal(piece, whole[top:, left:])


@pytest.mark.parametrize("base", sorted(BASES))
def test_the_table_has_the_bytes(base):
    """Of what quantization returns; nothing of it is more than the format's error from the weights."""
    weight = torch.randn(320, 448)
    numbers, scales = quantized(base, weight.split(128), torch.bfloat16)
    assert numbers.shape == (320, stored_columns(base, 448)) and numbers.dtype == torch.int8
    assert len(scales) == scale_elements(base, 320, 448)
    held = numbers.nbytes + scales.nbytes
    assert held == pytest.approx(BASES[base].nbytes(weight.shape), rel=2e-4)
    error = (FrozenBase(base, 448).dense(numbers, scales, F64) - weight).norm() / weight.norm()
    assert 0.001 < error < {"int8": 0.02, "fp8": 0.04, "nf4": 0.1}[base]


@pytest.mark.parametrize("base", sorted(BASES))
def test_empty_memory_is_zero(base):
    """Padding of a dim that tp does not divide, and blocks of zeros."""
    _, scales = quantized(base, [torch.randn(4, 128)], torch.float32)
    form = FrozenBase(base, 128)
    empty = torch.zeros(4, stored_columns(base, 128), dtype=torch.int8)
    assert not form.dense(empty, scales, F64).any()
    assert not form.dense(*quantized(base, [torch.zeros(4, 128)], torch.float32), F64).any()


def test_fp8_has_a_scale_per_block_as_in_published_files():
    """`weight_scale_inv`: the largest magnitude of 128 x 128 weights over 448, in fp32."""
    weight = torch.randn(200, 300)
    numbers, scales = quantized("fp8", weight.split(128), torch.float32)
    grid = scales.view(torch.float32).view(2, 3)
    for i, rows in enumerate(weight.split(128)):
        for j, some in enumerate(rows.split(128, 1)):
            assert grid[i, j] == some.abs().max() / 448
            place = numbers[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].view(torch.float8_e4m3fn)
            assert torch.equal(place.float(), (some / grid[i, j]).to(torch.float8_e4m3fn).float())


def test_nf4_is_that_of_bitsandbytes():
    """Values that `beside_bitsandbytes.py` recorded: numbers and scales equal, weights to 1e-6."""
    recorded = json.loads(RECORDED.read_text())
    weight = matrix()
    numbers, scales = quantized("nf4", weight.split(4), torch.float32)
    blocks = numbers.unflatten(1, (-1, 33)).view(torch.uint8)
    plain = (blocks[..., :32] ^ 0x77).contiguous()
    assert hashlib.sha256(plain.numpy().tobytes()).hexdigest() == recorded["numbers"]
    assert blocks[..., 32].contiguous().numpy().tobytes().hex() == recorded["scales"]
    beside = scales.view(torch.float32).tolist()
    assert beside == pytest.approx([recorded["mean"], *recorded["second"]], rel=1e-6)
    dense = FrozenBase("nf4", weight.shape[1]).dense(numbers, scales, torch.float32).flatten()[::577]
    assert dense.tolist() == pytest.approx(recorded["dequantized"], abs=1e-6)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("base", sorted(BASES))
def test_any_piece_has_the_numbers_and_scales_of_the_whole_matrix(base, precision):
    """Whatever part of a matrix a rank asks for first."""
    model = get("tiny-llama").replace(lora=Lora(2, base=base))
    plan = unit_plan(model, Layout(precision=precision), Workload(8, 1))
    weight = next(p for p in plan.blueprint.parameters() if p.dtype)
    scale = next(p for p in plan.blueprint.parameters() if p.name == f"{weight.name}_scale")
    dtype = getattr(torch, plan.layout.dtype)
    dense = torch.randn(weight.shape, dtype=F64).to(dtype)

    def given_values(p, index: Tensor) -> Tensor:
        return dense.double().reshape(-1)[index]

    numbers, scales = quantized(base, [dense], dtype)
    some = torch.arange(numbers.shape[1] // 2, 3 * numbers.shape[1] + 1)
    for scale_first in (True, False):
        values = BaseValues(plan, given_values)
        if scale_first:
            assert torch.equal(values(scale, torch.arange(len(scales))), scales.double())
        assert torch.equal(values(stored(weight), some), numbers.reshape(-1)[some].double())
        assert torch.equal(values(scale, torch.arange(len(scales))), scales.double())
    assert values(stored(weight), torch.arange(0)).numel() == 0


@pytest.mark.parametrize(("box", "shape"), [(((200, 330), (0, 256)), (130, 256)), (((0, 256), (256, 320)), (256, 64))])
def test_fp8_of_a_part_that_is_filled_up_has_zeros_there(box: tuple[tuple[int, int], ...], shape: tuple[int, int]):
    """A rank's part of a width that ranks do not divide goes beyond the last block's scale."""
    weight = torch.randn(256, 256)
    numbers, scales = quantized("fp8", weight.split(128), torch.float32)
    base = FrozenBase("fp8", 256)
    whole = base.dense(numbers, scales, torch.float32)
    (top, bottom), (left, right) = box
    held, expected = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape)
    held[: 256 - top, : max(0, 256 - left)] = numbers[top:bottom, left:right]
    expected[: 256 - top, : max(0, 256 - left)] = whole[top:bottom, left:right]
    assert torch.equal(base.at(box).dense(held, scales, torch.float32), expected)
