"""Adapters of linear maps: two narrow factors beside a weight (LoRA, Hu et al. 2021), in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Linear
from shardwise.model.adapters import A
from shardwise.model.blueprint import Blueprint


class Adapted(nn.Module):
    """What a linear map with an adapter has beside its weight and bias: A [inner, in], B [out, inner], their scale."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def _add_factors(self, base: nn.Module, inner: int, scale: float) -> None:
        weight = base.get_parameter("weight")
        self.lora_a = nn.Parameter(weight.new_empty(inner, weight.shape[1]))
        self.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], inner))
        self.scale = scale

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(A, B)."""
        return self.lora_a, self.lora_b

    def low(self, x: Tensor) -> Tensor:
        """scale (x A^T) B^T."""
        return self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class AdaptedLinear(Adapted, Linear):
    """y = x W^T + b + scale (x A^T) B^T."""

    def __init__(self, base: Linear, inner: int, scale: float) -> None:
        out, inp = base.weight.shape
        Linear.__init__(self, inp, out, base.bias is not None)
        self._add_factors(base, inner, scale)

    def forward(self, x: Tensor) -> Tensor:
        return Linear.forward(self, x) + self.low(x)


def adapt(decoder: nn.Module, scale: float, whole: Blueprint) -> None:
    """Replace the maps of a decoder that have adapters in its blueprint, and narrow those with a base in 8 bits."""
    for parameter in whole.parameters():
        if parameter.name.endswith(f".{A}"):
            owner, _, leaf = parameter.name.removesuffix(f".{A}").rpartition(".")
            parent = decoder.get_submodule(owner)
            base = parent.get_submodule(leaf)
            assert isinstance(base, Linear)
            setattr(parent, leaf, AdaptedLinear(base, parameter.shape[0], scale))
    for parameter in whole.parameters():
        if parameter.dtype:
            module = decoder.get_submodule(parameter.name.rpartition(".")[0])
            assert isinstance(module, Linear)
            module.narrow()
