"""Attention over a paged cache: what an engine step's tokens see is gathered page by page, or read where it is.

A block's cache is [2, kv heads, slots, head dim], keys and values, or [1, 1, slots, width] of latent attention, keys
whose first numbers are the values; a page is `size` slots that follow each other, so that a sequence whose pages do,
too, is a view of them. An engine step's tokens come as one row of T tokens: single tokens of B sequences first, which
are attended in one go, then chunks, one by one.

Single tokens see whole pages, whose end is masked: shapes then change with the pages and not with every token,
and oneDNN need not compile its products anew in every engine step. A masked key weighs nothing, and nothing times a
number is nothing, but what was never written, or belonged to somebody else, may be no number: a page is cleared when a
sequence begins it."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.modules import soft_cap_
from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.cache_shape import CacheShape
from shardwise.ops.limits import SCORES


@dataclass(frozen=True)
class AttentionGroup:
    """Rows [first, last) of an engine step that are attended together. rows: of queries in each sequence, B sequences.

    length: of each sequence. start: the first of its slots, where they follow each other; else `pages` names those in
    which they lie, equally many of each sequence, and `skip` the slots before the first that is read. shortest: of
    several sequences, length of the shortest. mask: [B, 1, rows, length], True where a query sees a key; None where it
    sees all of them. causal: rows see what was before them, and there is nothing else.
    """

    first: int
    last: int
    length: int
    sequences: int = 1
    start: int = -1
    pages: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    skip: int = 0
    shortest: int = 0

    def within(self, rule: ScoreRule, size: int, device: torch.device) -> "AttentionGroup":
        """The group where queries see the keys of a window alone: earlier ones that none sees are left out. size: slots
        of a page."""
        if not rule.window or self.length <= rule.window:
            return self
        rows = (self.last - self.first) // self.sequences
        first = max(0, (self.shortest or self.length) - rows - rule.window + 1)
        if self.sequences > 1:
            first -= first % size
        table, start, skip = self.pages, self.start + first, first % size
        if table is not None:
            table = table.view(self.sequences, -1)[:, first // size :].flatten()
        keys = torch.arange(first, self.length, device=device)
        mask: Tensor | None = None
        if self.sequences > 1:
            ends = self.length if self.mask is None else self.mask.sum(-1, keepdim=True)
            mask = ((keys < ends) & (keys >= ends - rule.window)).expand(self.sequences, 1, 1, -1)
        elif rows > 1:
            queries = torch.arange(self.length - rows, self.length, device=device)[:, None]
            mask = rule.seen(queries, keys)[None, None]
        length = self.length - first
        return replace(self, length=length, start=start, pages=table, skip=skip, mask=mask, causal=False)


@dataclass
class Rows(Batch):
    """An engine step as the decoder takes it: B = 1 sequence of T tokens. slots: [T], where their keys and values go.

    begun: pages that are not full after the step, and had nothing of their sequence before; None for none. wanted: rows
    whose logits are wanted; None for all.
    """

    slots: Tensor = field(default_factory=lambda: torch.empty(0))
    groups: tuple[AttentionGroup, ...] = ()
    begun: Tensor | None = None
    wanted: Tensor | None = None


@dataclass
class DecodeRows(Rows):
    """One token of each of B sequences in tensors whose shapes do not depend on the sequences' lengths."""

    table: Tensor = field(default_factory=lambda: torch.empty(0))
    """Pages of each sequence: int64 [B, P]. Entries past its length name any page of finite numbers."""
    lengths: Tensor = field(default_factory=lambda: torch.empty(0))
    """Tokens of each sequence, the new one included: int64 [B]."""

    def seen(self, rule: ScoreRule, length: int) -> Tensor:
        """Mask [B, 1, 1, length], True where the token sees a key; made once for all blocks of a window."""

        def mask() -> Tensor:
            keys, ends = torch.arange(length, device=self.lengths.device), self.lengths[:, None]
            return rule.seen(ends - 1, keys[None])[:, None, None]

        seen: Tensor = self.shared(f"seen in window {rule.window}", mask)
        return seen


