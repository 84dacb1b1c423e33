"""Low-rank adapters of linear maps (Hu et al. 2021) in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Linear
from shardwise.model.adapters import A
from shardwise.model.blueprint import Blueprint
from shardwise.model.lora import Lora


class AdaptedLinear(Linear):
    """y = x W^T + b + scale (x A^T) B^T. A: [rank, in]; B: [out, rank]."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        out, inp = base.weight.shape
        super().__init__(inp, out, base.bias is not None)
        self.lora_a = nn.Parameter(torch.empty(lora.rank, inp))
        self.lora_b = nn.Parameter(torch.empty(out, lora.rank))
        self.scale = lora.scale

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(A, B)."""
        return self.lora_a, self.lora_b

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def adapt(decoder: nn.Module, lora: Lora, whole: Blueprint) -> None:
    """Replace the maps of a decoder that have adapters in its blueprint."""
    for parameter in whole.parameters():
        if parameter.name.endswith(f".{A}"):
            owner, _, leaf = parameter.name.removesuffix(f".{A}").rpartition(".")
            parent = decoder.get_submodule(owner)
            setattr(parent, leaf, AdaptedLinear(parent.get_submodule(leaf), lora))  # type: ignore[arg-type]
