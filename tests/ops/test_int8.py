import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.model.lora import Lora
from shardwise.ops import limits
from shardwise.ops.linear import int8_input_gradient, int8_linear
from shardwise.ops.products import quantise
from shardwise.runtime.zero.flat_unit import Int8Values


@given(
    st.integers(1, 9), st.integers(1, 12), st.integers(1, 8), st.integers(1, 40), st.booleans(), st.integers(0, 1000)
)
def test_blocks_give_the_whole_product_and_its_gradient(outputs, inputs, rows, dense, adds, seed):
    torch.manual_seed(seed)
    numbers, scales = quantise(torch.randn(outputs, inputs, dtype=torch.float64))
    x = torch.randn(rows, 2, inputs, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(outputs, dtype=torch.float64) if adds else None
    y = F.linear(x, numbers.double() * scales[:, None], bias)
    dy, before = torch.randn_like(y), torch.randn(rows * 2, inputs, dtype=torch.float64)
    y.backward(dy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DENSE", dense)
        torch.testing.assert_close(int8_linear(x.detach(), numbers, scales, bias), y.detach(), rtol=1e-12, atol=1e-12)
        flat = dy.reshape(-1, outputs)
        dx = int8_input_gradient(flat, numbers, scales, before.clone() if adds else None)
    expected = x.grad.reshape(-1, inputs) + (before if adds else 0)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_any_piece_has_the_numbers_and_scales_of_the_whole_matrix(precision):
    """The format is that of serving, whatever part of a matrix a rank asks for first."""
    model = get("tiny-llama").replace(lora=Lora(2, base="int8"))
    plan = unit_plan(model, Layout(precision=precision), Workload(8, 1))
    weight = next(p for p in plan.blueprint.parameters() if p.dtype)
    scale = next(p for p in plan.blueprint.parameters() if p.name == f"{weight.name}_scale")
    dtype = getattr(torch, plan.layout.dtype)
    matrix = torch.randn(weight.shape, dtype=torch.float64).to(dtype)
    values = Int8Values(plan, lambda p, index: matrix.double().reshape(-1)[index])
    numbers, scales = quantise(matrix)
    inputs = weight.shape[1]
    some = torch.arange(inputs // 2, 3 * inputs + 1)
    assert torch.equal(values(weight, some), numbers.reshape(-1)[some].double())
    assert torch.equal(values(scale, torch.arange(len(scales))), scales.double())
    assert values(weight, torch.arange(0)).numel() == 0