class PagedCache:
    """Keys and values of one block on one rank. tensor: [planes, K, slots, D]. V: numbers of attention's output for a
    head of queries. size: slots of a page."""

    def __init__(self, shape: CacheShape, pages: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.size = shape, size
        self.tensor = torch.empty(shape.planes, shape.heads, pages * size, shape.width, dtype=dtype, device=device)
        self._rows = self.tensor.flatten(0, 1)
        self._pages = self._rows.view(shape.rows, pages, size * shape.width)
        self._cpu = device.type == "cpu"

    def attend(self, heads: Tensor, rows: Rows, rule: ScoreRule) -> Tensor:
        """Keep a step's keys and values, and attend. heads: [T, H + planes K, D], queries first; returns [T, H V]."""
        self.store(heads, rows)
        q = heads[:, : -self.shape.rows]
        if isinstance(rows, DecodeRows):
            # q: [B, H, D]; returns [B, H V]
            shape = self.shape
            kv = self._pages.index_select(1, rows.table.flatten())
            kv = kv.view(shape.planes, shape.heads, len(q), -1, shape.width)
            return _several(q, *keys_and_values(kv, shape.values), rows.seen(rule, kv.shape[3]), rows, rule)
        groups = rows.groups
        if rule.window:
            name = f"groups of window {rule.window}"
            groups = rows.shared(name, lambda: [group.within(rule, self.size, q.device) for group in rows.groups])
        if len(groups) == 1:
            return self._group(q, groups[0], rows, rule)
        return torch.cat([self._group(q[g.first : g.last], g, rows, rule) for g in groups])

    def store(self, heads: Tensor, rows: Rows) -> None:
        """Keep keys and values [T, ... planes K, D], the last ones of `heads`, in the slots of the rows."""
        if rows.begun is not None:
            self._pages.index_fill_(1, rows.begun, 0)
        self._rows.index_copy_(1, rows.slots, heads[:, -self.shape.rows :].transpose(0, 1))

    def gathered(self, group: AttentionGroup) -> Tensor:
        """Keys and values of a group: [planes, K, sequences, length, D]."""
        if group.pages is None:
            return self.tensor[:, :, None, group.start : group.start + group.length]
        shape = self.shape
        kv = self._pages.index_select(1, group.pages)
        kv = kv.view(shape.planes, shape.heads, group.sequences, -1, shape.width)
        return kv[:, :, :, group.skip : group.skip + group.length]

    def _group(self, q: Tensor, group: AttentionGroup, rows: Rows, rule: ScoreRule) -> Tensor:
        """q: [rows of all its sequences, H, D]; returns [rows, H V]."""
        kv, values = self.gathered(group), self.shape.values
        if len(q) == 1:
            return _one(q, kv.squeeze(2), values, rule)
        latent = len(kv) == 1
        if (self._cpu or rule.softcap) and len(q) == group.sequences:
            return _several(q, *keys_and_values(kv, values), group.mask, rows, rule)
        k, v = keys_and_values(kv.transpose(1, 2), values)
        q = q.unflatten(0, (group.sequences, -1)).transpose(1, 2)
        if rule.softcap or latent or (q.dtype == torch.bfloat16 and self._cpu):
            # torch's fused attention has no soft cap and no values narrower than keys, and takes several times as long
            # in bf16 as what is done here.
            out = _products(q, k, v, group.mask, rule)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=rule.scale,
                enable_gqa=q.shape[1] != self.shape.heads,
            )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


def keys_and_values(kv: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """The two planes, or the keys and their first numbers. values: of a head."""
    return (kv[0], kv[1]) if len(kv) == 2 else (kv[0], kv[0][..., :values])


def _one(q: Tensor, kv: Tensor, values: int, rule: ScoreRule) -> Tensor:
    """One query of one sequence, which sees all there is; the heads that share a key are rows of one product.

    q: [1, H, D]; kv: [planes, K, L, D]; returns [1, H V].
    """
    if q.device.type != "cpu" and not rule.softcap:
        grouped = q.view(1, kv.shape[1], -1, q.shape[2])
        k, v = keys_and_values(kv, values)
        return F.scaled_dot_product_attention(grouped, k[None], v[None], scale=rule.scale).reshape(1, -1)
    if q.dtype == torch.bfloat16:
        # For so few rows oneDNN takes longer to begin with a product in bf16 than fp32 takes to end it.
        return _one(q.float(), kv.float(), values, rule).to(q.dtype)
    (k, v), width = keys_and_values(kv, values), q.shape[2]
    scores = torch.bmm((q * rule.scale).view(len(k), -1, width), k.transpose(1, 2))
    return torch.bmm(torch.softmax(soft_cap_(scores, rule.softcap), -1), v).view(1, -1)


def _several(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Rows, rule: ScoreRule) -> Tensor:
    """One query of each of the B sequences of a step's first group as products over all of them. torch's softmax
    computes in fp32, or wider.

    q: [B, H, D]; k: [K, B, L, D]; v: [K, B, L, V]; mask: [B, 1, 1, L], True where a query sees a key; returns [B, H V].
    """
    grouped = (q * rule.scale).unflatten(1, (len(k), -1)).transpose(0, 1)
    scores = soft_cap_(torch.matmul(grouped, k.transpose(2, 3)), rule.softcap)
    if mask is not None:
        name = f"unseen in window {rule.window}"
        scores += rows.shared(name, lambda: torch.zeros_like(scores).masked_fill_(~mask[:, 0], -torch.inf))
    return torch.matmul(torch.softmax(scores, -1), v).transpose(0, 1).flatten(1)


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Many queries of one sequence as products, some rows at a time; softmax in fp32 or wider.

    q: [1, H, n, D]; k: [1, K, L, D]; v: [1, K, L, V]; mask: [1, 1, n, L], None for n = L rows that see what was before
    them. Returns [1, H, n, V].
    """
    _, heads, rows, width = q.shape
    kv, length = k.shape[1:3]
    out, wide = q.new_empty(*q.shape[:3], v.shape[3]), torch.promote_types(q.dtype, torch.float32)
    step = max(1, SCORES // (heads * length))
    for a in range(0, rows, step):
        b = min(a + step, rows)
        grouped = (q[0, :, a:b] * rule.scale).reshape(kv, -1, width)
        scores = torch.matmul(grouped, k[0].transpose(1, 2)).view(heads, b - a, length)
        if mask is None:
            seen = torch.ones(b - a, length, dtype=torch.bool, device=q.device).tril_(a)
        else:
            seen = mask[0, 0, a:b]
        if rule.softcap:
            scores = soft_cap_(scores.to(wide), rule.softcap)
        scores.masked_fill_(~seen, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
        out[0, :, a:b] = torch.matmul(weights.view(kv, -1, length), v[0]).view(heads, b - a, -1)
    return out
