"""Bytes of attention over cut sequences: `runtime/context/`, as it allocates and frees them."""

from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.attention_tensors import AttentionTensors
from shardwise.predict.memory.sizes import Sizes, core_sizes
from shardwise.predict.memory.transients import LiveBytes


def attention_tensors(plan: UnitPlan, s: Sizes) -> AttentionTensors:
    """The core of attention that a layout runs."""
    if plan.layout.cp == 1:
        return AttentionTensors(plan, s)
    return UlyssesTensors(plan, s) if plan.layout.ulysses else RingTensors(plan, s)


class RingTensors(AttentionTensors):
    """Keys and values pass by, or are gathered; attention block by block, merged by log-sum-exp."""

    def __init__(self, plan: UnitPlan, s: Sizes) -> None:
        super().__init__(plan, s)
        self.short = self.math = self.blocked = False
        self.explicit = plan.layout.attention == "math" or bool(plan.model.score_softcap)
        self.ranks, self.gathers = plan.layout.cp, plan.layout.cpkind == "allgather"
        self.wide = s.statistic // s.element
        self.documents = plan.workload.isolate_documents
        pads = plan.model.narrow_values and not self.explicit
        self.kernel_out = self.q if pads else self.out
        """Bytes of an output as the kernel returns it."""
        self.padded = self.k if pads else 0
        """Bytes of values as wide as keys, beside those at hand."""

    def forward(self, live: LiveBytes, saves: bool) -> None:
        """Ends with the output, and what is saved beside queries, keys and values."""
        start = live.now
        self._arrive(live)
        live.transient(self._block(1))
        merged = self.out * self.wide
        live.allocate(merged + self.statistics)
        shares = 4 * self.statistics
        block = self.kernel_out + self.statistics
        live.transient(max(self._block(2), block + shares + merged))
        live.free(live.now - start - merged - self.statistics)
        if self.wide > 1:
            live.allocate(self.out)
            live.free(merged)
        live.free(0 if saves else self.statistics)

    def _arrive(self, live: LiveBytes) -> None:
        """Keys and values of this rank beside the next ones, or of all ranks."""
        kv = self.k + self.v
        if self.gathers:
            live.transient((self.ranks + 1) * kv)
            live.allocate(self.ranks * kv)
        else:
            live.allocate(2 * kv)

    def _block(self, part: int) -> int:
        """Transients of one block's forward pass. part: 2 for half the pairs of queries and keys of two ranks."""
        pairs = self._pairs // part
        if not self.explicit:
            mask = pairs * (self.s.element + 1) if self.documents else 0
            return self.kernel_out + self.statistics + mask + self.padded
        live = LiveBytes()
        self._scores(live, pairs)
        live.allocate(self.statistics)
        live.transient(max(self._mask_drawing(pairs), self._keep(pairs)))
        live.allocate(self._narrow(pairs) if self.wide > 1 else 0)
        live.transient(self.kernel_out + (self.v if self.copies else 0))
        return live.most

    @property
    def _pairs(self) -> int:
        """Pairs of this rank's queries and its keys."""
        return self.s.tokens * self.s.seq

    def _narrow(self, pairs: int) -> int:
        """Bytes of the scores of all heads, in the precision of the products."""
        return pairs * self.s.heads * self.s.element

    def _scores(self, live: LiveBytes, pairs: int) -> None:
        """Products of queries and keys, in the statistics' precision."""
        live.allocate(self.q)  # scaled
        live.transient(self.q if self.grouped else 0)
        copied = self.k + (0 if self.grouped else self.q) if self.copies else 0
        live.allocate(copied + self._narrow(pairs))
        live.free(copied)
        if self.wide > 1:
            live.allocate(self._narrow(pairs) * self.wide)
            live.free(self._narrow(pairs))
        live.free(self.q)
        live.transient(pairs)  # of a byte each: which are hidden

    def _mask_drawing(self, pairs: int) -> int:
        """Transients of dropout's mask: counters of 8 bytes and two copies, for all probabilities of a block."""
        return 3 * 8 * pairs * self.s.heads if self.plan.model.attention_dropout else 0

    def _keep(self, pairs: int) -> int:
        """Bytes of what dropout multiplies the probabilities with, in fp32."""
        return 4 * pairs * self.s.heads if self.plan.model.attention_dropout else 0

    def _block_backward(self, part: int) -> int:
        """Transients of one explicit block's backward pass, gradients included (`ops/blockwise.py`)."""
        pairs, live = self._pairs // part, LiveBytes()
        narrow, copied = self._narrow(pairs), self.out if self.grouped or self.copies else 0
        square, keep = narrow * self.wide, self._keep(pairs)
        live.transient(self.out * (3 * self.wide if self.wide > 1 else 1))
        self._scores(live, pairs)
        slope = square if self.plan.model.score_softcap else 0
        live.allocate(slope)
        live.transient(self._mask_drawing(pairs))
        live.allocate(keep)
        before_values = live.now
        live.allocate((square if keep else 0) + (narrow if self.wide > 1 else 0))
        live.transient(copied + self.v)
        live.free(live.now - before_values)
        live.allocate(self.v)
        live.transient(copied + (self.v if self.copies else 0) + narrow)
        live.allocate(square)
        live.transient(narrow if self.wide > 1 else 0)
        live.free(square + slope + keep)
        live.allocate(narrow if self.wide > 1 else 0)
        live.free(square if self.wide > 1 else 0)
        live.allocate(self.q)
        live.transient(self.k + (self.q if self.grouped or self.copies else 0))
        return live.most

    def backward(self, live: LiveBytes, apart: bool) -> bool:
        """As `AttentionTensors.backward`."""
        if self.selective:
            self.forward(live, saves=True)
        start, made = live.now, self.qkv + (self.padded and self.padded - self.v)
        wide_kv = (self.k + self.v) * self.wide
        live.allocate(self.q * self.wide)
        self._arrive(live)
        earlier = (self.ranks - 1) * wide_kv if self.gathers else 0  # gradients for ranks before the last one
        live.transient(earlier + made + wide_kv)
        if self.explicit:
            live.transient(max(self._block_backward(1), max(earlier, wide_kv) + self._block_backward(2)))
        live.transient(earlier + made + (self.padded and 2 * self.kernel_out + self.padded))
        if self.gathers:
            # Gathered keys and values are gone when the gradients of all are put together.
            live.transient(self.ranks * (2 * wide_kv - self.k - self.v))
        else:
            live.transient(2 * wide_kv + self.qkv)
        live.free(live.now - start)
        live.allocate(self.qkv)
        live.free(self.statistics)
        if self.selective:
            live.free(2 * self.out + self.qkv)
        else:
            live.free(self.qkv + self.out + (0 if apart else self.out))
        return False


