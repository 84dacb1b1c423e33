"""Context parallelism of a user's module: a rank has some tokens of every row, and its attention sees the others.

The rows of a batch are cut before the module runs, which gets the positions of what is left. In its place
`torch.nn.functional.scaled_dot_product_attention` attends over the whole sequence (`runtime/context/`), where it is
causal and without a mask. Whatever else computes from several tokens would see this rank's alone: `check_tokens` finds
such modules, `TokenLoss` such losses.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwise.errors import LayoutError, UserError, brief
from shardwise.layout.axes import CP
from shardwise.layout.context import SequenceCut, gathers_keys
from shardwise.layout.units import UnitPlan
from shardwise.ops.blockwise import Scores
from shardwise.runtime.context import ulysses
from shardwise.runtime.context.cores import ContextCore, attend, fused_kernel
from shardwise.runtime.context.view import local_places
from shardwise.runtime.module.describe import ROOT, call
from shardwise.runtime.module.initial import is_meta
from shardwise.runtime.module.inputs import suited, unpacked
from shardwise.runtime.module.recompute import AttentionMode
from shardwise.runtime.transport.comms import Comms

POSITIONS = "position_ids"
"""The argument of a forward pass that has the positions of its tokens, as classes of transformers call it."""
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(queries [B, H, S, D], keys [B, K, S, D], values [B, K, S, V], scale) -> [B, H, S, V], causal."""


class CausalAttention(AttentionMode):
    """What attends gets an `Attend`. Raises `UserError` for attention of another kind."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(*_causal(*args, **kwargs))


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
        self.longest = 0
        """Tokens of the example that has shown where tokens meet: a window may be longer; 0 where none is."""

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
        """This rank's tokens: of the tensors of a batch [B, S, ...] with the length of `tokens_of`. Anything else as
        it is. Raises `UserError` for rows that cannot be cut, or are longer than what was tried."""
        seq = length_of(batch)
        if 0 < self.longest < seq:
            raise UserError(
                f"cp: rows have {seq} tokens and those of example= {self.longest}, which says nothing of longer ones, "
                "as a window may be: give an example of that length"
            )
        places = self.places(seq).cpu()
        return _pytree.tree_map(lambda x: x[:, places.to(x.device)] if _has_tokens(x, seq) else x, batch)

    def wrap(self, part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a part, whose attention has the tokens of all ranks."""

        def across(*args: Any, **kwargs: Any) -> Any:
            with CausalAttention(partial(self._attend, part)):
                return forward(*args, **kwargs)

        return across

    def run(self, forward: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of the whole module on this rank's tokens, with their positions. Raises `UserError` for
        labels, from which a module would compute its loss between neighbors."""
        if kwargs.get("labels") is not None:
            raise UserError(
                "labels= has the module shift them by one token, and a rank has neighbors of other ranks' tokens: "
                "compute the loss outside of the module, with targets that are shifted before they are cut"
            )
        if not _gives_positions(forward, args, kwargs):
            rows, here = tokens_of((args, kwargs)).shape[:2]
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
            kernel = fused_kernel(str(q.dtype).removeprefix("torch."), scale, q.device)
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


def tokens_of(batch: Any) -> Tensor:
    """The tensor of a batch that has a row's tokens: its first one [B, S, ...], and a matrix of floating-point numbers
    only without another. Raises `UserError` without any."""
    tensors = [x for x in _pytree.tree_leaves(batch) if _has_tokens(x)]
    if not tensors:
        raise UserError("cp cuts rows along their sequence, and the batch has no tensor [rows, tokens, ...]")
    return next((x for x in tensors if x.dim() > 2 or not x.is_floating_point()), tensors[0])


def length_of(batch: Any) -> int:
    """Tokens of the rows of a batch. Raises `UserError` without any."""
    return tokens_of(batch).shape[1]


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

        flip, wide = (partial(_pytree.tree_map, partial(_turned, seq)) for seq in (length_of(batch), -1))
        given = [wide(batch), flip(batch)]  # before `loss_fn`, which may take items out
        result, made = self._with(recording, batch), []
        with torch.no_grad():
            for turn, rows in zip((wide, flip), given, strict=True):
                again = iter(turn(outputs))
                made.append(self._with(lambda *args, again=again, **kwargs: next(again), rows))
        (loss, count), (other, others) = (x if isinstance(x, tuple) else (x, 1) for x in made)
        if not torch.allclose(loss, other, rtol=1e-5, equal_nan=True) or float(count) != float(others):
            raise UserError(
                "cp: the loss depends on the order of its tokens, and a rank has some of them: shift targets in the "
                "batch, not in loss_fn or the module, and add up the losses of tokens"
            )
        return result

    def _with(self, run: Callable[..., Any], batch: Any) -> Any:
        """The loss with another forward pass, whether `loss_fn` calls the one that it is given or the module."""
        self._program.run = run
        try:
            return self._loss_fn(run, batch)
        finally:
            del self._program.run


def _turned(seq: int, x: Any) -> Any:
    """Detached and in fp32 at least; where it has `seq` tokens they are in the other order, and with any `seq` a number
    of all tokens, such as a module's loss, is NaN."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().float() if x.is_floating_point() and x.dtype.itemsize < 4 else x.detach()
    if seq > 0 and x.is_floating_point() and not x.dim():
        return x * math.nan
    return x.flip(1) if _has_tokens(x, seq) and seq > 0 else x


def check_tokens(module: nn.Module, example: Any) -> None:
    """Raise `LayoutError` unless tokens meet in causal attention alone: the outputs for an example [B, S] whose rows
    are cut into two rows with their positions are those for whole rows. Nor without an example or values."""
    check_positions(module)
    if example is None or is_meta(module):
        raise LayoutError(
            "cp needs example=, inputs of a forward pass, and a module that is not on the meta device: it is run to "
            "see that tokens meet in attention alone"
        )
    probe = copy.deepcopy(module).eval()
    if any(p.is_floating_point() and p.dtype.itemsize < 4 for p in probe.parameters()):
        probe.float()
    length, example = length_of(example), suited(probe, example)
    with torch.no_grad(), torch.random.fork_rng([]):
        for parameter in probe.parameters():  # zeros would hide what they multiply
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.05)
        try:
            same = _same_in_pieces(probe, example, length)
        except UserError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise LayoutError(
                f"cp: {type(module).__name__} does not run on parts of the example's rows: {brief(error, 160)}"
            ) from None
    if not same:
        raise LayoutError(
            f"cp: tokens of {type(module).__name__} meet elsewhere than in torch's scaled_dot_product_attention, where "
            "alone a rank sees other ranks' tokens: leave cp out"
        )


