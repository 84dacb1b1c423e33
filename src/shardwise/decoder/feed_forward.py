"""The gated feed-forward part."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Batch, Linear, Linears
from shardwise.model import ModelConfig


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with SiLU or tanh-GELU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, width: int = 0) -> None:
        super().__init__()
        width = width or config.ffn
        self.gate_up = Linears(config.hidden, {"gate": width, "up": width}, bias=False)
        self.down = Linear(width, config.hidden, bias=False)
        self.activation = F.silu if config.activation == "silu" else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)
