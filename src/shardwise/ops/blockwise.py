"""Attention of some queries to some keys, forward and backward, with the log-sum-exp that merges several such blocks.

Each kernel's backward takes the output and the log-sum-exp over *all* keys of a query, and then gives this block's part
of the gradients. Shapes: q and its gradient [B, S, H, D], out [B, S, H, V]; k [B, T, K, D] and v [B, T, K, V] with K
dividing H; the log-sum-exp [B, H, S], in fp32 for bf16. That of a query that sees no key of a block is so low that the
block has no weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.attention import CoreAttention
from shardwise.decoder.modules import soft_cap_

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Scores:
    """Pairs of one block that see each other."""

    causal: bool
    """Whether a query sees the keys up to its own place; else it sees all."""
    allowed: Tensor | None = None
    """[B, S, T]: the pairs, where `causal` does not say it."""
    keep: Callable[[int], Tensor] | None = None
    """Heads -> what each probability [B, H, S, T] is multiplied with under dropout: 0 or 1 / (1 - p)."""


class Kernel(Protocol):
    """Attention of one block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """Gradients of q, k and v, from that of the output over all blocks."""


@dataclass(frozen=True)
class FlashOnCPU:
    """torch's fused kernel for CPUs, which takes float64 as well."""

    scale: float
    """Scale of the products q kᵀ."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        mask = self._mask(scores, q.dtype)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        heads = _by_heads(q, k, _as_wide(v, k))
        out, lse = attend(*heads, 0.0, mask is None and scores.causal, attn_mask=mask, scale=self.scale)
        return out.transpose(1, 2)[..., : v.shape[3]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        mask = self._mask(scores, q.dtype)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        heads = _by_heads(_as_wide(grad, k), q, k, _as_wide(v, k), _as_wide(out, k))
        grads = attend(*heads, lse, 0.0, mask is None and scores.causal, attn_mask=mask, scale=self.scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv[..., : v.shape[3]]

    @staticmethod
    def _mask(scores: Scores, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of the scores: [B, 1, S, T]. The lowest number, not -inf: for a query that sees nothing of a
        block the kernel would return a log-sum-exp of 0, and the block would count."""
        if scores.allowed is None:
            return None
        hidden = ~scores.allowed[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


@dataclass(frozen=True)
class FlashOnCUDA:
    """FlashAttention, for causal and full blocks in bf16."""

    scale: float
    """Scale of the products q kᵀ."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        result: tuple[Tensor, ...] = attend(
            *_by_heads(q, *_repeated(q, k, _as_wide(v, k))), 0.0, scores.causal, scale=self.scale
        )
        out, lse = result[:2]
        return out.transpose(1, 2)[..., : v.shape[3]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of a generator that nothing is drawn from
        attend = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = attend(
            *_by_heads(_as_wide(grad, k), q, *_repeated(q, k, _as_wide(v, k)), _as_wide(out, k)), lse, None, None,
            q.shape[1], k.shape[1], 0.0, scores.causal, state, state[:1], scale=self.scale,
        )  # fmt: skip
        each = k.shape[2], -1
        dk, dv = (x.transpose(1, 2).unflatten(2, each).sum(3, dtype=torch.float32).to(k.dtype) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv[..., : v.shape[3]]


@dataclass(frozen=True)
class Explicit:
    """Matrix products and softmax of c tanh(q kᵀ scale / c). Probabilities are computed again in backward."""

    scale: float
    """Scale of the products q kᵀ."""
    softcap: float = 0.0
    """c; 0 for no bound of the scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        logits = _hide(soft_cap_(self._products(q, k), self.softcap), scores)
        lse = torch.logsumexp(logits, -1, keepdim=True)
        probabilities = logits.sub_(lse.clamp(min=torch.finfo(lse.dtype).min)).exp_()
        if scores.keep is not None:
            probabilities.mul_(scores.keep(q.shape[2]))
        kv = v.transpose(1, 2)
        rows = probabilities.to(v.dtype).unflatten(1, (kv.shape[1], -1)).flatten(2, 3)
        out = torch.matmul(rows, kv).view(*probabilities.shape[:3], -1)
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        grad, out, kv = grad.transpose(1, 2), out.transpose(1, 2), k.shape[2]

        def rows(x: Tensor) -> Tensor:
            """[B, H, S, n] -> [B, K, H / K S, n]: query heads of one key/value head side by side."""
            return x.unflatten(1, (kv, -1)).flatten(2, 3)

        mean = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
        logits = soft_cap_(self._products(q, k), self.softcap)
        slope = (logits / self.softcap).square_().neg_().add_(1) if self.softcap else None
        probabilities = _hide(logits, scores).sub_(lse[..., None]).exp_()
        keep = None if scores.keep is None else scores.keep(q.shape[2])
        kept = probabilities if keep is None else probabilities * keep
        dv = torch.matmul(rows(kept.to(grad.dtype)).mT, rows(grad))
        del kept
        ds = torch.matmul(rows(grad), v.transpose(1, 2).mT).view(probabilities.shape).to(lse.dtype)
        if keep is not None:
            ds.mul_(keep)
        ds.sub_(mean).mul_(probabilities).mul_(self.scale)
        if slope is not None:
            ds.mul_(slope)
        del keep, probabilities, logits, slope
        ds = ds.to(q.dtype)
        dq = torch.matmul(rows(ds), k.transpose(1, 2)).view(q.transpose(1, 2).shape)
        dk = torch.matmul(rows(ds).mT, rows(q.transpose(1, 2)))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        """q kᵀ scale: [B, H, S, T], in fp32 for bf16."""
        rows = (q.transpose(1, 2) * self.scale).unflatten(1, (k.shape[2], -1)).flatten(2, 3)
        products = torch.matmul(rows, k.permute(0, 2, 3, 1)).view(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return products.float() if q.dtype == torch.bfloat16 else products


def _hide(logits: Tensor, scores: Scores) -> Tensor:
    """Set the scores of pairs that do not see each other to -inf."""
    if scores.allowed is not None:
        return logits.masked_fill_(~scores.allowed[:, None], -torch.inf)
    if scores.causal:
        return logits.masked_fill_(torch.ones_like(logits[0, 0], dtype=torch.bool).triu_(1), -torch.inf)
    return logits


def _as_wide(values: Tensor, keys: Tensor) -> Tensor:
    """Values, or what is as wide, with zeros up to the keys' width, for a kernel of one width."""
    missing = keys.shape[3] - values.shape[3]
    return F.pad(values, (0, missing)) if missing else values


def _by_heads(*tensors: Tensor) -> list[Tensor]:
    """[B, S, H, D] -> [B, H, S, D], without a copy."""
    return [x.transpose(1, 2) for x in tensors]


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries, for a kernel without groups."""
    each = q.shape[2] // k.shape[2]
    return (k, v) if each == 1 else (k.repeat_interleave(each, 2), v.repeat_interleave(each, 2))


class Merged:
    """The output of several blocks so far, each weighted by its share of the softmax. A query's first block must have a
    key that it sees."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.lse = lse
        self._out = out.to(lse.dtype).contiguous()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before, into = self.lse[:, :, rows], self._out[:, rows]
        after = torch.logaddexp(before, lse)
        shares = [torch.exp(part - after).transpose(1, 2)[..., None] for part in (before, lse)]
        into.mul_(shares[0]).add_(out * shares[1])
        before.copy_(after)

    def out(self, dtype: torch.dtype) -> Tensor:
        """[B, S, H, D]."""
        return self._out.to(dtype)


class ScoreRule(NamedTuple):
    """From products q kᵀ to the scores of a core of attention."""

    scale: float
    softcap: float
    """c of c tanh(s / c); 0 for none."""
    window: int
    """Keys that a query sees at most; 0 for no bound."""

    @classmethod
    def of(cls, core: CoreAttention) -> Self:
        return cls(core.scale, core.softcap or 0.0, core.window)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether a query at a position sees the key at another. queries, keys: positions, which broadcast."""
        seen = keys <= queries
        return seen & (queries - keys < self.window) if self.window else seen
