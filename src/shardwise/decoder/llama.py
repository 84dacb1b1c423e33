"""The Llama-style block: RMSNorm, rotary grouped-query attention, SwiGLU (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.modules import Batch, Dropout, Linear, Linears, RMSNorm
from shardwise.model import ModelConfig


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linears(config.hidden, {"gate": config.ffn, "up": config.ffn}, bias=False)
        self.down = Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, f"{name}.attention")
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention(self.attention_norm(x), batch)
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp(self.mlp_norm(x))
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
