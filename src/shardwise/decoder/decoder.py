"""The decoder as a chain of parts: embedding, blocks, head.

Each part maps (x, batch) to the next x, so that whoever runs a decoder may run the parts one at a time. Parameters have
the names and shapes of `model/parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.decoder.gpt import GPTBlock
from shardwise.decoder.llama import LlamaBlock
from shardwise.decoder.modules import Batch, Dropout, LayerNorm, Linear, Lookup, RMSNorm, TiedLinear
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.parameters import blueprint

BLOCKS = {"llama": LlamaBlock, "gpt": GPTBlock}
"""Module that a part of the blueprint names -> its class."""


class Embedding(nn.Module):
    """Token vectors, plus learned positions where the model has them. Reads `batch.ids`; x is ignored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = Lookup(config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden)) if learned else None
        self.dropout = Dropout(config.dropout, "embedding")

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        y = self.tokens(batch.ids)
        if self.positions is not None:
            y = y + nn.functional.embedding(batch.stream_positions, self.positions)
        return self.dropout.of_batch(y, lambda: batch.stream_index, batch)


class Head(nn.Module):
    """Final norm and projection to logits: [B, S, hidden] -> [B, S, vocab]."""

    def __init__(self, config: ModelConfig, tokens: Lookup) -> None:
        super().__init__()
        norm = RMSNorm if config.norm == "rmsnorm" else LayerNorm
        self.norm = norm(config.hidden, config.norm_eps)
        self.out = TiedLinear(tokens) if config.tied else Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
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
        self.blocks = nn.ModuleList(block(config, f"blocks.{i}") for i in range(config.layers))
        self.head = Head(config, self.embedding.tokens)

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) in the order in which tokens pass through them."""
        return zip(self.names, [self.embedding, *self.blocks, self.head], strict=True)

    def forward(self, batch: Batch) -> Tensor:
        x = None
        for _, part in self.parts():
            x = part(x, batch)
        assert x is not None
        return x
