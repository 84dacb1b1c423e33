"""Initial values of a user's module: its own, or, on the meta device, what its classes give.

A module on the meta device is never whole anywhere. Each submodule with parameters of its own is made alone, by its
`reset_parameters`, or by `_init_weights` of a `transformers` model, when its values are needed. Its seed is its name's,
so that values depend neither on the layout nor on the order.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model.adapters import is_scale
from shardwise.model.blueprint import Parameter
from shardwise.runtime.zero.flat_unit import Values

_CPU = torch.device("cpu")


def is_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of a module has no values."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def values_of(weights: Mapping[str, Tensor]) -> Values:
    """Values of whole parameters, by name."""

    def values(parameter: Parameter, index: Tensor) -> Tensor:
        flat = weights[parameter.name].reshape(-1)
        return flat[index.to(flat.device)].to(index.device, torch.float64)

    return values


def values_in(module: nn.Module) -> Values:
    """The values that a module has."""
    return values_of({name: parameter.detach() for name, parameter in module.named_parameters()})


def place_buffers(module: nn.Module, layout: Layout, values: Values, device: torch.device) -> None:
    """Buffers stay whole on every rank, in their own precision; float64 is for comparisons and takes them along."""
    if isinstance(values, MetaValues):
        values.place_buffers(module)
    for child in module.modules():
        for leaf, buffer in child.named_buffers(recurse=False):
            wide = torch.float64 if layout.precision == "fp64" and buffer.is_floating_point() else buffer.dtype
            child._buffers[leaf] = buffer.to(device, wide)


class MetaValues:
    """Initial values of a module on the meta device. seed: other values for another one. build: makes the whole module,
    for values that a class gives in no other way; every rank then has all of it."""

    def __init__(self, module: nn.Module, seed: int = 0, build: Callable[[], nn.Module] | None = None) -> None:
        self._module, self._seed, self._build = copy.deepcopy(module), seed, build
        self._whole: nn.Module | None = None
        self._latest: tuple[str, nn.Module] | None = None

    def __call__(self, parameter: Parameter, index: Tensor) -> Tensor:
        owner, _, leaf = parameter.name.rpartition(".")
        flat = self.made(owner).get_parameter(leaf).detach().reshape(-1)
        return flat[index.cpu()].to(index.device, torch.float64)

    def made(self, name: str) -> nn.Module:
        """A submodule with values of its own parameters and buffers. Raises `UserError` where its class gives none."""
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # before the next one is made
            self._latest = name, self._initialized(name, 0.0)
        return self._latest[1]

    def place_buffers(self, module: nn.Module) -> None:
        """Give `module` its buffers. Raises `UserError` for one that no class sets to a value."""
        for name, child in module.named_modules():
            if not any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                continue
            made, other = self.made(name), self._initialized(name, 1.0)
            for leaf, buffer in made.named_buffers(recurse=False):
                if not torch.equal(buffer, other.get_buffer(leaf)):
                    buffer = self._built(name, leaf).get_buffer(leaf)
                child._buffers[leaf] = buffer

    def _initialized(self, name: str, fill: float) -> nn.Module:
        """fill: what is in memory before, by which tensors are told that nothing sets."""
        child = copy.deepcopy(self._module.get_submodule(name)).to_empty(device=_CPU, recurse=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed((zlib.crc32(name.encode()) + (self._seed << 32)) % (1 << 63))
            for parameter in child.parameters(recurse=False):
                parameter.fill_(float("nan"))
            for buffer in child.buffers(recurse=False):
                buffer.fill_(fill)
            for own in (getattr(child, "reset_parameters", None), getattr(self._module, "_init_weights", None)):
                if own is not None:
                    own() if own.__name__ == "reset_parameters" else own(child)
        for leaf, parameter in child.named_parameters(recurse=False):
            if parameter.isnan().any() and not is_scale(leaf):  # which follow from the weight
                return self._built(name, leaf)
        return child

    def _built(self, name: str, leaf: str) -> nn.Module:
        """A submodule of the whole module. Raises `UserError` where nothing builds that."""
        child = self._module.get_submodule(name)
        if self._build is None:
            raise UserError(
                f"{name}.{leaf}".removeprefix(".") + f" is on the meta device, and {type(child).__name__} has no "
                "reset_parameters or _init_weights that sets it: give a function that builds the module"
            )
        if self._whole is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                self._whole = self._build()
        return self._whole.get_submodule(name)
