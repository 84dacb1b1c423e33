"""Sequences cut over context-parallel ranks: which tokens each rank has, and which pairs of tokens it attends with.
For generation, the pages of the cache cut over these ranks.

A sequence has 2 cp chunks, and each rank two of them. In zigzag order rank r has chunks r and 2 cp - 1 - r, whose
causal attention is as much work on every rank (Megatron-LM, ring-flash-attention, Llama 3). Ulysses (Jacobs et al.
2023) exchanges the sequence for heads before attention, so its ranks have consecutive chunks.
"""

from typing import NamedTuple, Self

from shardwise.errors import LayoutError
from shardwise.layout.keys import divisors
from shardwise.layout.layout import Layout
from shardwise.records import dataclass

PAGE, CHUNK = 16, 256
"""Tokens of a page of the cache, and of a chunk of a prompt, where nothing else is asked for."""


def cuts_sequences(layout: Layout) -> bool:
    """Whether a rank has a part of a sequence."""
    return layout.cp > 1


def gathers_keys(layout: Layout) -> bool:
    """Whether keys and values of all ranks are gathered, instead of passing by."""
    return layout.cpkind == "allgather"


class VisibleBlock(NamedTuple):
    """A rank's queries `rows` that attend to the keys `columns` of one rank, as positions in their local order."""

    rows: slice
    columns: slice
    causal: bool
    """Whether a query sees only the keys up to its own place; else it sees all of them."""


@dataclass(frozen=True)
class SequenceCut:
    """A sequence of `seq` tokens over `cp` ranks. pieces: parts into which each rank's tokens are cut again (tp under
    `sp`)."""

    seq: int
    cp: int
    zigzag: bool = True
    pieces: int = 1

    @classmethod
    def of(cls, layout: Layout, seq: int) -> Self:
        return cls(seq, layout.cp, not layout.ulysses, layout.tp if layout.sp else 1)

    @property
    def padded(self) -> int:
        """Tokens with padding at the end: no token attends to it, and the loss leaves it out."""
        step = 2 * self.cp * self.pieces if self.cp > 1 else 1
        return -(-self.seq // step) * step

    @property
    def local(self) -> int:
        """Tokens of one rank."""
        return self.padded // self.cp

    def chunks(self, rank: int) -> tuple[int, int]:
        """Numbers of the two chunks of a rank, in its order."""
        return (rank, 2 * self.cp - 1 - rank) if self.zigzag else (2 * rank, 2 * rank + 1)

    def places(self, rank: int) -> tuple[range, range]:
        """Places in the padded sequence of a rank's tokens, in its order."""
        size = self.local // 2
        first, second = (range(chunk * size, (chunk + 1) * size) for chunk in self.chunks(rank))
        return first, second

    def visible(self, rank: int, other: int) -> VisibleBlock:
        """Visibility of the keys of rank `other` to the queries of `rank`, in zigzag order."""
        half, everything = self.local // 2, slice(None)
        if rank == other:
            return VisibleBlock(everything, everything, True)
        if other < rank:
            return VisibleBlock(everything, slice(None, half), False)
        return VisibleBlock(slice(half, None), everything, False)


@dataclass(frozen=True)
class PageCut:
    """Pages of the cache over context-parallel ranks: of every page, rank r holds the r-th run of `slots` tokens. All
    ranks hold as much of every sequence, but for its last page. Raises `LayoutError` where cp does not divide a page.
    """

    page: int
    """Tokens per page."""
    cp: int = 1

    def __post_init__(self) -> None:
        if self.page % self.cp:
            valid = ", ".join(map(str, divisors(self.page)))
            raise LayoutError(
                f"cp={self.cp} does not divide the cache's pages of {self.page} tokens; valid cp: {valid}"
            )

    @property
    def slots(self) -> int:
        """Tokens of a page on one rank."""
        return self.page // self.cp

    def held(self, rank: int, tokens: int) -> int:
        """Tokens on a rank of the first `tokens` of a sequence."""
        pages, rest = divmod(tokens, self.page)
        return pages * self.slots + min(max(rest - rank * self.slots, 0), self.slots)
