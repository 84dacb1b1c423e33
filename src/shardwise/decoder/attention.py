"""Causal self-attention: projections, rotary embedding, and the core that turns q, k, v into its output."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Batch, Dropout, JointNorm, Linear, Linears, RMSNorm
from shardwise.model import ModelConfig
from shardwise.model.config import RopeScaling, YarnScaling


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], back: bool = False, first: int = 0) -> Tensor:
    """Rotate pairs (i, i + r/2) of the r numbers from `first` on of x [B, S, H, D] in place by the angles of
    `Rope.whole`, or back."""
    cos, sin = tables
    turned = x[..., first : first + cos.shape[-1]]
    partners = turned.roll(cos.shape[-1] // 2, -1)
    turned.mul_(cos).addcmul_(partners, sin, value=-1 if back else 1)
    return x


class _Rotate(torch.autograd.Function):
    """`rotate` of a copy. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
        ctx.tables, ctx.first = (cos, sin), first
        return rotate(x.clone(), ctx.tables, first=first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return rotate(grads[0].clone(), ctx.tables, back=True, first=ctx.first), None, None, None


class Rope(nn.Module):
    """Rotary position embedding (Su et al. 2021) on x [B, S, H, D], with Llama-3's or YaRN's frequencies.

    `whole(positions)` gives (cos, sin), each [B, S, 1, rotated] in compute precision, sin with the sign of its half.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._inverse = self._inverse_frequencies(config)

    @staticmethod
    def _inverse_frequencies(config: ModelConfig) -> Tensor:
        rotated, scaling = config.rotated, config.rope_scaling
        exponent = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
        inverse = config.rope_theta**-exponent
        if isinstance(scaling, YarnScaling):
            return _yarn(inverse, scaling, config.rope_theta)
        return _llama3(inverse, scaling) if scaling else inverse

    def move(self, device: torch.device) -> None:
        """Keep the frequencies on a device, so that computing tables there copies nothing."""
        self._inverse = self._inverse.to(device)

    def shared(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of a batch's positions, made once for all blocks."""
        tables: tuple[Tensor, Tensor] = batch.shared("rope", lambda: self.whole(batch.positions, dtype))
        return tables

    def whole(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors of both numbers of each pair, for one multiplication of all of them."""
        cos, sin = self.tables(positions, dtype)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of positions [B, S], each [B, S, 1, rotated/2]."""
        angles = positions.double()[..., None] * self._inverse.to(positions.device)
        return angles.cos().to(dtype).unsqueeze(2), angles.sin().to(dtype).unsqueeze(2)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], first: int = 0) -> Tensor:
        if torch.compiler.is_compiling():
            # In a form for the compiler: nothing written in place, its backward derived by autograd.
            (cos, sin), half = tables, tables[0].shape[-1] // 2
            before, one, two, rest = x.split([first, half, half, x.shape[-1] - first - 2 * half], -1)
            turned = torch.cat([one, two], -1) * cos + torch.cat([two, one], -1) * sin
            return torch.cat([before, turned, rest], -1)
        out: Tensor = _Rotate.apply(x, *tables, first)  # type: ignore[no-untyped-call]
        return out


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama-3's frequencies: high ones are kept, low ones divided by the factor."""
    wavelength = 2 * math.pi / inverse
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    inverse = torch.where(wavelength > low, inverse / scaling.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), between, inverse)


