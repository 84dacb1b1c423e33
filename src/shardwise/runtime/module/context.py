"""Context parallelism of a user's module: a rank has some tokens of every row, and its attention sees the others.

The rows of a batch are cut before the module runs, which gets the positions of what is left. In its place
`torch.nn.functional.scaled_dot_product_attention` attends over the whole sequence (`runtime/context/`), where it is
causal and without a mask. Whatever else computes from several tokens would see this rank's alone: `check_tokens` finds
such modules, `TokenLoss` such losses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from shardwise.errors import LayoutError, UserError
from shardwise.layout.axes import CP
from shardwise.layout.context import SequenceCut, gathers_keys
from shardwise.layout.units import UnitPlan
from shardwise.ops.blockwise import Scores
from shardwise.runtime.context import ulysses
from shardwise.runtime.context.cores import ContextCore, attend, fused_kernel
from shardwise.runtime.context.view import local_places
from shardwise.runtime.module.describe import ROOT, call
from shardwise.runtime.module.initial import is_meta
from shardwise.runtime.module.inputs import unpacked
from shardwise.runtime.transport.comms import Comms

POSITIONS = "position_ids"
"""The argument of a forward pass that has the positions of its tokens, as classes of transformers call it."""
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(queries [B, H, S, D], keys [B, K, S, D], values [B, K, S, V], scale) -> [B, H, S, V], causal."""


