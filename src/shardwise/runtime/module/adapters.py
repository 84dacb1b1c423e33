"""Low-rank adapters beside the linear maps, and the stacked experts, of a user's module."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.bases import FrozenBase
from shardwise.decoder.modules import Adapted
from shardwise.errors import UserError, did_you_mean
from shardwise.model.adapters import SCALE, A, B, stacked_target
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

    def reset_factors(self, generator: torch.Generator) -> None:
        """B is zero; A has the variance of `peft`'s default."""
        _reset(self.lora_a, self.lora_b, self.in_features, generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.low(x)


class AdaptedExperts(nn.Module):
    """Stacked experts with adapters beside some of their weights [experts, rows, columns], which compute by their
    class's forward with W + scale B A: as of `peft`'s `target_parameters`."""

    adapted: tuple[str, ...] = ()
    """Names of these weights. A is [experts, rank, columns], B [experts, rows, rank]."""
    scale: float

    def adapt(self, leaf: str, lora: Lora) -> None:
        """Give a weight an adapter."""
        weight = self.get_parameter(leaf)
        count, rows, columns = weight.shape
        self.adapted, self.scale = (*self.adapted, leaf), lora.scale
        for factor, shape in ((A, (lora.rank, columns)), (B, (rows, lora.rank))):
            self.register_parameter(f"{leaf}_{factor}", nn.Parameter(weight.new_empty(count, *shape)))

    def reset_parameters(self) -> None:
        """As of `AdaptedMap`."""
        if (reset := getattr(super(), "reset_parameters", None)) is not None:
            reset()
        self.reset_factors(torch.default_generator)

    def reset_factors(self, generator: torch.Generator) -> None:
        """As of `AdaptedMap`: the factor at the side of the outputs, which may be the columns, is zero."""
        for leaf in self.adapted:
            a, b = (self.get_parameter(f"{leaf}_{factor}") for factor in (A, B))
            inner, outer = (b, a) if columns_out(self) else (a, b)
            _reset(inner, outer, inner.shape[1 if inner is b else 2], generator)

    def whole(self, leaf: str) -> Tensor:
        """W + scale B A."""
        weight, a, b = (self.get_parameter(name) for name in (leaf, f"{leaf}_{A}", f"{leaf}_{B}"))
        return torch.baddbmm(weight, b, a, alpha=self.scale)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__.update({leaf: self.whole(leaf) for leaf in self.adapted})
        try:
            out: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for leaf in self.adapted:
                self.__dict__.pop(leaf, None)
        return out


def columns_out(experts: nn.Module) -> bool:
    """Whether stacked weights are [experts, inputs, outputs]."""
    return bool(getattr(experts, "is_transposed", False))


@torch.no_grad()
def _reset(inner: Tensor, outer: Tensor, inputs: int, generator: torch.Generator) -> None:
    inner.normal_(0.0, (3 * inputs) ** -0.5, generator=generator)
    outer.zero_()


def stacks_of(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (owner, last name) of every weight [experts, rows, columns] of a module that says how many experts it
    has."""
    return {
        f"{name}.{leaf}": (child, leaf)
        for name, child in module.named_modules()
        for leaf, parameter in child._parameters.items()
        if parameter is not None and parameter.dim() == 3 and len(parameter) == getattr(child, "num_experts", None)
    }


def add_adapters(module: nn.Module, lora: Lora, blocks: Sequence[str] = ()) -> None:
    """Freeze a module, and give adapters to its `nn.Linear` maps with a last name among `lora.targets`, and to stacked
    experts with the last two names; without these to all maps but the output head of a `transformers` model. With
    `lora.base` all `nn.Linear` in `blocks` (paths) have room for scales, and `split` keeps their weights in fewer bits.
    Raises `UserError` for an unknown name."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    maps = {name: child for name, child in module.named_modules(remove_duplicate=False) if type(child) is nn.Linear}
    stacks = stacks_of(module)
    _check_targets(module, lora, {name.rpartition(".")[2] for name in maps} | {*map(stacked_target, stacks)})
    chosen = {
        name: child
        for name, child in maps.items()
        if (name.rpartition(".")[2] in lora.targets if lora.targets else child is not head)
    }
    stacked = {name: at for name, at in stacks.items() if stacked_target(name) in lora.targets}
    if not chosen and not stacked:
        raise UserError(f"lora: {type(module).__name__} has no nn.Linear to adapt")
    module.requires_grad_(False)
    made: dict[nn.Module, nn.Module] = {}
    for name, child in chosen.items():
        if child not in made:
            made[child] = AdaptedMap(child, lora)
            _start(made[child], name)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[child])
    for owner, leaf in stacked.values():
        if not isinstance(owner, AdaptedExperts):
            kind = type(owner)
            owner.__class__ = type(f"Adapted{kind.__name__}", (AdaptedExperts, kind), {})
        owner.adapt(leaf, lora)  # type: ignore[operator]
    for name in {name.rpartition(".")[0]: None for name in stacked}:
        _start(module.get_submodule(name), name)
    if lora.base:
        inside = [name for name in maps if any(f"{name}.".startswith(f"{block}.") for block in blocks)]
        _add_scales(module, [made.get(maps[name], maps[name]) for name in inside], lora.base)


@torch.no_grad()
def merge_adapters(module: nn.Module) -> None:
    """Add the adapters of a module to its weights, and leave them out of its state."""
    for child in module.modules():
        child._parameters.pop(SCALE, None)  # of a base in fewer bits, which is whole again
        if isinstance(child, AdaptedMap):
            child.weight.addmm_(child.lora_b, child.lora_a, alpha=child.scale)
            del child.lora_a, child.lora_b
        elif isinstance(child, AdaptedExperts):
            for leaf in child.adapted:
                child.get_parameter(leaf).copy_(child.whole(leaf))
                delattr(child, f"{leaf}_{A}")
                delattr(child, f"{leaf}_{B}")
            child.adapted = ()


def _check_targets(module: nn.Module, lora: Lora, names: Iterable[str]) -> None:
    for target in lora.targets:
        if target not in names:
            hint = did_you_mean(target, sorted(names), "maps:")
            raise UserError(f"lora: {type(module).__name__} has nothing to adapt that is named {target!r}; {hint}")


def _start(adapted: nn.Module, name: str) -> None:
    device = next(adapted.parameters()).device
    if device.type != "meta":
        adapted.reset_factors(torch.Generator(device).manual_seed(zlib.crc32(name.encode())))  # type: ignore[operator]


def _add_scales(module: nn.Module, maps: list[nn.Module], base: str) -> None:
    """Room for the scales of weights in fewer bits: of all maps whose weight no other kind of module reads. Raises
    `UserError` where there is none."""
    own = {id(child) for child in maps}
    others = {id(p) for child in module.modules() if id(child) not in own for p in child._parameters.values()}
    first: dict[nn.Parameter, nn.Module] = {}
    for child in maps:
        if id(weight := child.get_parameter("weight")) not in others:
            FrozenBase.narrow(child, base, weight.dtype)
            child.register_parameter(SCALE, first.setdefault(weight, child).get_parameter(SCALE))
    if not first:
        raise UserError(f"lora: base={base}: no block of {type(module).__name__} has an nn.Linear: leave base out")
