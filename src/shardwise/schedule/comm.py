"""`CommSchedule`: a collective as data, rounds of transfers between ranks over chunks of their memory.

Every rank has the same memory: a row of chunks, divided in *regions* of `chunks` chunks each. Region "data" is the
caller's buffer, others are there where an algorithm cannot work in place. A schedule knows chunks, not elements: one
object serves every size, and `bounds` says where the chunks of a buffer of n elements begin.

Inside a round all transfers happen at once: every one reads what its chunk held before the round. Where several
arrive in one chunk they are applied in the order of the rows. Transfers from one rank to another one in the same round
travel as one message.

The eight collectives: which chunks count as input on which rank, and what every rank must hold in the end.

In terms of a schedule's data chunks, with p ranks; chunk i belongs to rank i where a collective divides its data:

    broadcast   every rank has the root's chunks        reduce          the root has the sums of all ranks' chunks
    scatter     rank i has the root's chunk i           gather          the root has chunk i of rank i
    all-gather  every rank has chunk i of rank i        reduce-scatter  rank i has the sum of all ranks' chunks i
    all-reduce  every rank has the sums of all chunks   all-to-all      chunk j of rank i is rank j's chunk i
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shardwise.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


Ints: TypeAlias = "NDArray[np.int64]"
Span = tuple[int, int]
"""Elements [start, stop) of a rank's memory."""
Region = Literal["data", "out", "scratch", "spare"]


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that happen at the same time, one a row; every field has shape (rows,).

    Rank `src` sends chunks chunk, chunk + stride, ... of its memory, `count` of them, to chunks to, to + stride, ... of
    rank `dst`, where they are copied, or added to what is there (`reduce`). With src equal to dst it is a local copy or
    addition.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    to: Ints
    count: Ints
    stride: Ints
    reduce: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        src: ArrayLike,
        dst: ArrayLike,
        chunk: ArrayLike,
        *,
        to: ArrayLike | None = None,
        count: ArrayLike = 1,
        stride: ArrayLike = 1,
        reduce: ArrayLike = False,
    ) -> Round:
        """Rows from arrays and scalars, broadcast against each other; `to` is `chunk` unless given.

        Rows whose count is not positive are left out, so that authors may clip ranges at the last chunk.
        """
        columns = np.broadcast_arrays(src, dst, chunk, chunk if to is None else to, count, stride, reduce)
        rows: list[NDArray[Any]] = [np.atleast_1d(column).ravel() for column in columns]
        keep = rows[4] > 0
        if not keep.all():
            rows = [row[keep] for row in rows]
        kinds: list[Any] = [np.int64] * 6 + [np.bool_]
        return cls(*(row.astype(kind) for row, kind in zip(rows, kinds, strict=True)))

    @classmethod
    def join(cls, *parts: Round) -> Round:
        return cls(*(np.concatenate(columns) for columns in zip(*(part.columns for part in parts), strict=True)))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """src, dst, chunk, to, count, stride, reduce."""
        return self.src, self.dst, self.chunk, self.to, self.count, self.stride, self.reduce

    def rows(self) -> Iterator[tuple[int, int, int, int, int, int, bool]]:
        """The rows, each in the order of `columns`, as plain numbers."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    def spans(self, bounds: Sequence[int]) -> list[tuple[int, int, Span, Span, bool]]:
        """(source, destination, span read, span written, whether it is added) of each row that has elements, rows with
        a stride chunk by chunk. bounds: where chunks begin and end, in elements (`CommSchedule.bounds`)."""
        return [
            (src, dst, (bounds[chunk], bounds[chunk + count]), (bounds[to], bounds[to + count]), adds)
            for src, dst, chunk, to, count, _, adds in self.contiguous().rows()
            if bounds[chunk] < bounds[chunk + count]
        ]

    def __len__(self) -> int:
        return len(self.src)

    def take(self, rows: ArrayLike) -> Round:
        """The rows with these indices, or where this mask is true."""
        index = np.asarray(rows)
        # An empty list would be an array of floats.
        index = index if index.size else index.astype(np.int64)
        return Round(*(column[index] for column in self.columns))

    def contiguous(self) -> Round:
        """Transfers with every row a span: rows with a stride are cut into rows of one chunk."""
        if not ((self.stride > 1) & (self.count > 1)).any():
            return self
        cut = self.take(np.repeat(np.arange(len(self)), self.count))
        within = self._within() * cut.stride
        return Round.of(cut.src, cut.dst, cut.chunk + within, to=cut.to + within, reduce=cut.reduce)

    def _within(self) -> Ints:
        ends = np.cumsum(self.count)
        return np.arange(ends[-1]) - np.repeat(ends - self.count, self.count)

    def cells(self, width: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Chunk by chunk, in row order: index of the chunk read, of the one written, and whether it is added.

        The index of chunk c of rank r is r * width + c, where `width` is the number of chunks in a rank's memory.
        """
        source, target = self.src * width + self.chunk, self.dst * width + self.to
        if not len(self) or self.count.max() == 1:
            return source, target, self.reduce
        within = self._within() * np.repeat(self.stride, self.count)
        return (
            np.repeat(source, self.count) + within,
            np.repeat(target, self.count) + within,
            np.repeat(self.reduce, self.count),
        )


