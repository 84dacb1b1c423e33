"""Recomputation in a user's module: of whole blocks, or of attention's core.

A block's forward pass may write buffers, such as a batch norm's: they are written once. The second pass runs on copies
of the buffers as they were before the first one, so that it computes the same values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UserError

_Place = tuple[nn.Module, str]
"""A module and the name of its buffer."""
_ATTENTION = F.scaled_dot_product_attention


class Recomputation:
    """Forward passes of one block that keep its inputs alone."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._written: list[_Place] | None = None
        """The buffers that its passes have written; None before the first one."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before: dict[_Place, Tensor] = {}
        return self._first(before), self._again(before)

    @contextmanager
    def _first(self, before: dict[_Place, Tensor]) -> Iterator[None]:
        """Around the first pass. before: takes the values of the buffers that it writes."""
        every = {place: (_get(place), _get(place)._version) for place in _places(self._block)}
        values = {place: _get(place).clone() for place in (every if self._written is None else self._written)}
        yield
        for place, (buffer, version) in every.items():
            written = _get(place) is not buffer or buffer._version != version
            if self._written is not None and place in self._written:
                before[place] = values[place]
            elif written and self._written is not None:  # too late for what it was
                before[place] = _get(place).clone()
            # A batch norm's kernel does not say that it writes.
            elif self._written is None and (written or _differs(values[place], buffer)):
                before[place] = values[place]
        self._written = list(before)

    @contextmanager
    def _again(self, before: dict[_Place, Tensor]) -> Iterator[None]:
        after = {place: _get(place) for place in before}
        try:
            for (module, leaf), values in before.items():
                module._buffers[leaf] = values
            yield
        finally:
            for (module, leaf), buffer in after.items():
                module._buffers[leaf] = buffer


class AttentionMode(TorchFunctionMode, ABC):
    """What calls `scaled_dot_product_attention`, itself or by `nn.MultiheadAttention`, gets `attend`."""

    @abstractmethod
    def attend(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        attention = F.scaled_dot_product_attention  # no mode sees what this function calls
        F.scaled_dot_product_attention = self.attend
        try:
            return func(*args, **(kwargs or {}))
        finally:
            F.scaled_dot_product_attention = attention


class BlockRecomputation(AttentionMode):
    """`recompute=` for the blocks of one rank. As a mode around a block's forward pass, it has what calls
    `scaled_dot_product_attention` save its inputs alone."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self._recompute, self._met = recompute, False

    def wrap(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a block, which saves no more than the layout says."""
        if self._recompute == "none":
            return forward
        again = partial(Recomputation(block) if self._recompute == "full" else self._with_cores, forward)
        return lambda *args, **kwargs: (again if torch.is_grad_enabled() else forward)(*args, **kwargs)

    def _with_cores(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return forward(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self._met = True
        out: Tensor = checkpoint(_ATTENTION, *args, use_reentrant=False, **kwargs)
        return out

    def check(self) -> None:
        """After the forward passes of some blocks: raise `UserError` where they have had nothing to recompute."""
        if self._recompute == "selective" and not self._met:
            raise UserError(
                "recompute=selective recomputes torch.nn.functional.scaled_dot_product_attention, and no block of this "
                "rank calls it: choose recompute=full"
            )


def _places(block: nn.Module) -> Iterator[_Place]:
    for module in block.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                yield module, leaf


def _differs(values: Tensor, buffer: Tensor) -> bool:
    return not isinstance(values, FakeTensor) and not torch.equal(values, buffer)


def _get(place: _Place) -> Tensor:
    module, leaf = place
    buffer = module._buffers[leaf]
    assert buffer is not None
    return buffer
