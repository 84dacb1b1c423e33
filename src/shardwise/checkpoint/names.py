"""Names of parameters without the wrappers of torch.compile, FSDP and activation checkpointing."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})
"""Modules that a wrapper puts between a module and its own."""
PREFIXES = ("module.", "base_model.model.")
"""What DDP and peft put before every name."""


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors by their names without wrappers and without a prefix that all of them have; by their own names where two
    would have the same."""
    names = {name: unwrapped(name) for name in tensors}
    for prefix in PREFIXES:
        if names and all(name.startswith(prefix) for name in names.values()):
            names = {old: name.removeprefix(prefix) for old, name in names.items()}
    if len(set(names.values())) < len(names):
        return dict(tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}