@dataclass(frozen=True, eq=False)
class RepeatedRounds:
    """`repeat` rounds between the same pairs of ranks with equally many chunks each: only *which* chunks move differs.

    make: k -> the k-th round, made when it is asked for, so that a schedule of 16,384 ranks stays small. price_key:
    stages of a schedule that are equal in it have rounds between the same pairs with equally many chunks each, too. A
    price needs one of all these rounds only."""

    make: Callable[[int], Round]
    repeat: int = 1
    label: str = ""
    price_key: Hashable = None

    @classmethod
    def once(cls, round: Round, label: str = "") -> RepeatedRounds:
        return cls(lambda k: round, 1, label)

    @classmethod
    def each(cls, values: Iterable[int], make: Callable[[int], Round], label: str = "") -> list[RepeatedRounds]:
        """Stages of one round each, `make` of each value: rounds between different pairs."""
        return [cls(lambda _, value=value: make(value), 1, label) for value in values]  # type: ignore[misc]

    def rounds(self) -> Iterator[Round]:
        return map(self.make, range(self.repeat))


@dataclass(frozen=True, eq=False)
class Draft:
    """Input of an algorithm's author: the stages, and the memory that they work on.

    chunks: how many the data is cut into. regions: a rank's memory, `chunks` chunks each. result: the region where the
    result lies.
    """

    chunks: int
    stages: Sequence[RepeatedRounds]
    regions: tuple[Region, ...] = ("data",)
    result: Region = "data"


