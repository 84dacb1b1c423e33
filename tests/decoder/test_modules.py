"""The decoder's own autograd functions against finite differences and torch's operators.

The one-device reference uses these modules too, so no comparison with it can prove them.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.space import MODELS
from shardwise.decoder import Batch, Decoder, random
from shardwise.decoder.attention import CoreAttention, MultiHeadLatentAttention, Rope
from shardwise.decoder.modules import Dropout, RMSNorm
from shardwise.decoder.random import initial_values
from shardwise.errors import UserError
from shardwise.model.config import Experts
from shardwise.model.parameters import Parameter, parameters
from shardwise.ops.recompute import recompute


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def batch(b: int, s: int, documents: Tensor | None = None) -> Batch:
    positions = torch.arange(s).expand(b, s)
    index = torch.arange(b * s).view(b, s)
    return Batch(torch.zeros(b, s, dtype=torch.int64), positions, index, documents, positions, index)


def test_rms_norm_is_torchs() -> None:
    x, norm = double(2, 3, 8), RMSNorm(8, 1e-5).double()
    norm.weight.data = double(8, seed=1).detach()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, norm.weight)
    )


@pytest.mark.parametrize("name", ["llama", "mqa", "neox"])
def test_rope_turns_pairs_of_elements(name: str) -> None:
    config = MODELS[name]
    rope, x = Rope(config), double(2, 5, 3, config.head_dim)
    positions = torch.arange(5).expand(2, 5)
    angles, tables = rope.tables(positions, torch.float64), rope.whole(positions, torch.float64)
    half = angles[0].shape[-1]
    assert 2 * half == int(config.head_dim * config.rotary_fraction)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(*angles)
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)
    torch.testing.assert_close(rope(x, tables), expected)
    assert torch.autograd.gradcheck(lambda x: rope(x, tables), x)


def test_attention_depends_on_distances_alone() -> None:
    rope = Rope(MODELS["llama"])
    q, k = double(1, 1, 1, 8), double(1, 1, 1, 8, seed=1)

    def score(at: int, other: int) -> Tensor:
        tables = [rope.whole(torch.tensor([[p]]), torch.float64) for p in (at, other)]
        return (rope(q, tables[0]) * rope(k, tables[1])).sum()

    torch.testing.assert_close(score(7, 3), score(19, 15))
    assert not torch.allclose(score(7, 3), score(7, 4))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_both_attention_kernels_are_the_textbooks(kv_heads: int, documents: bool) -> None:
    q, k, v = double(2, 6, 4, 8), double(2, 6, kv_heads, 8, seed=1), double(2, 6, kv_heads, 8, seed=2)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 3, 3]]) if documents else torch.zeros(2, 6)
    core = CoreAttention(MODELS["llama"], "test")
    at = batch(2, 6, ids if documents else None)
    kk, vv = (t.repeat_interleave(4 // kv_heads, 2) for t in (k, v))
    allowed = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
    scores = torch.einsum("bshd,bthd->bhst", q, kk) / 8**0.5
    expected = torch.einsum("bhst,bthd->bshd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), vv)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v), retain_graph=True)
    for kind in ("sdpa", "math"):
        core.kind = kind
        out = core(q, k, v, at)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted)


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_dropout_and_its_gradient(drop: float) -> None:
    layer, x = Dropout(drop, "site"), double(4, 6)
    counter = torch.arange(4)
    assert torch.autograd.gradcheck(lambda x: layer(x, lambda: counter, 5), x)
    assert torch.equal(layer(x, lambda: counter, None), x), "off in evaluation"
    wide = torch.ones(1000, 64, dtype=torch.float64)
    out = layer(wide, lambda: torch.arange(1000), 5)
    assert set(out.unique().tolist()) == {0.0, 1 / (1 - drop)}
    assert (out == 0).double().mean().item() == pytest.approx(drop, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.02)


def test_dropout_knows_neither_order_nor_neighbours() -> None:
    layer, x = Dropout(0.5, "site"), torch.ones(64, 16)
    whole = layer(x, lambda: torch.arange(64), 5)
    rows = torch.tensor([63, 3, 17])
    large = layer(torch.ones(5000, 16), lambda: torch.arange(5000), 5)
    assert torch.equal(large[:64], whole), "however many pieces it is drawn in"
    assert torch.equal(layer(x[rows], lambda: rows, 5), whole[rows])
    assert not torch.equal(layer(x, lambda: torch.arange(64), 6), whole), "another step"
    assert not torch.equal(Dropout(0.5, "elsewhere")(x, lambda: torch.arange(64), 5), whole), "another site"


def test_recompute_changes_nothing() -> None:
    x, w = double(3, 4), double(4, 4, seed=1)
    plain = torch.autograd.grad((x @ w).tanh().sum(), (x, w))
    y = recompute(lambda x: (x @ w).tanh(), x)
    y.sum().backward()
    torch.testing.assert_close((x.grad, w.grad), plain)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**63), st.integers(1, 500), st.integers(0, 2**40))
def test_random_numbers_depend_on_key_and_counter_alone(key: int, count: int, start: int) -> None:
    counters = torch.arange(start, start + count)
    whole = random.hash64(key, counters)
    assert len(whole.unique()) == count
    assert torch.equal(random.hash64(key, counters.flip(0)), whole.flip(0))
    assert torch.equal(random.normal(key, counters[:1]), random.normal(key, counters)[:1])


def test_random_numbers_are_the_same_on_every_machine() -> None:
    assert random.key(0, "embedding.tokens.weight") == random.key(0, "embedding.tokens.weight")
    # SplitMix64 started at 0: the first outputs of its reference implementation.
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [h % 2**64 for h in random.hash64(0, torch.arange(1, 4)).tolist()] == reference


def test_normal_numbers_are_standard() -> None:
    drawn = random.normal(random.key("moments"), torch.arange(2_000_000))
    moments = [drawn.mean(), drawn.square().mean(), drawn.pow(3).mean(), drawn.pow(4).mean()]
    # Sixteen summed uniforms have a fourth moment of 3 - 6 / (5 * 16).
    assert torch.stack(moments).tolist() == pytest.approx([0, 1, 0, 2.925], abs=0.05)


def test_normal_numbers_do_not_depend_on_each_other() -> None:
    """Nor do those of counters that differ by a number: rows of a matrix, or tokens' embeddings."""
    drawn = random.normal(random.key("lags"), torch.arange(1 << 18))
    lags = [*range(1, 600), 768, 1024, 4096, 1 << 15]
    most = max(abs(float((drawn[:-lag] * drawn[lag:]).mean())) for lag in lags)
    assert most < 5 / (len(drawn) - lags[-1]) ** 0.5
    largest = float(torch.linalg.matrix_norm(drawn.view(512, 512), 2))
    assert largest == pytest.approx(2 * 512**0.5, rel=0.05)  # of a Gaussian matrix