class CausalAttention(TorchFunctionMode):
    """What calls `scaled_dot_product_attention` gets `attend`. Raises `UserError` for attention of another kind."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*_causal(*args, **(kwargs or {})))


def _causal(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, float]:  # fmt: skip
    """The arguments of causal attention, from those of `scaled_dot_product_attention`."""
    other = {
        "has a mask, such as of a window or of padding": attn_mask is not None,
        "is not causal": not is_causal,
        "has queries for other tokens than keys": query.dim() != 4 or query.shape[2] != key.shape[2],
        f"has dropout ({dropout_p:g}): set attention_dropout to 0": dropout_p > 0,
    }
    if reason := next((reason for reason, so in other.items() if so), ""):
        raise UserError(f"cp cuts sequences inside causal attention, and attention here {reason}; else leave cp out")
    return query, key, value, 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def check_positions(module: nn.Module) -> None:
    """Raise `LayoutError` for a module that takes no positions."""
    if POSITIONS not in inspect.signature(type(module).forward).parameters:
        raise LayoutError(
            f"cp: the forward pass of {type(module).__name__} takes no {POSITIONS}, and a rank has tokens from "
            "the middle of sequences: add that argument, or leave cp out"
        )


class CutRows:
    """A rank's tokens of the rows of batches, and the attention of its blocks."""

    def __init__(self, plan: UnitPlan, comms: Comms, device: torch.device) -> None:
        self._plan, self._comms, self._device = plan, comms, device

    def _cut(self, seq: int) -> SequenceCut:
        return SequenceCut.of(self._plan.layout, seq)

    def places(self, seq: int) -> Tensor:
        """Places of this rank's tokens in a sequence: int64 [S / cp]. Raises `UserError` for one that is not cut into
        equal pieces."""
        cut = self._cut(seq)
        if cut.padded != seq:
            raise UserError(f"cp cuts sequences into equal pieces: {seq} tokens would be {cut.padded} with padding")
        return local_places(cut, self._comms.index(CP), self._device)

    def of(self, batch: Any) -> Any:
        """This rank's tokens: of the tensors of a batch [B, S, ...] with the length of its first one. Anything else
        as it is."""
        seq = _length(batch)
        places = self.places(seq).cpu()
        return _pytree.tree_map(lambda x: x[:, places.to(x.device)] if _has_tokens(x, seq) else x, batch)

    def wrap(self, part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a part, whose attention has the tokens of all ranks."""

        def across(*args: Any, **kwargs: Any) -> Any:
            with CausalAttention(partial(self._attend, part)):
                return forward(*args, **kwargs)

        return across

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward pass of the whole module on this rank's tokens, with their positions. Raises `UserError` for
        labels, from which a module would compute its loss between neighbors."""
        if kwargs.get("labels") is not None:
            raise UserError(
                "labels= has the module shift them by one token, and a rank has neighbors of other ranks' tokens: "
                "compute the loss outside of the module, with targets that are shifted before they are cut"
            )
        given = (args, kwargs)
        if kwargs.get(POSITIONS) is None:
            rows, here = next(x.shape[:2] for x in _pytree.tree_leaves(given) if _has_tokens(x))
            kwargs[POSITIONS] = self.places(here * self._comms.size(CP)).expand(rows, -1).contiguous()
        with unpacked():
            return self.wrap(ROOT, forward)(*args, **kwargs)

    def _attend(self, part: str, *given: Any) -> Tensor:
        *heads, scale = given
        q, k, v = (x.transpose(1, 2) for x in heads)
        layout, comms = self._plan.layout, self._comms
        cut, ranks = self._cut(q.shape[1] * comms.size(CP)), comms.size(CP)
        if layout.ulysses:
            if q.shape[2] % ranks or max(k.shape[2], ranks) % min(k.shape[2], ranks):
                raise UserError(
                    f"ulysses: {ranks} ranks cannot divide {q.shape[2]} heads, {k.shape[2]} of keys: choose ring"
                )
            out = ulysses.attend(comms, part, partial(_whole, scale), cut.seq, q, k, v)
        else:
            kernel = fused_kernel(layout.dtype, scale, q.device)
            core = ContextCore(comms, cut, kernel, part, lambda _, rank: Scores(cut.visible(core.rank, rank).causal))
            out = attend(core, gathers_keys(layout), q, k, v)
        return out.transpose(1, 2)


def _whole(scale: float, *heads: Tensor) -> Tensor:
    """Attention over all tokens of some heads: [B, S, H, D]. Called as an operation, which no mode sees."""
    q, k, v = (x.transpose(1, 2) for x in heads)
    attend = torch.ops.aten.scaled_dot_product_attention
    out: Tensor = attend(q, k, v, None, 0.0, True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _has_tokens(x: Any, seq: int = 0) -> bool:
    """Whether it is a tensor [B, S, ...]; of so many tokens, where that is given."""
    return isinstance(x, Tensor) and x.dim() > 1 and (not seq or x.shape[1] == seq)


def _length(batch: Any) -> int:
    """Tokens of the rows of a batch. Raises `UserError` without any."""
    tensors = [x for x in _pytree.tree_leaves(batch) if _has_tokens(x)]
    if not tensors:
        raise UserError("cp cuts rows along their sequence, and the batch has no tensor [rows, tokens, ...]")
    return int(tensors[0].shape[1])


class TokenLoss:
    """A loss of a batch that is cut: the first one is computed again with its tokens in another order.

    Raises `UserError` where that gives another loss: it is then made of neighbors, as where it shifts the targets.
    """

    def __init__(self, program: Any, loss_fn: Callable[..., Any]) -> None:
        """program: a `ModuleProgram`, whose `run` a loss calls."""
        self._program, self._loss_fn = program, loss_fn

    def __call__(self, run: Callable[..., Any], batch: Any) -> Any:
        outputs: list[Any] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs.append(run(*args, **kwargs))
            return outputs[-1]

        result = self._with(recording, batch)
        roll = partial(_pytree.tree_map, partial(_rolled, _length(batch)))
        again = iter(roll(outputs))
        with torch.no_grad():
            other = self._with(lambda *args, **kwargs: next(again), roll(batch))
        (loss, count), (rolled, others) = (x if isinstance(x, tuple) else (x, 1) for x in (result, other))
        if not torch.allclose(loss.detach(), rolled, rtol=1e-3, equal_nan=True) or float(count) != float(others):
            raise UserError(
                "cp: the loss depends on the order of its tokens, and a rank has some of them: shift targets in the "
                "batch, not in loss_fn, and add up the losses of tokens"
            )
        return result

    def _with(self, run: Callable[..., Any], batch: Any) -> Any:
        """The loss with another forward pass, whether `loss_fn` calls the one that it is given or the module."""
        self._program.run = run
        try:
            return self._loss_fn(run, batch)
        finally:
            del self._program.run


def _rolled(seq: int, x: Any) -> Any:
    return x.detach().roll(1, 1) if _has_tokens(x, seq) else x


def check_tokens(module: nn.Module, example: Any) -> None:
    """Raise `LayoutError` unless tokens meet in causal attention alone: the outputs for an example [B, S] whose rows
    are cut into two rows with their positions are those for whole rows. Nor without an example or values."""
    check_positions(module)
    if example is None or is_meta(module):
        raise LayoutError(
            "cp needs example=, inputs of a forward pass, and a module that is not on the meta device: it is run to "
            "see that tokens meet in attention alone"
        )
    modes = [(child, child.training) for child in module.modules()]
    try:
        same = _same_in_pieces(module.eval(), example, _length(example))
    finally:
        for child, training in modes:
            child.training = training
    if not same:
        raise LayoutError(
            f"cp: tokens of {type(module).__name__} meet elsewhere than in torch's scaled_dot_product_attention, where "
            "alone a rank sees other ranks' tokens: leave cp out"
        )


@torch.no_grad()
def _same_in_pieces(module: nn.Module, example: Any, length: int) -> bool:
    if (seq := length // 4 * 4) < 4:
        raise LayoutError(f"cp: the example has rows of {length} tokens, too few to be cut: give it 4 or more")
    cut = SequenceCut(seq, 2)
    places = torch.cat([local_places(cut, rank, torch.device("cpu")) for rank in range(2)])
    example = _pytree.tree_map(lambda x: x[:, :seq] if _has_tokens(x, length) else x, example)

    def rows(x: Any) -> Any:
        return x[:, places].unflatten(1, (2, -1)).flatten(0, 1) if _has_tokens(x, seq) else x

    def attend(*given: Any) -> Tensor:
        *heads, scale = given
        whole = [x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)[:, :, places.argsort()] for x in heads]
        out = _whole(scale, *(x.transpose(1, 2) for x in whole)).transpose(1, 2)
        return out[:, :, places].unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)

    cut_example = _pytree.tree_map(rows, example)
    shape = next(x.shape[:2] for x in _pytree.tree_leaves(cut_example) if _has_tokens(x))
    positions = places.unflatten(0, (2, -1)).repeat(shape[0] // 2, 1)
    with unpacked():
        expected = _pytree.tree_leaves(call(module, example))
        with CausalAttention(attend):
            found = _pytree.tree_leaves(call(partial(module, **{POSITIONS: positions}), cut_example))
    pairs = [
        (rows(x), y) for x, y in zip(expected, found, strict=False)
        if _has_tokens(x, seq) and x.is_floating_point() and y.shape == rows(x).shape
    ]  # fmt: skip
    return bool(pairs) and all(_near(x.double(), y.double(), torch.finfo(y.dtype).eps) for x, y in pairs)


def _near(x: Tensor, y: Tensor, rounding: float) -> bool:
    """Whether the outputs of pieces are those of whole rows, but for rounding; some classes compute in fp32."""
    return float((x - y).norm()) <= max(1e-6, math.sqrt(rounding)) * float(x.norm())
