"""The Llama-style block: RMSNorm, rotary grouped-query or latent attention, SwiGLU (Llama, Mistral, Qwen, Mixtral,
DeepSeek)."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.decoder.attention import Attention
from shardwise.decoder.experts import Mixture
from shardwise.decoder.feed_forward import GatedMLP
from shardwise.decoder.latent_attention import MultiHeadLatentAttention
from shardwise.decoder.modules import Batch, Dropout, RMSNorm
from shardwise.model import ModelConfig


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the latter a mixture of experts where the model has them.
    x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm.of(config, config.hidden)
        self.attention: Attention | MultiHeadLatentAttention
        if config.latent_attention:
            self.attention = MultiHeadLatentAttention(config, f"{name}.attention")
        else:
            self.attention = Attention(config, f"{name}.attention", config.layer_window(layer))
        self.mlp_norm = RMSNorm.of(config, config.hidden)
        self.mlp = Mixture(config, f"{name}.mlp") if config.has_experts(layer) else GatedMLP(config)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention(self.attention_norm(x), batch)
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp(self.mlp_norm(x), batch)
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
