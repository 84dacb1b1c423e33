"""The Llama-style block: RMSNorm, rotary grouped-query attention, SwiGLU (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.modules import Batch, Dropout, Linear, Linears, RMSNorm
from shardwise.model import ModelConfig


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with SiLU or tanh-GELU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linears(config.hidden, {"gate": config.ffn, "up": config.ffn}, bias=False)
        self.down = Linear(config.ffn, config.hidden, bias=False)
        self.activation = F.silu if config.activation == "silu" else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, window: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm.of(config, config.hidden)
        self.attention = Attention(config, f"{name}.attention", window)
        self.mlp_norm = RMSNorm.of(config, config.hidden)
        self.mlp = GatedMLP(config)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention(self.attention_norm(x), batch)
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp(self.mlp_norm(x))
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
