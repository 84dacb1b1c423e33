"""Low-rank adapters beside the linear maps of a user's module."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Adapted
from shardwise.errors import UserError, did_you_mean
from shardwise.model.adapters import SCALE
from shardwise.model.lora import Lora


class AdaptedMap(Adapted, nn.Linear):
    """An `nn.Linear` with an adapter; its own weight and bias are those of `base`, and frozen."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self._add_factors(base, lora.rank, lora.scale)

    def reset_parameters(self) -> None:
        """Initial values of its class, where the module is on the meta device."""
        nn.Linear.reset_parameters(self)
        self.reset_factors(torch.default_generator)

    @torch.no_grad()
    def reset_factors(self, generator: torch.Generator) -> None:
        """B is zero; A has the variance of `peft`'s default."""
        self.lora_a.normal_(0.0, (3 * self.in_features) ** -0.5, generator=generator)
        self.lora_b.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.low(x)


def add_adapters(module: nn.Module, lora: Lora, blocks: Sequence[str] = ()) -> None:
    """Freeze a module, and give adapters to its `nn.Linear` maps with a last name among `lora.targets`; to all, without
    these, but the output head of a `transformers` model. With `lora.base` all `nn.Linear` in `blocks` (paths) have room
    for scales, and `split` keeps their weights in 8 bits. Raises `UserError` for an unknown name."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    maps = {name: child for name, child in module.named_modules(remove_duplicate=False) if type(child) is nn.Linear}
    leaves = {name.rpartition(".")[2] for name in maps}
    lora.check_trains()
    for target in lora.targets:
        if target not in leaves:
            hint = did_you_mean(target, sorted(leaves), "maps:")
            raise UserError(f"lora: {type(module).__name__} has no nn.Linear named {target!r}; {hint}")
    chosen = {
        name: child
        for name, child in maps.items()
        if (name.rpartition(".")[2] in lora.targets if lora.targets else child is not head)
    }
    if not chosen:
        raise UserError(f"lora: {type(module).__name__} has no nn.Linear to adapt")
    module.requires_grad_(False)
    made: dict[nn.Module, AdaptedMap] = {}
    for name, child in chosen.items():
        if child not in made:
            made[child] = AdaptedMap(child, lora)
            if not child.weight.is_meta:
                device = child.weight.device
                made[child].reset_factors(torch.Generator(device).manual_seed(zlib.crc32(name.encode())))
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[child])
    if lora.base:
        inside = [name for name in maps if any(f"{name}.".startswith(f"{block}.") for block in blocks)]
        _add_scales(module, [made.get(maps[name], maps[name]) for name in inside])


def _add_scales(module: nn.Module, maps: list[nn.Linear]) -> None:
    """Room for the scales of weights in 8 bits: of all maps whose weight no other kind of module reads. Raises
    `UserError` where there is none."""
    own = {id(child) for child in maps}
    others = {id(p) for child in module.modules() if id(child) not in own for p in child._parameters.values()}
    scales: dict[Tensor, nn.Parameter] = {}
    for child in maps:
        weight = child.weight
        if id(weight) not in others:
            made = nn.Parameter(weight.new_ones(child.out_features), requires_grad=False)
            child.register_parameter(SCALE, scales.setdefault(weight, made))
    if not scales:
        raise UserError(f"lora: base=int8: no block of {type(module).__name__} has an nn.Linear: leave base out")