@pytest.mark.parametrize("name", ["latent", "latent-direct"])
def test_latent_attention_is_the_published_formula(name: str) -> None:
    """DeepSeek-V2 (2405.04434), equations 37 to 47, head by head."""
    config, b, s = MODELS[name], 2, 7
    latent = config.latent_attention
    assert latent is not None
    module = MultiHeadLatentAttention(config, "attention").double()
    for seed, p in enumerate(module.parameters()):
        p.data = double(*p.shape, seed=seed).detach()
    x, given = double(b, s, config.hidden, seed=99), batch(b, s)
    q = x
    if latent.q_rank:
        q = F.rms_norm(x @ module.q_down.weight.T, (latent.q_rank,), module.q_down_norm.weight, config.norm_eps)
    q = q @ (module.q_up if latent.q_rank else module.q).weight.T
    down = x @ module.kv_down.weight.T
    c, shared = down[..., : latent.kv_rank], rotated_pairs(down[..., latent.kv_rank :], config.rope_theta)
    kv = F.rms_norm(c, (latent.kv_rank,), module.kv_down_norm.weight, config.norm_eps) @ module.kv_up.weight.T
    outputs, nope = [], latent.nope_head_dim
    for q_head, kv_head in zip(q.chunk(config.heads, -1), kv.chunk(config.heads, -1), strict=True):
        scores = q_head[..., :nope] @ kv_head[..., :nope].mT
        scores = (scores + rotated_pairs(q_head[..., nope:], config.rope_theta) @ shared.mT) / latent.head_dim**0.5
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ kv_head[..., nope:])
    expected = torch.cat(outputs, -1) @ module.out.weight.T
    for kind in ("sdpa", "math"):
        module.core.kind = kind
        torch.testing.assert_close(module(x, given), expected, rtol=1e-10, atol=1e-10)


def rotated_pairs(x: Tensor, theta: float) -> Tensor:
    """x [B, S, r] with pairs (i, i + r/2) rotated by angles of position * theta^(-2i/r), as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def test_initial_values_have_their_deviation() -> None:
    index = torch.arange(50_000)
    assert initial_values(Parameter("w", (50_000,), "head", std=0.02), index, 0).std().item() == pytest.approx(
        0.02, rel=0.02
    )
    assert initial_values(Parameter("w", (9,), "head", init="ones"), index[:9], 0).eq(1).all()
    assert initial_values(Parameter("w", (9,), "head", init="zeros"), index[:9], 0).eq(0).all()


@pytest.mark.parametrize("name", list(MODELS))
def test_the_decoder_has_the_models_parameters(name: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(MODELS[name])
    found = {n: tuple(p.shape) for n, p in decoder.named_parameters()}
    assert found == {p.name: p.shape for p in parameters(MODELS[name])}


def test_a_model_that_nothing_computes_is_refused() -> None:
    with pytest.raises(UserError, match="experts run only in blocks with RMSNorm"):
        Decoder(MODELS["gpt2"].replace(experts=Experts(4, 2, 8)))
