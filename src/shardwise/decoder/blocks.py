"""The Llama-style block: RMSNorm, rotary grouped-query or latent attention, SwiGLU (Llama, Mistral, Qwen, Mixtral,
DeepSeek)."""

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.attention import Attention, MultiHeadLatentAttention
from shardwise.decoder.experts import Mixture
from shardwise.decoder.modules import Batch, Dropout, GatedMLP, LayerNorm, Linear, Linears, RMSNorm
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


class Gemma2Block(Olmo2Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str, layer: int) -> None:
        super().__init__(config, name, layer)
        self.attention_norm = RMSNorm.of(config, config.hidden)
        self.mlp_norm = RMSNorm.of(config, config.hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attention_post_norm(self.attention(self.attention_norm(x), batch))
        x = x + self.attention_dropout.of_batch(y, lambda: batch.stream_index, batch)
        y = self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        return x + self.mlp_dropout.of_batch(y, lambda: batch.stream_index, batch)
