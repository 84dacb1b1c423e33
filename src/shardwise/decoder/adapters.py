"""Adapters of linear maps: two narrow factors beside a weight (LoRA, Hu et al. 2021), in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Linear
from shardwise.model.adapters import A
from shardwise.model.blueprint import Blueprint


class AdaptedLinear(Linear):
    """y = x W^T + b + scale (x A^T) B^T. A: [inner, in]; B: [out, inner]."""

    def __init__(self, base: Linear, inner: int, scale: float) -> None:
        out, inp = base.weight.shape
        super().__init__(inp, out, base.bias is not None)
        self.lora_a = nn.Parameter(torch.empty(inner, inp))
        self.lora_b = nn.Parameter(torch.empty(out, inner))
        self.scale = scale

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(A, B)."""
        return self.lora_a, self.lora_b

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def adapt(decoder: nn.Module, scale: float, whole: Blueprint) -> None:
    """Replace the maps of a decoder that have adapters in its blueprint."""
    for parameter in whole.parameters():
        if parameter.name.endswith(f".{A}"):
            owner, _, leaf = parameter.name.removesuffix(f".{A}").rpartition(".")
            parent = decoder.get_submodule(owner)
            base = parent.get_submodule(leaf)
            setattr(parent, leaf, AdaptedLinear(base, parameter.shape[0], scale))  # type: ignore[arg-type]
