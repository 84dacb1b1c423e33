"""Inputs of a user's module: any tree of tensors, each with a row per sequence."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwise.errors import UserError

_LOOKS = "find_packed_sequence_indices"


def built(model: nn.Module | Callable[[], nn.Module], whose: str) -> nn.Module:
    """A module, or what a function builds. Raises `UserError` for anything else. whose: function of ours that takes
    it."""
    module = model if isinstance(model, nn.Module) else model()
    if not isinstance(module, nn.Module):
        raise UserError(f"{whose} takes an nn.Module or a function that builds one, not {type(module).__name__}")
    return module


def tensors_in(*trees: Any) -> list[Tensor]:
    """The tensors of trees, in order."""
    return [x for x in _pytree.tree_leaves(trees) if isinstance(x, Tensor)]


def opened(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """(leaves of a tree, dataclasses opened; how to make the tree of other leaves)."""
    nodes, shape = _pytree.tree_flatten(tree)
    leaves: list[Any] = []
    makers: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
    for node in nodes:
        inner = [node]
        make: Callable[[Sequence[Any]], Any] = itemgetter(0)
        if is_dataclass(node) and not isinstance(node, type):
            inner, fields_of = opened({field.name: getattr(node, field.name) for field in fields(node)})
            make = partial(_refilled, node, fields_of)
        leaves += inner
        makers.append((len(inner), make))

    def made(values: Sequence[Any]) -> Any:
        rest = iter(values)
        return _pytree.tree_unflatten([make(list(islice(rest, count))) for count, make in makers], shape)

    return leaves, made


def _refilled(node: Any, fields_of: Callable[[Sequence[Any]], dict[str, Any]], values: Sequence[Any]) -> Any:
    """A copy of a dataclass, frozen or not, with other leaves."""
    other = copy.copy(node)
    for name, value in fields_of(values).items():
        object.__setattr__(other, name, value)
    return other


def with_rows(example: Any, rows: int) -> Any:
    """Inputs of other rows, without values. Call it on fake tensors. Raises `UserError` for different numbers of rows
    in an example."""
    leaves = _with_rows(example)
    if len({len(x) for x in leaves}) != 1:
        sizes = ", ".join(str(list(x.shape)) for x in leaves) or "none"
        raise UserError(f"the example's tensors must have the same number of rows, which dp divides: {sizes}")

    def blank(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty(rows, *x.shape[1:], dtype=x.dtype) if x.dim() else torch.empty((), dtype=x.dtype)

    return _pytree.tree_map(blank, example)


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating-point numbers in another dtype."""
    return _pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def suited(module: Any, batch: Any) -> Any:
    """Inputs with their floating-point numbers in the dtype of a module's first parameter, as in a step."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point()) if isinstance(module, nn.Module) else ()
    dtype = next(iter(dtypes), None)
    return batch if dtype is None else in_dtype(batch, dtype)


def row_count(example: Any) -> int:
    """Rows of an example. Raises `UserError` for one without rows."""
    leaves = _with_rows(example)
    if not leaves or not len(leaves[0]):
        raise UserError("the example has no tensor with rows: give the inputs of one forward pass")
    return len(leaves[0])


def row_length(example: Any) -> int:
    """Tokens of a row: the second size of the first tensor where that is a matrix of integers, else 1."""
    leaves = _with_rows(example)
    tokens = leaves and leaves[0].dim() == 2 and not leaves[0].is_floating_point()
    return leaves[0].shape[1] if tokens else 1


def _with_rows(example: Any) -> list[Tensor]:
    return [x for x in tensors_in(example) if x.dim()]


@contextmanager
def usual_masks(example: Any) -> Iterator[None]:
    """While inputs have no values, positions that the example does not give count up, so that no row is packed.

    `transformers.masking_utils.find_packed_sequence_indices` looks for packed sequences in the positions, and on fake
    tensors takes all rows as packed, which has a mask where a step has none. Nor does torch print the traceback of an
    operation that fails without values, beside the error that it raises.
    """
    given = example.get("position_ids") if isinstance(example, Mapping) else getattr(example, "positions", None)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with ExitStack() as until:
        until.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        until.enter_context(nullcontext() if given is not None else unpacked())
        yield


@contextmanager
def unpacked() -> Iterator[None]:
    """While positions that do not count up are no sign of packed sequences."""
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, _LOOKS):
        yield
        return
    before = getattr(masking, _LOOKS)
    setattr(masking, _LOOKS, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _LOOKS, before)
