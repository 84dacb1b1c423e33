"""The GPT-style block: LayerNorm, GELU, biases; learned positions (GPT-2) or rotary ones (GPT-NeoX)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.modules import Batch, Dropout, LayerNorm, Linear, Linears
from shardwise.model import ModelConfig


class MLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.bias == "all"
        self.up = Linears(config.hidden, {"up": config.ffn}, bias=bias)
        self.down = Linear(config.ffn, config.hidden, bias=bias)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.up(x)
        return self.down(F.gelu(y, approximate=self.approximate))


class GPTBlock(nn.Module):
    """Pre-norm block; `parallel_residual` adds attention and MLP of the same input (GPT-NeoX). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, f"{name}.attention", config.layer_window(layer))
        self.mlp_norm = LayerNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")
        self.parallel_residual = config.parallel_residual

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention(self.attention_norm(x), batch)
        after = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp(self.mlp_norm(x if self.parallel_residual else after))
        return after + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
