"""A tiny decoder in plain PyTorch, and its data: the same on every rank, and in scripts that have no shardwise.

Every bias and every norm's weight is random, so that a term that is left out shows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SEQ, STEPS = 24, 8, 3
VOCAB, PADDED_VOCAB, IGNORED = 64, 61, -100
"""Tokens of a vocabulary that ranks divide, and of one that they do not; the label that does not count."""


class TinyBlock(nn.Module):
    """Causal attention and a feed-forward map, [batch, seq, width] to the same."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(drop)
        self.q, self.k, self.v, self.o, self.up, self.down = (nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    """Decoder: token ids [batch, seq] to logits [batch, seq, vocab]. variant: "tied", "frozen" (table and first block),
    "padded", "dropout" or any other."""

    def __init__(self, variant: str, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(PADDED_VOCAB if variant == "padded" else VOCAB, width)
        self.register_buffer("positions", torch.randn(SEQ, width))
        self.blocks = nn.Sequential(*(TinyBlock(width, 0.2 * (variant == "dropout")) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(self.table.weight), bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.3 * (parameter.dim() == 1), 0.3)
        if variant == "tied":
            self.head.weight = self.table.weight
        for part in (self.table, self.blocks[0]) if variant == "frozen" else ():
            part.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(ids) + self.positions)))


def batch(step: int, variant: str) -> tuple[Tensor, Tensor]:
    """(ids, labels) of all ranks, both [ROWS, SEQ]. "uneven": the later a row the fewer labels count, of the last
    quarter none. "idle": a row repeats one of two tokens, so that few experts are chosen."""
    random, vocab = torch.Generator().manual_seed(1000 + step), PADDED_VOCAB if variant == "padded" else VOCAB
    ids, labels = torch.randint(vocab, (2, ROWS, SEQ), generator=random)
    if variant == "uneven":
        labels[torch.rand(ROWS, SEQ, generator=random) < torch.linspace(0, 1.3, ROWS)[:, None]] = IGNORED
    if variant == "idle":
        ids = (torch.arange(ROWS) % 2)[:, None].expand(ROWS, SEQ).contiguous()
    return ids, labels