def _yarn(inverse: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """YaRN's frequencies: a ramp over their indices, from the kept ones to the ones that are divided by the factor."""
    n = len(inverse)

    def index(rotations: float) -> float:
        return n * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), 2 * n - 1)
    ramp = ((torch.arange(n, dtype=inverse.dtype, device=inverse.device) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return inverse * (1 - ramp) + inverse / scaling.factor * ramp


class CoreAttention(nn.Module):
    """softmax(c tanh(q k^T scale / c)) v, causal. q: [B, S, H, D]; k: [B, S, K, D] and v: [B, S, K, V] with K dividing
    H; returns [B, S, H, V]. Without a soft cap c the scores are q k^T scale.

    kind: "sdpa" (fused, saves its inputs, output and log-sum-exp; not with a soft cap) or "math" (explicit, saves the
    probabilities). window: tokens that each token attends to at most, 0 for no bound. plain: whether no layer of the
    model has a soft cap, a window or another scale. narrow: whether values are narrower than keys. first_head: global
    index of the first head at hand, and `heads` the number of all heads, for dropout's counters.
    """

    def __init__(self, config: ModelConfig, site: str, window: int = 0) -> None:
        super().__init__()
        self.kind = "sdpa"
        self.scale = config.score_factor
        self.softcap, self.window, self.plain = config.score_softcap, window, config.plain_attention
        self.narrow = config.narrow_values
        self.heads, self.first_head = config.heads, 0
        self.dropout = Dropout(config.attention_dropout, f"{site}.probabilities")

    def mask(self, batch: Batch, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of the scores: [B, 1, S, S], [S, S], or None where the kernel supports plain causal
        attention."""
        mask = batch.mask(dtype)
        s, device = batch.positions.shape[1], batch.positions.device
        local = 0 < self.window < s
        if not local and (mask is not None or self.fused):
            return mask
        lowest = torch.finfo(dtype).min
        whole: Tensor = (
            mask
            if mask is not None
            else batch.shared("triangle", lambda: torch.full((s, s), lowest, dtype=dtype, device=device).triu_(1))
        )
        if local:
            index = torch.arange(s, device=device)
            far = index[:, None] - index >= self.window
            return batch.shared(f"window of {self.window}", lambda: whole.masked_fill(far, lowest))  # type: ignore[no-any-return]
        return whole

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel computes it: none has a soft cap."""
        return self.kind == "sdpa" and not self.softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = self.mask(batch, q.dtype)
        if self.fused:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            assert mask is not None
            out = self._math(q, k, v, mask, batch)
        return out.transpose(1, 2)

    def _math(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        b, h, s, d = q.shape
        kv = k.shape[1]
        # Query heads of one key/value head become rows of one product: k and v need no copies.
        rows = (q * self.scale).reshape(b, kv, h // kv * s, d)
        scores = torch.matmul(rows, k.transpose(2, 3))
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_() * self.softcap
        scores = scores.view(b, h, s, s).add_(mask)
        probabilities = torch.softmax(scores, -1)
        del scores
        probabilities = self.dropout.of_batch(probabilities, lambda: self._rows(batch, h), batch)
        return torch.matmul(probabilities.view(b, kv, h // kv * s, s), v).reshape(b, h, s, -1)

    def _rows(self, batch: Batch, heads: int) -> Tensor:
        """[B, H, S]: a number for each row of probabilities, equal wherever the head is computed."""
        mine = torch.arange(self.first_head, self.first_head + heads, device=batch.index.device)
        return batch.index[:, None, :] * self.heads + mine[None, :, None]


class Attention(nn.Module):
    """Multi-head attention with optional grouped key/value heads, biases, norms of queries and keys, and rotary
    embedding."""

    def __init__(self, config: ModelConfig, name: str, window: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        widths = {"q": config.q_width, "k": config.kv_width, "v": config.kv_width}
        self.qkv = Linears(config.hidden, widths, bias=config.bias != "none")
        heads = config.qk_norm and config.qk_norm_scope == "head"
        self.q_norm = RMSNorm.of(config, config.head_dim) if heads else None
        self.k_norm = RMSNorm.of(config, config.head_dim) if heads else None
        self.qk_norm = JointNorm(config) if config.qk_norm and not heads else None
        self.rope = Rope(config) if config.positions == "rope" else None
        self.core = CoreAttention(config, name, window)
        self.out = Linear(config.q_width, config.hidden, bias=config.bias == "all")

    def share(self, batch: Batch, dtype: torch.dtype) -> None:
        """Compute the tensors of `batch` that all blocks share, before the first block needs them."""
        self.core.mask(batch, dtype)
        if self.rope is not None:
            self.rope.shared(batch, dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            tables = self.rope.shared(batch, q.dtype)
            q, k = self.rope(q, tables), self.rope(k, tables)
        return self.out(self.core(q, k, v, batch).flatten(2))


class SharedKey(nn.Module):
    """The keys' rotated part, one for all heads: [B, S, rope_head_dim]. The identity, where every head is at hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class MultiHeadLatentAttention(nn.Module):
    """Queries up(norm(down(x))), or one map of x; keys and values up(norm(down(x))), and one rotated part of the keys
    that all heads share. Heads of queries and keys are [nope | rope] wide, and the second part is rotated; those
    of values may be narrower."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        latent = config.latent_attention
        assert latent is not None
        self.widths, self.heads = latent, config.heads
        queries = config.heads * latent.head_dim
        if latent.q_rank:
            self.q_down = Linear(config.hidden, latent.q_rank, bias=False)
            self.q_down_norm = RMSNorm.of(config, latent.q_rank)
            self.q_up = Linear(latent.q_rank, queries, bias=False)
        else:
            self.q = Linear(config.hidden, queries, bias=False)
        self.kv_down = Linear(config.hidden, latent.kv_rank + latent.rope_head_dim, bias=False)
        self.kv_down_norm = RMSNorm.of(config, latent.kv_rank)
        self.shared_key = SharedKey()
        self.kv_up = Linear(latent.kv_rank, config.heads * (latent.nope_head_dim + latent.v_head_dim), bias=False)
        self.rope = Rope(config)
        self.core = CoreAttention(config, name)
        self.out = Linear(config.heads * latent.v_head_dim, config.hidden, bias=False)

    def share(self, batch: Batch, dtype: torch.dtype) -> None:
        """Compute the tensors of `batch` that all blocks share, before the first block needs them."""
        self.core.mask(batch, dtype)
        self.rope.shared(batch, dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        tables, nope = self.rope.shared(batch, x.dtype), self.widths.nope_head_dim
        q = self.rope(self.queries(x).unflatten(-1, (-1, self.widths.head_dim)), tables, nope)
        k, v = self.keys_and_values(x, tables)
        return self.out(self.core(q, k, v, batch).flatten(2))

    def queries(self, x: Tensor) -> Tensor:
        """Queries of all heads, not rotated: [B, S, heads * head_dim]."""
        return self.q_up(self.q_down_norm(self.q_down(x))) if self.widths.q_rank else self.q(x)  # type: ignore[no-any-return]

    def latents(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(normed latent of keys and values [B, S, kv_rank], the keys' shared part [B, S, 1, rope_head_dim])."""
        latent, shared = self.kv_down(x).split([self.widths.kv_rank, self.widths.rope_head_dim], -1)
        return self.kv_down_norm(latent), self.rope(self.shared_key(shared).unsqueeze(2), tables)

    def keys_and_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H, head_dim] and values [B, S, H, v_head_dim]."""
        widths = self.widths.nope_head_dim, self.widths.v_head_dim
        latent, shared = self.latents(x, tables)
        own, v = self.kv_up(latent).unflatten(-1, (-1, sum(widths))).split(widths, -1)
        # A copy of the values: a view would keep all of the map's output.
        return torch.cat([own, shared.expand(-1, -1, own.shape[2], -1)], -1), v.contiguous()
