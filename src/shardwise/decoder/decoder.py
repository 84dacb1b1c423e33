"""The decoder as a chain of parts: embedding, blocks, head.

Each part maps (x, batch) to the next x, so that the parts can be run one by one. Parameters have the names and shapes
of `model/parameters.py`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwise.decoder.blocks import Gemma2Block, GPTBlock, LlamaBlock, Olmo2Block
from shardwise.decoder.modules import Batch, Dropout, LayerNorm, Linear, Lookup, RMSNorm, TiedLinear, adapt, soft_cap
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.parameters import blueprint

BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "llama": LlamaBlock, "gpt": GPTBlock, "olmo2": Olmo2Block, "gemma2": Gemma2Block,
}  # fmt: skip
"""Module that a part of the blueprint names -> its class."""


class Embedding(nn.Module):
    """Token vectors, scaled or plus learned positions where the model has that. Reads `batch.ids`; x is ignored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = Lookup(config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden)) if learned else None
        self.dropout = Dropout(config.dropout, "embedding")
        self.scale = config.hidden**0.5 if config.scaled_embedding else None

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        y = self.tokens(batch.ids)
        if self.scale:
            # Rounded to the weights' precision, as in Gemma's own training.
            y.mul_(float(torch.tensor(self.scale, dtype=y.dtype, device="cpu")))
        if self.positions is not None:
            y = y + nn.functional.embedding(batch.stream_positions, self.positions)
        return self.dropout.of_batch(y, lambda: batch.stream_index, batch)


class Head(nn.Module):
    """Final norm, projection to logits and their soft cap: [B, S, hidden] -> [B, S, vocab]."""

    def __init__(self, config: ModelConfig, tokens: Lookup) -> None:
        super().__init__()
        layer = config.norm == "layernorm"
        self.norm = LayerNorm(config.hidden, config.norm_eps) if layer else RMSNorm.of(config, config.hidden)
        self.softcap = config.logit_softcap
        self.out = TiedLinear(tokens) if config.tied else Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        logits = self.uncapped(x)
        return soft_cap(logits, self.softcap) if self.softcap else logits

    def uncapped(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Decoder(nn.Module):
    """A decoder-only language model. Raises `UserError` for a model that no decoder here computes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if reason := config.why_not_runnable():
            raise UserError(f"{config.name}: {reason}")
        self.config = config
        self.names = blueprint(config).names
        block = BLOCKS[blueprint(config).of_kind("block")[0].module]
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(block(config, f"blocks.{i}", i) for i in range(config.layers))
        self.head = Head(config, self.embedding.tokens)
        if config.lora:
            adapt(self, config.lora.scale, blueprint(config))

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) in the order in which tokens pass through them."""
        return zip(self.names, [self.embedding, *self.blocks, self.head], strict=True)

    def forward(self, batch: Batch) -> Tensor:
        x = None
        for _, part in self.parts():
            x = part(x, batch)
        assert x is not None
        return x
