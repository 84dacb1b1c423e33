"""Multi-head latent attention (DeepSeek-AI 2024): queries, keys and values through narrow layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.decoder.attention import CoreAttention, Rope
from shardwise.decoder.modules import Batch, Linear, RMSNorm
from shardwise.model import ModelConfig


class SharedKey(nn.Module):
    """The keys' rotated part, one for all heads: [B, S, rope_head_dim]. The identity, where every head is at hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class MultiHeadLatentAttention(nn.Module):
    """Queries up(norm(down(x))), or one map of x; keys and values up(norm(down(x))), and one rotated part of the keys
    that all heads share. Heads of queries and keys are [nope | rope] wide, of which the second part is rotated; those
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
