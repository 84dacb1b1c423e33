"""The worst moment of a step on a pipeline's first, second and last rank, for arrays of candidates.

How many micro-batches are in flight comes from the schedules' closed forms; `predict.memory.pipeline` follows a rank's
list of actions one by one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property

import numpy as np

from shardwise.layout import Layout
from shardwise.layout.pipeline import releases_early
from shardwise.planner.moments import Num, Rank, TransientBytes
from shardwise.schedule.pipeline.closed_forms import FORMS
from shardwise.schedule.pipeline.completion import RESIDENT


@cache
def _early(recompute: str) -> bool:
    """Whether a rank sends gradients of inputs before it computes those of weights."""
    return releases_early(Layout(recompute=recompute))


class _Piped(Rank):
    """The first, the second or the last rank of a pipeline. A stage's gradients are reduced when its backward is over.

    What is in flight, from the schedules' closed forms, is at its most when the first backward begins, and again at the
    later ones, which find all accumulators there, where forwards go on between backwards.
    """

    @property
    def weights(self) -> Num:
        """The stages that a schedule has gathered at a time."""
        virtual = np.array([order.virtual for order in self.frame.orders])
        edges = self.all(self.padded) - self.layers * self.padded["blocks.0"]
        return self.layers * self.padded["blocks.0"] * np.minimum(RESIDENT, virtual) / virtual + edges

    def activations(self) -> Num:
        return self._flying() + self._waiting * self._kept

    @cached_property
    def _edge(self) -> tuple[Num, Num, Num]:
        """Of the part besides blocks: saved, kept, known."""
        s = self.saved
        if self.head:
            return s.head, s.kept_head, s.known_head
        if not self.embedding:
            return 0.0, 0.0, 0.0
        return s.embedding, s.kept_embedding, s.known_embedding

    @cached_property
    def _in_flight(self) -> Num:
        """Micro-batches between forward and backward, in shares of all chunks; those that wait for the gradients of
        their weights are not in it."""
        p, orders = self.frame.pp, self.frame.orders
        # Those of zb-h1 between forward and the gradient of the input are 1f1b's.
        named = [("1f1b" if order.schedule == "zb-h1" else order.schedule, order.virtual) for order in orders]
        return self._by_count(lambda m: [FORMS[name].peak(p, m, virtual, self.place) for name, virtual in named])

    def _by_count(self, figures: Callable[[int], list[float]]) -> Num:
        """Figures of the orders for each row, which depend on its number of micro-batches alone."""
        counts, row = np.unique(self.frame.counts, return_inverse=True)
        return np.array([figures(m) for m in counts.tolist()])[row][:, None, :]

    @cached_property
    def _delayed(self) -> Num:
        """Where gradients of weights are put off to a later time than the next action."""
        return np.array([order.schedule == "zb-h1" for order in self.frame.orders])

    @cached_property
    def _apart(self) -> Num:
        """Where gradients of weights are computed apart from those of inputs, which another rank waits for: of stages
        but the first one, which is not alone on its rank where schedules have several chunks."""
        early = np.array([_early(row.recompute) for row in self.frame.rows])[:, None, None]
        return self._delayed | (early & ((self.place > 0) | (self._virtual > 1)))

    @cached_property
    def _waiting(self) -> Num:
        """Micro-batches that wait for the gradients of their weights beside one whose backward runs."""
        return np.minimum(self.place, self.counts - 1) * self._delayed

    @cached_property
    def _virtual(self) -> Num:
        return np.array([order.virtual for order in self.frame.orders])

    def _flying(self, fewer: Num = 0.0) -> Num:
        """Bytes of the micro-batches in flight, without those that are inputs of the step."""
        s, (edge, _, known) = self.saved, self._edge
        times = self._in_flight - fewer
        # An edge is in one chunk alone; the last rank of an interleaved schedule is done with the head at once.
        once = self.head & (self._virtual > 1)
        return times * self.layers * s.block + np.where(once, 1.0, times) * (edge - known) + self._whole * s.tables

    @cached_property
    def _whole(self) -> Num:
        """Micro-batches of which any chunk is in flight."""
        return np.minimum(np.ceil(self._in_flight), self.counts)

    @cached_property
    def _kept(self) -> Num:
        """Bytes of one micro-batch that waits for the gradients of its weights."""
        return self.layers / self._virtual * self.saved.kept_block + self._edge[1] * self._edge_apart

    def _messages(self, later: bool) -> Num:
        """Bytes of messages that are expected or on their way while a backward runs, the first one or a later one:
        the next two of each neighbour that sends, one to each that receives."""
        names = np.array([order.schedule for order in self.frame.orders])
        looped, gpipe = names == "interleaved", names == "gpipe"
        ahead, after = self._after > 0, self.place > 0
        coming, going = np.where(gpipe, 0, np.minimum(1, self.counts - 1 - later)), 1.0 * later
        forward = np.where(looped, 4, coming + going) * after
        back = np.where(looped, 5, np.minimum(2, self.counts - later) + 1) * ahead
        return (forward + back) * self.saved.message

    @cached_property
    def _all_staged(self) -> Num:
        """Bytes of the full gradients of all units whose gradients of weights come together."""
        blocks = self.layers / self._virtual * self.staged("blocks.0")
        return blocks + self.staged(*(self.padded.keys() - {"blocks.0"})) * self._edge_apart

    @property
    def _edge_apart(self) -> Num:
        """Where gradients of the part besides blocks are computed apart: not those of the first stage, unless all are
        put off."""
        return self._delayed | self.head

    @cached_property
    def _steady(self) -> Num:
        """Backwards that begin while as much is in flight as ever, a chunk's counted as one."""

        def steady(m: int, name: str, v: int) -> int:
            group = m // max(1, m // self.frame.pp)
            warm = {"gpipe": m * v, "interleaved": (v - 1) * group + 2 * self._after}
            return max(1, m * v - warm.get(name, self._after))

        return self._by_count(lambda m: [steady(m, *order) for order in self.frame.orders])

    @cached_property
    def _group(self) -> Num:
        """Micro-batches that a chunk does in a row."""
        return self.counts // np.maximum(1, self.counts // self.frame.pp)

    @property
    def _after(self) -> int:
        """Ranks after this one."""
        return self.frame.pp - 1 - self.place

    def moments(self) -> Iterator[TransientBytes]:
        """The first backward finds no accumulators. While as much is in flight as ever, those of some chunks come; once
        all are there, less may be in flight."""
        s, (edge, _, _) = self.saved, self._edge
        chunk = self.layers / self._virtual * s.block + edge
        ends = ("head", "tied") if self.head else ("embedding", "tied")
        each, own = self.layers * self.accumulated("blocks.0"), self.accumulated(*ends)
        done = np.minimum(np.ceil((self._steady - 1) / self._group), self._virtual) / self._virtual
        some = done * each + own * ((done > 0) if self.head else (done == 1))
        # Where gradients of weights are put off, the first ones are complete as many backwards later.
        put_off = self.place * self._delayed
        after = (self._virtual - 1) * self._group + 2 + put_off - self._steady
        fewer, fewest = (np.maximum(n, 0) / self._virtual for n in (after, after + 1))
        # In shards, the last unit of a backward lands in the next one.
        final = self.sharded * (own if self.embedding else each / self.layers)
        cases = (
            (True, None, 0.0, 0.0),
            (self.many & (done > 0) & (self._virtual > 1), some, 0.0, 0.0),
            (self.counts > 1 + put_off, self.gradients - final, final, fewer),
            (self.counts > 2 + put_off, self.gradients, 0.0, fewest),
        )
        for holds, found, landing, less in cases:
            rest = self._flying(less) - chunk + self._waiting * self._kept + self._messages(found is not None)
            there = holds & (less < self._in_flight)
            # Where less is in flight, backwards have gone on to other chunks than the head's.
            with_head = (less == 0) | (self._virtual == 1)
            for beyond, comm in self._backward(found, landing, with_head):
                yield TransientBytes(np.where(there, rest + beyond, 0.0), comm * there)
        yield from self._put_off(chunk, fewer, some * ((done > 0) & (self._virtual > 1)))
        yield from self._between(some)

    def _put_off(self, chunk: Num, fewer: Num, some: Num) -> Iterator[TransientBytes]:
        """Where gradients of weights are computed apart: where they are put off, the last backward before the first of
        them, when all full gradients wait; the end of the first of them; and the beginning of a later one, with some
        accumulators there, or with all."""
        if not self._apart.any():
            return
        everything = self._all_staged
        rest = self._flying() - chunk + self._waiting * self._kept + self._messages(True)
        before = self._delayed & self.many & (self.place > 0) & (self.counts > self.place)
        for beyond, comm in self._backward(0.0, 0.0, True):
            # Those of this backward are among all.
            yield TransientBytes((rest + beyond - comm + everything) * before, everything * before)
        edges = self.accumulated(*(self.padded.keys() - {"blocks.0"})) * self._edge_apart
        own = self.layers / self._virtual * self.accumulated("blocks.0") + edges
        first = np.where(self.sharded, everything, own + self.staged("blocks.0"))
        yield TransientBytes((rest + self._kept + first) * self._apart, everything * self._apart)
        yield TransientBytes(
            (rest + self._kept + some + everything) * (self._apart & (some > 0)), everything * self._apart
        )
        later = self._apart & (self.counts > 1 + self.place * self._delayed)
        less = self._flying(fewer) - self._flying()
        yield TransientBytes((rest + less + self._kept + self.gradients + everything) * later, everything * later)

    def _between(self, some: Num) -> Iterator[TransientBytes]:
        """The loss."""
        s = self.saved
        if self.head:
            messages = np.where(self.many & (some > 0), self._messages(True), self._messages(False))
            rest = self._flying() + self._waiting * self._kept + messages
            before = self.many & (some > 0) & (self.counts > 1 + self.place * self._delayed)
            left = self.staged("blocks.0") * self.sharded * before + self._all_staged * (self._delayed & ~before)
            landing = self.accumulated("blocks.0") * self.sharded * (self.counts == 2)
            yield TransientBytes(rest + s.loss + (some - landing) * before + left, left)

    def optimizer(self) -> Iterator[TransientBytes]:
        """With the sum of a tied table's gradients, which the other end has sent."""
        left = self.staged("blocks.0") * self.sharded
        yield TransientBytes(self.gradients + left + self.widened, left)
        if "tied" in self.shard:
            yield TransientBytes(self.gradients + self.shard["tied"] * self.grad_bytes, np.zeros(1))

    def _backward(self, found: Num | None, landing: Num, with_head: Num) -> Iterator[TransientBytes]:
        """One stage's backward: its own activations and what gradients take. found: bytes of accumulators that are
        there; None for the first backward, in which they come. landing: those that come as its last part begins."""
        s, block, each = self.saved, self.staged("blocks.0"), self.accumulated("blocks.0")
        blocks, edge = self.layers / self._virtual, self._edge[0]
        names = ("head", "tied") if self.head else ("embedding", "tied")
        own, acc = self.staged(*names), self.accumulated(*names)
        # Gradients in shards, and those that a schedule puts off, are staged until the whole stage is done.
        lasting = self.sharded | (self._apart & self.many)
        before, done = (own * with_head, acc * with_head) if self.head else (0.0, 0.0)
        strange = (self._virtual > 1) & (found is not None) & (self._steady > self._group)
        # What was left under way before stays until its own unit comes again; that of another chunk stays on.
        left = 0.0 if found is None else self.sharded * (own if self.embedding else block)
        if self.head:
            grads = np.where(self.sharded, 0.0, acc * ~self.many) if found is None else found
            whole = blocks * s.block + edge + s.in_head + grads + own + left
            yield TransientBytes(whole * with_head, (own + left) * with_head)
        # In the first backward, an accumulator comes while the full gradient that goes into it is there.
        collects = self.many & ~lasting & (found is None)
        if self.head:
            yield TransientBytes((blocks * s.block + s.after_edge + acc + own) * collects, own * collects)
        for j in (np.float64(1.0), blocks):
            full = np.where(lasting, before + j * block, block) + left * ((j < blocks) | self.embedding | strange)
            so_far = np.where(lasting, 0.0, done + (j - self.many) * each) if found is None else found
            so_far = so_far + landing * ((not self.embedding) & (j == blocks))
            kept = self._apart * ((j - 1) * s.kept_block + self.head * s.kept_head)
            below = (0.0 if self.head else edge) + (blocks - j) * s.block
            # The gradient that a message brought to the first block is not there twice.
            inside = np.where(self._apart, s.in_block_apart, s.in_block) - s.message * ((j == 1) & (not self.head))
            yield TransientBytes(below + s.block + inside + kept + so_far + full, full)
            yield TransientBytes((below + s.after_block + done + j * each + block) * collects, block * collects)
        if self.embedding:
            full = own + np.where(self.sharded | (self._delayed & self.many), blocks * block, 0.0)
            so_far = np.where(lasting, 0.0, blocks * each + acc * ~self.many) if found is None else found + landing
            yield TransientBytes(s.in_embedding + self._delayed * blocks * s.kept_block + so_far + full, full)
            yield TransientBytes((s.after_edge + blocks * each + acc + own) * collects, own * collects)


class First(_Piped):
    """A pipeline's first rank."""

    head = False


class Between(_Piped):
    """A rank with neither embedding nor head. The second rank holds no less than those after it, where blocks are
    alike."""

    embedding = head = False


class Last(_Piped):
    """A pipeline's last rank."""

    embedding = False
