"""The tokens of an engine step as the decoder takes them: one row of all sequences, in groups that attend together."""

import torch
import torch.nn.functional as F

from shardwise.layout.context import PageCut
from shardwise.ops.paged import AttentionGroup, Rows
from shardwise.runtime.context.cache import ContextRows
from shardwise.serving.scheduler import Chunk, EngineStep


def rows_of(step: EngineStep, size: int, device: torch.device) -> Rows:
    """The decoder's input in an engine step. size: tokens of a page."""
    numbers, begun, wanted = _numbers(step, PageCut(size), device)
    return Rows(
        numbers[0:1], numbers[1:2], numbers[1:2], None, numbers[1:2], numbers[1:2],
        slots=numbers[2], groups=tuple(_groups(step, size, device)), begun=begun, wanted=wanted,
    )  # fmt: skip


def context_rows_of(step: EngineStep, cut: PageCut, rank: int, device: torch.device) -> ContextRows:
    """A context-parallel rank's part of an engine step."""
    numbers, begun, wanted = _numbers(step, cut, device)
    _, queries, slots = numbers
    here = (queries % cut.page // cut.slots == rank).nonzero().squeeze(1)
    rows = -(-step.tokens // cut.cp)
    mine = F.pad(numbers[:2], (0, rows * cut.cp - step.tokens))[:, rank * rows : (rank + 1) * rows]
    ids, positions = mine[0:1], mine[1:2]
    return ContextRows(
        ids, positions, positions, None, positions, positions,
        slots=slots[here], groups=tuple(_shares(step, cut, rank, device)), begun=begun, wanted=wanted,
        queries=queries, kept=here,
    )  # fmt: skip


def _numbers(
    step: EngineStep, cut: PageCut, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(id, position and slot of every token: [3, T]; pages that are begun and not filled; rows whose logits are wanted)
    of an engine step, with None as in `Rows`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    begun: list[int] = []
    size = cut.page
    for chunk in step.chunks:
        sequence = chunk.sequence
        ids += sequence.tokens[chunk.start : chunk.stop]
        positions += range(chunk.start, chunk.stop)
        slots += [sequence.pages[p // size] * cut.slots + p % cut.slots for p in range(chunk.start, chunk.stop)]
        if chunk.stop % size and chunk.stop - chunk.stop % size >= chunk.start:
            begun.append(sequence.pages[chunk.stop // size])
        wanted += [len(ids) - chunk.stop + row for row in chunk.rows]
    numbers = torch.tensor([ids, positions, slots], dtype=torch.int64, device=device)
    return (
        numbers,
        torch.tensor(begun, dtype=torch.int64, device=device) if begun else None,
        None if len(wanted) == len(ids) else torch.tensor(wanted, dtype=torch.int64, device=device),
    )


def _shares(step: EngineStep, cut: PageCut, rank: int, device: torch.device) -> list[AttentionGroup]:
    """The keys on one rank that an engine step's rows attend to: single tokens together, then chunks."""
    single = tuple(chunk for chunk in step.chunks if chunk.stop - chunk.start == 1)
    shares, at = [], 0
    for chunks in ((single,) if single else ()) + tuple((chunk,) for chunk in step.chunks[len(single) :]):
        last = at + sum(chunk.stop - chunk.start for chunk in chunks)
        length = max(cut.held(rank, chunk.stop) for chunk in chunks)
        most = -(-length // cut.slots)
        table: list[int] = []
        for chunk in chunks:  # a page that has not begun holds anything: the first one is read again, where no row sees
            begun = chunk.sequence.pages[: -(-chunk.stop // cut.page)]
            table += (begun + begun[:1] * most)[:most]
        pages = torch.tensor(table, dtype=torch.int64, device=device)
        shares.append(AttentionGroup(at, last, length, sequences=len(chunks), pages=pages))
        at = last
    return shares


def _groups(step: EngineStep, size: int, device: torch.device) -> list[AttentionGroup]:
    single = [chunk for chunk in step.chunks if chunk.stop - chunk.start == 1]
    found, at = [], len(single)
    assert all(chunk.stop - chunk.start == 1 for chunk in step.chunks[: len(single)])
    if len(single) == 1:
        found.append(_alone(single[0], 0, size, device))
    elif single:
        found.append(_together(single, size, device))
    for chunk in step.chunks[len(single) :]:
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
