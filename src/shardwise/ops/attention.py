"""The core of attention as the decoder has it, with the settings of a run.

Attention in blocks of queries, for what torch's fused kernels lack: soft caps, windows and, on a CPU, values
narrower than keys.

Saves queries, keys, values and the output, as a fused kernel does; backward recomputes the probabilities. Keys that no
query of a block sees (later ones, and ones before the window) are left out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention
from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.context import Core, OpContext
from shardwise.ops.limits import QUERY_ROWS


def core_attention(core: CoreAttention, at: OpContext) -> None:
    """The decoder's own core: of the layout's kind, on the heads that are here."""
    core.kind, core.first_head = at.options.attention, at.first_head


def core_across_ranks(core: CoreAttention, at: OpContext) -> Core:
    """The core over sequences that are cut over ranks."""
    assert at.across_ranks is not None
    return at.across_ranks(core)


Sequence = tuple[Tensor, ...]
"""Tensors of one sequence, [heads, S, D] each."""


def _blocks(rule: ScoreRule, seq: int) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that they see) of a sequence of `seq` tokens."""
    for a in range(0, seq, QUERY_ROWS):
        b = min(a + QUERY_ROWS, seq)
        yield slice(a, b), slice(max(0, a - rule.window + 1) if rule.window else 0, b)


def _hidden(rule: ScoreRule, rows: slice, keys: slice, documents: Tensor | None, device: torch.device) -> Tensor:
    """[queries, keys]: whether a query does not see a key. documents: [S]."""
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    seen = rule.seen(queries, torch.arange(keys.start, keys.stop, device=device))
    return ~(seen if documents is None else seen & (documents[rows, None] == documents[keys]))


class _BlockedAttention(torch.autograd.Function):
    """q: [B, S, H, D]; k: [B, S, K, D] and v: [B, S, K, V] with K dividing H; documents: [B, S] or None. Returns
    [B, S, H, V]."""

    @staticmethod
    def forward(ctx: Any, rule: ScoreRule, documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v.new_empty(*q.shape[:3], v.shape[3])
        for b, (qs, ks, vs, into) in enumerate(_sequences(q, k, v, out)):
            for rows, keys in _blocks(rule, q.shape[1]):
                hidden = _hidden(rule, rows, keys, None if documents is None else documents[b], q.device)
                into[:, rows] = _attended(rule, qs[:, rows], ks[:, keys], vs[:, keys], hidden)
        ctx.rule, ctx.documents = rule, documents
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out = ctx.saved_tensors
        made = tuple(torch.empty_like(x) for x in (q, k, v))
        for b, given in enumerate(_sequences(q, k, v, out, grads[0], *made)):
            _backward(ctx.rule, given[:5], None if ctx.documents is None else ctx.documents[b], given[5:])
        return None, None, *made


def _sequences(*tensors: Tensor) -> Iterator[Sequence]:
    return zip(*(x.transpose(1, 2).unbind() for x in tensors), strict=True)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True)


def _grouped(x: Tensor, shared: int) -> Tensor:
    """Rows of all heads [H, n, D] as rows of the `shared` heads of keys and values: [K, H / K n, D]."""
    return _wide(x).view(shared, -1, x.shape[2])


def _attended(rule: ScoreRule, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The output of some queries [H, n, D], which see keys and values [K, m, D] but for `hidden` ones [n, m]."""
    p = _probabilities(rule, _grouped(q, len(k)), _wide(k), hidden)[0]
    return torch.bmm(p, _wide(v)).view(*q.shape[:2], -1)


def _probabilities(rule: ScoreRule, q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """([K, H / K queries, keys], the tanh of capped scores). q: [K, H / K queries, D]; k: [K, keys, D]."""
    scores, tanh = torch.bmm(q, k.mT), None
    if rule.softcap:
        tanh = scores.mul_(rule.scale / rule.softcap).tanh_()
        scores = tanh * rule.softcap
    else:
        scores.mul_(rule.scale)
    scores.view(len(k), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, -1), tanh


def _backward(rule: ScoreRule, given: Sequence, documents: Tensor | None, into: Sequence) -> None:
    """The gradients of one sequence. given: q, k, v, output and its gradient; into: for those of q, k and v."""
    q, k, v, out, grad = given
    keys_grad, values_grad = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    for rows, keys in _blocks(rule, q.shape[1]):
        hidden = _hidden(rule, rows, keys, documents, q.device)
        block = q[:, rows], k[:, keys], v[:, keys], out[:, rows], grad[:, rows]
        into[0][:, rows] = _block_backward(rule, block, hidden, keys_grad[:, keys], values_grad[:, keys])
    into[1].copy_(keys_grad)
    into[2].copy_(values_grad)


def _block_backward(rule: ScoreRule, given: Sequence, hidden: Tensor, keys_grad: Tensor, values_grad: Tensor) -> Tensor:
    """The gradient of some queries [H, n, D]; those of keys and values [K, m, D] are added to what is there."""
    q, k, v, out, grad = given
    low_q, low_grad, wide_k = _grouped(q, len(k)), _grouped(grad, len(k)), _wide(k)
    p, tanh = _probabilities(rule, low_q, wide_k, hidden)
    values_grad += torch.bmm(p.mT, low_grad)
    mean = (low_grad * _grouped(out, len(k))).sum(-1, keepdim=True)
    scores = torch.bmm(low_grad, _wide(v).mT).sub_(mean).mul_(p)
    del p
    if tanh is not None:
        scores.mul_(tanh.square_().neg_().add_(1))
    del tanh
    scores.mul_(rule.scale)
    keys_grad += torch.bmm(scores.mT, low_q)
    return torch.bmm(scores, wide_k).view(q.shape)


def goes_by_blocks(core: CoreAttention, at: OpContext) -> bool:
    """Whether fused attention has this form: padding values to the keys' width takes ten times as long in bf16."""
    return not core.plain or (core.narrow and at.options.device == "cpu")


def blocked_attention(core: CoreAttention, at: OpContext) -> Callable[..., Tensor] | None:
    """The form of a core that is not plain, in place of a fused kernel."""
    if not goes_by_blocks(core, at):
        return None
    rule = ScoreRule.of(core)

    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out: Tensor = _BlockedAttention.apply(rule, batch.documents, q, k, v)  # type: ignore[no-untyped-call]
        return out

    return forward
