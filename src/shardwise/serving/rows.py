"""The tokens of an engine step as the decoder takes them: one row of all sequences, in groups that attend together."""

from __future__ import annotations

import torch

from shardwise.ops.paged import AttentionGroup, Rows
from shardwise.serving.scheduler import Chunk, EngineStep


def rows_of(turn: EngineStep, size: int, device: torch.device, *, score: bool = False) -> Rows:
    """What the decoder is to compute in a turn. size: tokens of a page. score: all logits are wanted."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    begun: list[int] = []
    for chunk in turn.chunks:
        sequence = chunk.sequence
        ids += sequence.tokens[chunk.start : chunk.stop]
        positions += range(chunk.start, chunk.stop)
        slots += [sequence.pages[p // size] * size + p % size for p in range(chunk.start, chunk.stop)]
        if chunk.stop % size and chunk.stop - chunk.stop % size >= chunk.start:
            begun.append(sequence.pages[chunk.stop // size])
        if chunk.wanted:
            wanted.append(len(ids) - 1)
    numbers = torch.tensor([ids, positions, slots], dtype=torch.int64, device=device)
    every = score or len(wanted) == len(ids)
    return Rows(
        numbers[0:1], numbers[1:2], numbers[1:2], None, numbers[1:2], numbers[1:2],
        slots=numbers[2], groups=tuple(_groups(turn, size, device)),
        begun=torch.tensor(begun, dtype=torch.int64, device=device) if begun else None,
        wanted=None if every else torch.tensor(wanted, dtype=torch.int64, device=device),
    )  # fmt: skip


def _groups(turn: EngineStep, size: int, device: torch.device) -> list[AttentionGroup]:
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


def _alone(chunk: Chunk, first: int, size: int, device: torch.device) -> AttentionGroup:
    rows, length = chunk.stop - chunk.start, chunk.stop
    pages = chunk.sequence.pages[: -(-length // size)]
    mask, causal = None, rows > 1 and rows == length
    if rows > 1 and not causal:
        mask = torch.ones(rows, length, dtype=torch.bool, device=device).tril_(chunk.start)[None, None]
    if pages[-1] - pages[0] == len(pages) - 1 and pages == list(range(pages[0], pages[-1] + 1)):
        return AttentionGroup(first, first + rows, length, start=pages[0] * size, mask=mask, causal=causal)
    table = torch.tensor(pages, dtype=torch.int64, device=device)
    return AttentionGroup(first, first + rows, length, pages=table, mask=mask, causal=causal)


def _together(chunks: list[Chunk], size: int, device: torch.device) -> AttentionGroup:
    """Single tokens of several sequences: each sees its own keys, and what fills its last page, and pages up to those
    of the longest, is masked."""
    lengths = [chunk.stop for chunk in chunks]
    most = -(-max(lengths) // size)
    table: list[int] = []
    for chunk in chunks:
        own = chunk.sequence.pages[: -(-chunk.stop // size)]
        table += own + own[:1] * (most - len(own))
    mask = None
    if min(lengths) < most * size:
        there = torch.arange(most * size, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
        mask = there[:, None, None]
    pages = torch.tensor(table, dtype=torch.int64, device=device)
    return AttentionGroup(
        0, len(chunks), most * size, sequences=len(chunks), pages=pages, mask=mask, shortest=min(lengths)
    )
