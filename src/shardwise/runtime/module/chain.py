"""A user's module as a chain for a pipeline: what comes before its blocks, the blocks in order, what comes after.

Each block maps one tensor to one tensor, which is what travels between stages. A list of parts says the order: the
user's own, or the `_pp_plan` of a `transformers` model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import UserError, did_you_mean
from shardwise.layout.styles import path_of

ENTRY, EXIT = "entry", "exit"
"""Names of the parts of all that is before the blocks, and after them."""


@dataclass(frozen=True)
class Chain:
    """Paths of modules with parameters, in the order in which a micro-batch passes through them."""

    entry: tuple[str, ...]
    blocks: tuple[str, ...]
    exit: tuple[str, ...]

    def home(self, parameter: str) -> str:
        """The part of a parameter by one of its global names; empty where the list has none for it."""
        for path in self.blocks:
            if parameter.startswith(f"{path}."):
                return path
        for name, paths in ((ENTRY, self.entry), (EXIT, self.exit)):
            if any(parameter.startswith(f"{path}.") for path in paths):
                return name
        return ""


def find_chain(module: nn.Module, parts: Sequence[str | nn.Module] | None, blocks: Sequence[str]) -> Chain:
    """The chain of a list of parts: modules, or patterns of their paths; None for the module's own plan. Blocks are
    those of `blocks` in the list, or all of it where it has none. Raises `UserError`."""
    order = _published(module) if parts is None else _given(module, parts)
    held = [path for path in order if any(True for _ in module.get_submodule(path).parameters())]
    for path in held:
        if inside := next((block for block in blocks if block.startswith(f"{path}.")), None):
            raise UserError(f"parts: {path} contains the block {inside}; name what is in it one by one")
    at = [place for place, path in enumerate(held) if path in blocks] or list(range(len(held)))
    if not at:
        raise UserError("parts: none of them has parameters, so there is nothing to divide into stages")
    first, last = at[0], at[-1] + 1
    return Chain(tuple(held[:first]), tuple(held[first:last]), tuple(held[last:]))


def _published(module: nn.Module) -> list[str]:
    """Paths of a `transformers` plan {path: (inputs, outputs)}, which is in no order: what reads the model's inputs is
    first, then come the layers."""
    plan = getattr(module, "_pp_plan", None)
    if not plan:
        raise UserError(
            f"pp needs an ordered list of parts, and {type(module).__name__} publishes none: give "
            "parts=['table', 'blocks.*', 'head']"
        )
    ranks: dict[str, int] = {}
    for path, (inputs, _) in plan.items():
        listed = isinstance(module.get_submodule(path), nn.ModuleList)
        ranks[path] = 0 if any(name.startswith("input") for name in inputs) else 1 if listed else 2
    return [path for name in sorted(ranks, key=lambda name: ranks[name]) for path in _opened(module, name)]


def _given(module: nn.Module, parts: Sequence[str | nn.Module]) -> list[str]:
    named = dict(module.named_modules())
    order: list[str] = []
    for part in parts:
        if isinstance(part, nn.Module):
            hits = [name for name, child in named.items() if child is part and name]
        else:
            hits = [name for name in named if name and path_of(part).fullmatch(name)]
        if not hits:
            word = part if isinstance(part, str) else type(part).__name__
            raise UserError(f"parts: no module is named {word!r}; {did_you_mean(word, named, 'there are')}")
        order += [path for hit in hits for path in _opened(module, hit)]
    if twice := next((path for path in order if order.count(path) > 1), None):
        raise UserError(f"parts: {twice} is named twice; each part computes once")
    return order


def _opened(module: nn.Module, path: str) -> list[str]:
    """The elements of a list of modules, or the module itself."""
    child = module.get_submodule(path)
    return [f"{path}.{name}" for name, _ in child.named_children()] if isinstance(child, nn.ModuleList) else [path]
