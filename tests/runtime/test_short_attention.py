"""Short attention against the same in float64, and beside what torch's own kernel saves."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.decoder import Decoder
from shardwise.decoder.modules import Batch
from shardwise.model import ModelConfig
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cpu.attention import _ShortAttention, hidden_keys, short_attention
from shardwise.ops.cpu.limits import ATTENTION_ROWS, LONGEST_SHORT, SHORTEST
from shardwise.ops.table import install

ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
MODEL = ModelConfig("short", vocab=17, hidden=24, layers=1, heads=4, kv_heads=2, ffn=20, max_positions=600)


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
        decoder = Decoder(MODEL).to(dtype)
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
    sums = seq * MODEL.heads * 4 if taken[1] else 0
    assert sum(saved[0].values()) == sum(saved[1].values()) + sums


def _names(out: Tensor) -> str:
    """The nodes that made a tensor, in words."""
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return " ".join(type(node).__name__ for node in seen)