class UlyssesTensors(AttentionTensors):
    """Attention over all tokens for some of the heads, between two all-to-alls."""

    def __init__(self, plan: UnitPlan, s: Sizes) -> None:
        super().__init__(plan, s)
        self.inner = AttentionTensors(plan, core_sizes(plan, s))
        self.inner.selective = self.math = self.short = self.blocked = False
        copies = max(1, plan.layout.cp // s.kv_heads)
        self.copied = (self.k + self.v) * copies if copies > 1 else 0
        self.exchanged = self.q + (self.k + self.v) * copies
        self.core = self.inner.qkv

    @property
    def unsaved(self) -> int:
        """Bytes of local queries, keys and values, which are there until attention's output is."""
        return 0 if self.selective else self.qkv

    @property
    def shares_output(self) -> bool:
        """Whether the core saves its output, which the projection after it saves as well."""
        return False

    def forward(self, live: LiveBytes, saves: bool) -> None:
        """Ends with the local output, and what is saved besides."""
        start = live.now
        live.allocate(self.copied + self.exchanged)
        live.transient(2 * self.exchanged)
        live.allocate(self.core)
        live.free(self.copied + self.exchanged)
        self.inner.forward(live, saves)
        live.transient(3 * self.out)
        live.allocate(self.out)
        if self.inner.math:
            live.free(self.inner.out + (self.inner.unsaved if saves else 0))
        if not saves:
            live.free(live.now - start - self.out)

    def backward(self, live: LiveBytes, apart: bool) -> bool:
        """As `AttentionTensors.backward`."""
        if self.selective:
            self.forward(live, saves=True)
        live.transient(3 * self.out)
        live.allocate(self.inner.out)
        live.free(0 if self.selective else self.out)
        self.inner.backward(live, apart=False)
        live.transient(3 * self.exchanged)
        live.allocate(self.qkv)
        live.free(self.core)
        if self.selective:
            live.free(2 * self.out + self.qkv)
        return False
