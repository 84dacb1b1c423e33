"""OLMo-2's block: norms of what attention and feed-forward put out."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.feed_forward import GatedMLP
from shardwise.decoder.modules import Batch, Dropout, RMSNorm
from shardwise.model import ModelConfig


class Olmo2Block(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, f"{name}.attention", config.layer_window(layer))
        self.attention_post_norm = RMSNorm.of(config, config.hidden)
        self.mlp = GatedMLP(config)
        self.mlp_post_norm = RMSNorm.of(config, config.hidden)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention_post_norm(self.attention(x, batch))
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp_post_norm(self.mlp(x))
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