@dataclass(frozen=True, eq=False)
class CommSchedule:
    """One algorithm of one collective for a number of ranks, as `build` gives it.

    chunks, regions, result: see `Draft`. reads: ranks read their peers' memory instead of being sent messages, so that
    a round costs each of them one latency, however many peers it reads from. root: the rank that a collective of one to
    all, or all to one, has. options: what the algorithm was built with besides, such as segments.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    stages: tuple[RepeatedRounds, ...]
    regions: tuple[Region, ...] = ("data",)
    result: Region = "data"
    reads: bool = False
    root: int = 0
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.collective} {self.algorithm}"

    @property
    def width(self) -> int:
        """Chunks in a rank's memory, all regions together."""
        return self.chunks * len(self.regions)

    @cached_property
    def steps(self) -> int:
        return sum(stage.repeat for stage in self.stages)

    def rounds(self) -> Iterator[Round]:
        """All rounds in order, each made when it is asked for."""
        for stage in self.stages:
            yield from stage.rounds()

    def labels(self) -> Iterator[str]:
        for stage in self.stages:
            yield from [stage.label] * stage.repeat

    def region(self, name: Region) -> int:
        return self.regions.index(name) * self.chunks

    def place(self, chunk: int) -> str:
        """A chunk of a rank's memory as people name it: "chunk 2", "chunk 2 of out"."""
        region, within = self.regions[chunk // self.chunks], chunk % self.chunks
        return f"chunk {within}" if region == "data" else f"chunk {within} of {region}"

    def data_elements(self, elements: int) -> int:
        """Elements of a region that carries n elements: n, but in an all-to-all, whose blocks are equal, padded up."""
        equal = self.collective == "all-to-all"
        return -(-elements // self.chunks) * self.chunks if equal else elements

    def bounds(self, elements: int) -> Ints:
        """Bounds of the chunks of a rank's memory, in elements; shape (width + 1,).

        Chunk i of a region is [floor(i n / chunks), floor((i + 1) n / chunks)): sizes differ by one element at most,
        and are zero for some where there are more chunks than elements.
        """
        n = self.data_elements(elements)
        cut = np.arange(self.chunks + 1, dtype=np.int64) * n // self.chunks
        starts = (np.arange(len(self.regions), dtype=np.int64)[:, None] * n + cut[:-1]).ravel()
        return np.append(starts, n * len(self.regions))


SUM = -1
"""In `ChunkGoal.of_rank`: the sum over all ranks."""

COLLECTIVES = {
    "broadcast": "one rank's data on every rank",
    "scatter": "one rank's data, a piece for every rank",
    "gather": "every rank's piece on one rank",
    "reduce": "the sum of all ranks' data on one rank",
    "all-gather": "every rank's piece on every rank",
    "reduce-scatter": "the sum of all ranks' data, a piece for every rank",
    "all-reduce": "the sum of all ranks' data on every rank",
    "all-to-all": "a piece of every rank for every rank",
}
ROOTED = ("broadcast", "scatter", "gather", "reduce")


@dataclass(frozen=True, eq=False)
class ChunkGoal:
    """Required result of a collective, row by row: chunk `chunk` of rank `rank`'s memory must end as input chunk
    `of_chunk` of `of_rank`, or the SUM."""

    rank: Ints
    chunk: Ints
    of_rank: Ints
    of_chunk: Ints


def inputs(schedule: CommSchedule) -> NDArray[np.bool_]:
    """Which data chunks are input on which rank; shape (ranks, chunks)."""
    p, c = schedule.ranks, schedule.chunks
    if schedule.collective in ("broadcast", "scatter"):
        return np.broadcast_to(np.arange(p)[:, None] == schedule.root, (p, c))
    if schedule.collective in ("gather", "all-gather"):
        return np.eye(p, c, dtype=bool)
    return np.ones((p, c), dtype=bool)


def wanted(schedule: CommSchedule) -> ChunkGoal:
    """Required contents of the region of the result on every rank, in rank order; ranks without a result have no
    rows."""
    p, c, kind = schedule.ranks, schedule.chunks, schedule.collective
    ranks, chunks = np.arange(p), np.arange(c)
    if kind in ("scatter", "reduce-scatter"):
        rank, chunk = ranks, ranks
    elif kind in ("reduce", "gather"):
        rank, chunk = np.full(c, schedule.root), chunks
    else:
        rank, chunk = np.repeat(ranks, c), np.tile(chunks, p)
    of_rank, of_chunk = np.full(len(rank), SUM), chunk
    if kind in ("broadcast", "scatter"):
        of_rank = np.full(len(rank), schedule.root)
    elif kind in ("gather", "all-gather"):
        of_rank = chunk
    elif kind == "all-to-all":
        of_rank, of_chunk = chunk, rank
    return ChunkGoal(rank, schedule.region(schedule.result) + chunk, of_rank, of_chunk)
