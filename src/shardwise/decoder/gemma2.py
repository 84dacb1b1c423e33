"""Gemma-2's block: norms before and after attention and feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.feed_forward import GatedMLP
from shardwise.decoder.modules import Batch, Dropout, RMSNorm
from shardwise.model import ModelConfig


class Gemma2Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm.of(config, config.hidden)
        self.attention = Attention(config, f"{name}.attention", config.layer_window(layer))
        self.attention_post_norm = RMSNorm.of(config, config.hidden)
        self.mlp_norm = RMSNorm.of(config, config.hidden)
        self.mlp = GatedMLP(config)
        self.mlp_post_norm = RMSNorm.of(config, config.hidden)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention_post_norm(self.attention(self.attention_norm(x), batch))
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
