"""Small collectives through shared memory with next to no work around them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.runtime.transport.memory import ALIGNED
from shardwise.runtime.transport.shared_collective import SLOTS, WORDS, unwatched

if TYPE_CHECKING:
    from shardwise.runtime.transport.shared import SharedTransport

AREA = 64 << 10
"""Bytes of either place through which what is small goes (`Quick`)."""
FLAGS = (SLOTS + 1) * ALIGNED
"""Bytes of flags before the places."""
VIEWS = 1024
"""Sizes of which `Quick` keeps where they lie; prompts have ever new ones."""
_QUICK = SLOTS * WORDS


class Quick:
    """Sums, gathers and exchanges of a few kilobytes at once, with next to no work around them, one-shot.

    Each rank puts what it has into one of two places by turns, says so, and reads everybody's. It may fill a place
    again without asking who has read it: all ranks take part in every one, and it has seen each of them come to the
    last one, hence be through with the one before. All ranks must do them in the same order; that of flights beside
    them does not matter.

    transport: whose flags and peers these are. maps: every rank's segment of flags, behind which the places lie.
    """

    def __init__(self, transport: SharedTransport, maps: list[mmap.mmap]) -> None:
        self.rank, self.ranks = transport.rank, transport.ranks
        self._others = [peer for peer in range(self.ranks) if peer != self.rank]
        # Nothing here refers back to the transport, which goes with its last user.
        self._flags, self._peer_flags = transport.flags, transport.peer_flags
        self._peers, self._spin, self._maps = transport.peers, transport.spin, maps
        self._count = 0
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Sum, or maximum, over the ranks, in place; on every rank the same bits. tensor: contiguous."""
        combine: Callable[..., Tensor] = torch.maximum if maximum else torch.add
        with unwatched():
            flat = tensor.view(-1)
            pieces = self._exchange(flat)
            combine(pieces[0], pieces[1], out=flat)
            for other in pieces[2:]:
                combine(flat, other, out=flat)

    def all_gather(self, out: Tensor, piece: Tensor) -> None:
        """Every rank's `piece` end to end in `out`, as many bytes at a time as a place has. Both contiguous."""
        with unwatched():
            rows, flat = out.view(self.ranks, -1), piece.view(-1)
            step = AREA // flat.element_size()
            for start in range(0, flat.numel(), step):
                for row, piece_of in zip(rows, self._exchange(flat[start : start + step]), strict=True):
                    row[start : start + step].copy_(piece_of)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Every rank's equal part for this one end to end in `out`; `tensor` fits a place. Both contiguous."""
        with unwatched():
            for row, theirs in zip(out.view(self.ranks, -1), self._exchange(tensor.view(-1)), strict=True):
                row.copy_(theirs.view(self.ranks, -1)[self.rank])

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Every rank's values, valid until the next exchange but one."""
        place = self._count % 2
        self._count = count = self._count + 1
        key = place, flat.numel(), flat.dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            views = self._views[key] = self._view(*key)
        views[self.rank].copy_(flat)
        self._flags[_QUICK] = count
        for peer in self._others:
            flags = self._peer_flags[peer]
            if flags[_QUICK] < count:
                self._spin.wait(flags, _QUICK, count, self._peers[peer])
        return views

    def _view(self, place: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        start = FLAGS + place * AREA
        return [torch.frombuffer(segment, dtype=dtype, count=elements, offset=start) for segment in self._maps]
