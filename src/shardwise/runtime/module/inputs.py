"""Inputs of a user's module: any tree of tensors, each with a row per sequence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwise.errors import UserError

_LOOKS = "find_packed_sequence_indices"


def with_rows(example: Any, rows: int) -> Any:
    """Inputs of other rows, without values. Call it on fake tensors. Raises `UserError` for different numbers of rows
    in an example."""
    leaves = _tensors(example)
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
    leaves = _tensors(example)
    if not leaves or not len(leaves[0]):
        raise UserError("the example has no tensor with rows: give the inputs of one forward pass")
    return len(leaves[0])


def row_length(example: Any) -> int:
    """Tokens of a row: the second size of the first tensor where that is a matrix of integers, else 1."""
    leaves = _tensors(example)
    tokens = leaves and leaves[0].dim() == 2 and not leaves[0].is_floating_point()
    return leaves[0].shape[1] if tokens else 1


def _tensors(example: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]


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
