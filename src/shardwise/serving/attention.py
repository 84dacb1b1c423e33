"""Attention over a paged cache: what a turn's tokens see is gathered, or read where it is.

A block's cache is [2, kv heads, slots, head dim], keys and values; a page is `size` slots that follow each other, so
that a sequence whose pages do, too, is a view of them. A turn's tokens come as one row of T tokens: single tokens of B
sequences first, which are attended in one go, then chunks, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.serving.scheduler import Chunk, Turn


@dataclass(frozen=True)
class Group:
    """Rows [first, last) of a turn that are attended together. rows: of queries in each sequence, B sequences.

    start, length: the slots, where they follow each other; else `slots` [B * length] names them. mask: [B, 1, rows,
    length], True where a query sees a key; None where it sees all of them. causal: rows see what was before them, and
    there is nothing else.
    """

    first: int
    last: int
    length: int
    start: int = -1
    slots: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False


@dataclass
class Rows(Batch):
    """A turn as the decoder takes it: B = 1 sequence of T tokens. slots: [T], where their keys and values go.

    wanted: rows whose logits are wanted; None for all.
    """

    slots: Tensor = field(default_factory=lambda: torch.empty(0))
    groups: tuple[Group, ...] = ()
    wanted: Tensor | None = None


def rows_of(turn: Turn, size: int, device: torch.device, *, score: bool = False) -> Rows:
    """What the decoder is to compute in a turn. size: tokens of a page. score: all logits are wanted."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    for chunk in turn.chunks:
        sequence = chunk.sequence
        ids += sequence.tokens[chunk.start : chunk.stop]
        positions += range(chunk.start, chunk.stop)
        slots += [sequence.pages[p // size] * size + p % size for p in range(chunk.start, chunk.stop)]
        if chunk.wanted:
            wanted.append(len(ids) - 1)
    numbers = torch.tensor([ids, positions, slots], dtype=torch.int64, device=device)
    every = score or len(wanted) == len(ids)
    return Rows(
        numbers[0:1], numbers[1:2], numbers[1:2], None, numbers[1:2], numbers[1:2],
        slots=numbers[2], groups=tuple(_groups(turn, size, device)),
        wanted=None if every else torch.tensor(wanted, dtype=torch.int64, device=device),
    )  # fmt: skip


def _groups(turn: Turn, size: int, device: torch.device) -> list[Group]:
    single = [chunk for chunk in turn.chunks if chunk.stop - chunk.start == 1]
    found, at = [], len(single)
    assert all(chunk.stop - chunk.start == 1 for chunk in turn.chunks[: len(single)])
    if len(single) == 1:
        found.append(_alone(single[0], 0, size, device))
    elif single:
        found.append(_together(single, size, device))
    for chunk in turn.chunks[len(single) :]:
        found.append(_alone(chunk, at, size, device))
        at += chunk.stop - chunk.start
    return found


def _alone(chunk: Chunk, first: int, size: int, device: torch.device) -> Group:
    rows, length = chunk.stop - chunk.start, chunk.stop
    pages = chunk.sequence.pages[: -(-length // size)]
    mask, causal = None, rows > 1 and rows == length
    if rows > 1 and not causal:
        mask = torch.ones(rows, length, dtype=torch.bool, device=device).tril_(chunk.start)[None, None]
    if pages[-1] - pages[0] == len(pages) - 1 and pages == list(range(pages[0], pages[-1] + 1)):
        return Group(first, first + rows, length, pages[0] * size, mask=mask, causal=causal)
    slots = _slots([pages], size, device)[0, :length]
    return Group(first, first + rows, length, slots=slots, mask=mask, causal=causal)


def _together(chunks: list[Chunk], size: int, device: torch.device) -> Group:
    """Single tokens of several sequences: each sees its own keys, and what pads them up to the longest is masked."""
    lengths = [chunk.stop for chunk in chunks]
    longest = max(lengths)
    pages = [chunk.sequence.pages[: -(-chunk.stop // size)] for chunk in chunks]
    most = -(-longest // size)
    # Padding must be keys that were written: what was never written may be no number.
    slots = _slots([own + own[:1] * (most - len(own)) for own in pages], size, device)[:, :longest]
    mask = None
    if min(lengths) < longest:
        there = torch.arange(longest, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
        slots = torch.where(there, slots, slots[:, :1])
        mask = there[:, None, None]
    return Group(0, len(chunks), longest, slots=slots.reshape(-1), mask=mask)


def _slots(pages: list[list[int]], size: int, device: torch.device) -> Tensor:
    """[B, pages * size]: the slots of equally many pages of each sequence."""
    table = torch.tensor(pages, dtype=torch.int64, device=device)
    return (table[:, :, None] * size + torch.arange(size, device=device)).flatten(1)


class PagedCache:
    """Keys and values of one block on one rank: [2, kv heads, slots, head dim]. heads: K, of keys as of values."""

    def __init__(self, heads: int, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads = heads
        self.tensor = torch.empty(2, heads, slots, width, dtype=dtype, device=device)
        self._rows = self.tensor.flatten(0, 1)
        self._cpu = device.type == "cpu"

    def attend(self, heads: Tensor, rows: Rows) -> Tensor:
        """Keep a turn's keys and values, and attend. heads: [T, H + 2 K, D], queries first; returns [T, H D]."""
        self._rows.index_copy_(1, rows.slots, heads[:, -2 * self.heads :].transpose(0, 1))
        q = heads[:, : -2 * self.heads]
        if len(rows.groups) == 1:
            return self._group(q, rows.groups[0])
        return torch.cat([self._group(q[g.first : g.last], g) for g in rows.groups])

    def _group(self, q: Tensor, group: Group) -> Tensor:
        """q: [rows of all its sequences, H, D]; returns [rows, H D]."""
        if group.slots is None:
            kv = self.tensor[:, :, group.start : group.start + group.length]
        else:
            kv = self._rows.index_select(1, group.slots).unflatten(0, (2, -1))
        sequences = 1 if group.slots is None else len(group.slots) // group.length
        if len(q) == sequences:
            if sequences == 1:
                return _one(q, kv)
            if self._cpu:
                return _several(q, kv.unflatten(2, (sequences, -1)), group.mask)
        k, v = kv.unflatten(2, (sequences, -1)).transpose(1, 2)
        q = q.unflatten(0, (sequences, -1)).transpose(1, 2)
        if q.dtype == torch.bfloat16 and self._cpu:
            # torch's fused attention takes several times as long in bf16 as what is done here.
            out = _products(q, k, v, group.mask)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, is_causal=group.causal, enable_gqa=q.shape[1] != self.heads
            )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


def _one(q: Tensor, kv: Tensor) -> Tensor:
    """One query of one sequence, which sees all there is; the heads that share a key are rows of one product.

    q: [1, H, D]; kv: [2, K, L, D]; returns [1, H D].
    """
    grouped = q.view(1, kv.shape[1], -1, q.shape[2])
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # torch's fused attention takes several times as long in bf16 for few rows.
        k, v = kv.float()
        found = F.scaled_dot_product_attention(grouped.float(), k[None], v[None]).to(q.dtype)
    else:
        found = F.scaled_dot_product_attention(grouped, kv[:1], kv[1:])
    return found.view(1, -1)


def _several(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """One query of each of B sequences as products over all of them; softmax in fp32, or wider.

    q: [B, H, D]; kv: [2, K, B, L, D]; mask: [B, 1, 1, L], None where all is seen. Returns [B, H D].
    """
    k, v = kv
    grouped = (q * q.shape[2] ** -0.5).unflatten(1, (len(k), -1)).transpose(0, 1)
    scores = torch.matmul(grouped, k.transpose(2, 3))
    if mask is not None:
        scores.masked_fill_(~mask[:, 0], -torch.inf)
    wide = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    return torch.matmul(weights, v).transpose(0, 1).flatten(1)


_SCORES = 1 << 22
"""Scores that are held at a time."""


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Many queries of one sequence as products, some rows at a time; softmax in fp32.

    q: [1, H, n, D]; k, v: [1, K, L, D]; mask: [1, 1, n, L], None for n = L rows that see what was before them. Returns
    q's shape.
    """
    _, heads, rows, width = q.shape
    kv, length = k.shape[1:3]
    out = torch.empty_like(q)
    step = max(1, _SCORES // (heads * length))
    for a in range(0, rows, step):
        b = min(a + step, rows)
        grouped = (q[0, :, a:b] * width**-0.5).reshape(kv, -1, width)
        scores = torch.matmul(grouped, k[0].transpose(1, 2)).view(heads, b - a, length)
        if mask is None:
            seen = torch.ones(b - a, length, dtype=torch.bool, device=q.device).tril_(a)
        else:
            seen = mask[0, 0, a:b]
        scores.masked_fill_(~seen, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out[0, :, a:b] = torch.matmul(weights.view(kv, -1, length), v[0]).view(heads, b - a, width)
    return out