def _same_in_pieces(module: nn.Module, example: Any, length: int) -> bool:
    if (seq := length // 4 * 4) < 4:
        raise LayoutError(f"cp: the example has rows of {length} tokens, too few to be cut: give it 4 or more")
    first = tokens_of(example)
    places = torch.cat([local_places(SequenceCut(seq, 2), rank, first.device) for rank in range(2)])
    example = _pytree.tree_map(lambda x: x[:, :seq] if _has_tokens(x, length) else x, example)

    def rows(x: Any) -> Any:
        if not _has_tokens(x, seq):
            return x.repeat_interleave(2, 0) if isinstance(x, Tensor) and x.dim() and len(x) == len(first) else x
        x = x.expand(len(first), *x.shape[1:]) if len(x) == 1 else x  # positions of all rows
        return x[:, places].unflatten(1, (2, -1)).flatten(0, 1)

    def attend(*given: Any) -> Tensor:
        *heads, scale = given
        whole = [x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)[:, :, places.argsort()] for x in heads]
        out = _whole(scale, *(x.transpose(1, 2) for x in whole)).transpose(1, 2)
        return out[:, :, places].unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)

    def cut(*args: Any, **kwargs: Any) -> Any:
        if not _gives_positions(module, args, kwargs):
            kwargs[POSITIONS] = places.unflatten(0, (2, -1)).repeat(len(first), 1)
        return module(*args, **kwargs)

    with unpacked():
        expected = _pytree.tree_leaves(call(module, example))
        with CausalAttention(attend):
            found = _pytree.tree_leaves(call(cut, _pytree.tree_map(rows, example)))
    pairs = [
        (rows(x), y) for x, y in zip(expected, found, strict=False)
        if _has_tokens(x, seq) and x.is_floating_point() and y.shape == rows(x).shape
    ]  # fmt: skip
    if not pairs:
        raise LayoutError(f"cp: {type(module).__name__} returns no tensor [rows, tokens, ...], so nothing can be cut")
    return all(_near(x.double(), y.double(), torch.finfo(y.dtype).eps) for x, y in pairs)


def _gives_positions(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has positions, by name or by place."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(POSITIONS) is not None


def _near(x: Tensor, y: Tensor, rounding: float) -> bool:
    """Whether the outputs of pieces are those of whole rows, but for rounding; some classes compute in fp32."""
    return float((x - y).norm()) <= max(1e-6, math.sqrt(rounding)) * float(x.norm())
