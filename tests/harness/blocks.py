"""A block whose weights lie end to end as in a flat buffer, beside the same one by plain modules, in float64."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.modules import Batch
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.gradients import GradSlot, WeightGradients, bind_grad_slot

MODEL = ModelConfig("fused", vocab=17, hidden=24, layers=1, heads=4, kv_heads=2, ffn=20, max_positions=64)
MODELS = st.builds(
    lambda heads, width, bias: MODEL.replace(heads=heads[0], kv_heads=heads[1], head_dim=width, bias=bias),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([2, 6]),
    st.sampled_from(["none", "qkv"]),
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch_of(count: int, seq: int) -> Batch:
    index = torch.arange(seq).expand(count, seq).contiguous()
    return Batch(index, index, index, None, index, index)


def block_of(model: ModelConfig) -> LlamaBlock:
    block = LlamaBlock(model, "blocks.0", 0).double()
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = random(*parameter.shape, seed=seed) / 3
    return block


def flat_block(
    model: ModelConfig, options: Options, lower: Callable[[LlamaBlock, OpContext], None]
) -> tuple[LlamaBlock, WeightGradients]:
    """`block_of` with weights and gradients end to end, and the forms that `lower` gives it."""
    block = block_of(model)
    named = sorted(block.named_parameters(), key=lambda pair: pair[1].dim(), reverse=True)
    flat, at = torch.zeros(2, sum(p.numel() for _, p in named), dtype=torch.float64), 0
    for _, parameter in named:
        held, gradient = (row[at : at + parameter.numel()].view(parameter.shape) for row in flat)
        held.copy_(parameter.data)
        parameter.data = held
        bind_grad_slot(parameter, GradSlot(gradient))
        at += parameter.numel()
    weights = WeightGradients()
    lower(block, OpContext("blocks.0", options, "blocks.0", weights=weights))
    return block, weights


def assert_same_steps(
    form: LlamaBlock, weights: WeightGradients, model: ModelConfig, shape: tuple[int, int], later: bool,
    run: Callable[[Tensor, Batch], Tensor],
) -> None:  # fmt: skip
    """Two steps of a flat block, run by `run`, are those of the plain one. later: weights' gradients come at the
    end."""
    plain = block_of(model)
    for step in range(2):  # the second adds to the first
        x, grad = (random(*shape, model.hidden, seed=seed) for seed in (step, step + 9))
        mine, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(right, batch_of(*shape))
        expected.backward(grad)
        out = run(mine, batch_of(*shape))
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
    for (name, parameter), own in zip(plain.named_parameters(), form.parameters(), strict=True):
        torch.testing.assert_close(own.place.view, parameter.grad, msg=name)
