"""Decode steps with static shapes, which CUDA replays as graphs: one launch in place of a thousand.

A step of single tokens is padded to a bucket: its sequences to 1, 2, 4, 8, 16, 24, ... rows, and, where attention
gathers pages, the pages of the longest one to a power of two. Ids, positions, slots, page tables and lengths are copied
into the bucket's tensors by one transfer. Padding rows are sequences of one token in the cache's spare page, which no
sequence has. Embedding, blocks, head and the greedy choice follow without the host, which waits once, for the tokens.

A bucket is captured at its first step, after warm-up on another stream; all graphs share one memory pool. Without
capture the same function runs eagerly, on any device. Only ranks that communicate with no other one in a step have such
steps, and no mixture of experts is captured: how many tokens an expert has is read by the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.layout.experts import experts_across
from shardwise.model import ModelConfig
from shardwise.ops.paged import DecodeRows
from shardwise.serving.sampling import likeliest
from shardwise.serving.scheduler import EngineStep

_FULL = 8
"""Rows from which buckets are multiples of this, and no longer powers of two."""
_NUMBERS = 5
"""Numbers per row beside its page table: id, position, slot, length and page that begins."""
_WARM = 2
"""Runs of a step before its capture, in which kernels are compiled and libraries allocate."""

Result = tuple[Tensor, Tensor]
"""(logits [B, vocab], greedy tokens [B])"""


def alone(layout: Layout) -> bool:
    """Whether a rank's engine steps communicate with no other rank."""
    return layout.tp == layout.pp == layout.cp == 1 and layout.stage < 3 and experts_across(layout) == 1


def capturable(layout: Layout, model: ModelConfig) -> bool:
    return alone(layout) and model.experts is None


def padded_batch(rows: int) -> int:
    """Rows of the bucket that holds so many."""
    return 1 << (rows - 1).bit_length() if rows <= _FULL else -(-rows // _FULL) * _FULL


def decodes(step: EngineStep) -> bool:
    """Whether a step is one token of each of some sequences, all of whose logits are wanted."""
    return bool(step.chunks) and all(chunk.wanted and chunk.stop - chunk.start == 1 for chunk in step.chunks)


@dataclass(frozen=True)
class DecodeShape:
    """Sizes that all buckets share."""

    size: int
    """Tokens per page."""
    spare: int
    """Page of the padding rows."""
    most: int
    """Pages of the longest sequence."""
    gathers: bool
    """Whether attention gathers all pages of a table, so that short tables pay."""

    def pages(self, step: EngineStep) -> int:
        """Columns of the page table in the bucket of a step."""
        if not self.gathers:
            return self.most
        held = max(chunk.start // self.size + 1 for chunk in step.chunks)
        return min(1 << (held - 1).bit_length(), self.most)


class StaticInputs:
    """A bucket's inputs: one tensor on the device, and its image in (pinned) host memory."""

    def __init__(self, batch: int, pages: int, shape: DecodeShape, device: torch.device) -> None:
        self.batch, self.shape = batch, shape
        count = batch * (_NUMBERS + pages)
        self._host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._here = torch.zeros(count, dtype=torch.int64, device=device)
        image = self._host.numpy()
        self._numbers = image[: batch * _NUMBERS].reshape(_NUMBERS, batch)
        self._table = image[batch * _NUMBERS :].reshape(batch, pages)
        self._written: list[tuple[list[int], int] | None] = [None] * batch
        """Per row the page list in its table, and how many entries of it: a sequence's list only grows."""
        for row in range(batch):
            self._clear(row)
        self._copy()

    def _clear(self, row: int) -> None:
        """Make a row a padding row: one token in the spare page."""
        spare = self.shape.spare
        self._numbers[:, row] = 0, 0, spare * self.shape.size, 1, spare
        self._table[row] = spare
        self._written[row] = None

    def _copy(self) -> None:
        self._here.copy_(self._host, non_blocking=True)

    def fill(self, step: EngineStep) -> None:
        """Copy a step's numbers to the device. The step before must be over."""
        size, spare = self.shape.size, self.shape.spare
        for row, chunk in enumerate(step.chunks):
            pages, place = chunk.sequence.pages, chunk.start
            page = pages[place // size]
            begun = spare if place % size else page
            self._numbers[:, row] = chunk.sequence.tokens[place], place, page * size + place % size, place + 1, begun
            self._write_table(row, pages, place // size + 1)
        for row in range(len(step.chunks), self.batch):
            if self._written[row] is not None:
                self._clear(row)
        self._copy()

    def _write_table(self, row: int, pages: list[int], count: int) -> None:
        written = self._written[row]
        first = written[1] if written is not None and written[0] is pages and written[1] <= count else 0
        self._table[row, first:count] = pages[first:count]
        if not first:
            self._table[row, count:] = self.shape.spare
        self._written[row] = pages, count

    def rows(self) -> DecodeRows:
        """The decoder's input, in the tensors that `fill` copies to."""
        numbers = self._here[: self.batch * _NUMBERS].view(_NUMBERS, self.batch)
        table = self._here[self.batch * _NUMBERS :].view(self.batch, -1)
        ids, positions = numbers[0:1], numbers[1:2]
        return DecodeRows(
            ids, positions, positions, None, positions, positions,
            slots=numbers[2], lengths=numbers[3], begun=numbers[4], table=table,
        )  # fmt: skip


@dataclass
class _Bucket:
    inputs: StaticInputs
    replay: Callable[[], Result]


@dataclass
class DecodeSteps:
    """Decode steps of one rank by bucket."""

    forward: Callable[[DecodeRows], Tensor]
    """All parts of the decoder: logits [B, vocab]."""
    shape: DecodeShape
    device: torch.device
    capture: bool
    """Whether a bucket becomes a CUDA graph."""
    prepare: Callable[[int], object] = lambda rows: None
    """Called with a bucket's rows before it is captured: products are then chosen."""
    _buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict)
    _pool: Any = None

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(rows, pages per sequence) of every bucket so far."""
        return list(self._buckets)

    @torch.inference_mode()
    def run(self, step: EngineStep) -> Result:
        """Logits and greedy tokens of a step for which `decodes` is true. They last until the next one. Raises
        `RuntimeError` where a capture fails."""
        key = padded_batch(len(step.chunks)), self.shape.pages(step)
        if key not in self._buckets:
            self.prepare(key[0])
            inputs = StaticInputs(*key, self.shape, self.device)
            self._buckets[key] = _Bucket(inputs, self._captured(inputs) if self.capture else lambda: self._step(inputs))
        bucket = self._buckets[key]
        bucket.inputs.fill(step)
        logits, tokens = bucket.replay()
        return logits[: len(step.chunks)], tokens[: len(step.chunks)]

    def _step(self, inputs: StaticInputs) -> Result:
        logits = self.forward(inputs.rows())
        return logits, likeliest(logits)

    def _captured(self, inputs: StaticInputs) -> Callable[[], Result]:
        """A graph of the step, on padding rows alone."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                self._step(inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, as the one that watches over NCCL, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._step(inputs)

        def replay() -> Result:
            graph.replay()
            return result

        return replay
