"""Bytes of the core of attention, from queries, keys and values to its output and back, as it allocates and frees them.

Follows `decoder/attention.py` and, for short sequences on a CPU, `ops/cpu/attention.py`.
"""

from shardwise.layout.units import UnitPlan
from shardwise.ops.limits import ATTENTION_ROWS, QUERY_ROWS
from shardwise.predict.memory.sizes import Sizes, uses_batched_attention, uses_blocked_attention
from shardwise.predict.memory.transients import LiveBytes, dropout


class AttentionTensors:
    """The core of attention: from queries, keys and values to its output, and back."""

    def __init__(self, plan: UnitPlan, s: Sizes) -> None:
        self.plan, self.s = plan, s
        self.q, self.k, self.v, self.out = (s.tokens * n * s.element for n in (s.q, s.k, s.v, s.attended))
        self.qkv = self.q + self.k + self.v
        self.short = plan.layout.attention == "sdpa" and uses_batched_attention(plan)
        self.blocked = uses_blocked_attention(plan)
        self.math = plan.layout.attention == "math"
        self.selective = plan.layout.recompute == "selective"
        self.statistics = s.tokens * s.heads * s.statistic
        self.square = s.tokens * s.heads * s.seq * s.element
        self.capped = self.square if plan.model.score_softcap else 0
        self.dropped = self.square if plan.model.attention_dropout else 0
        # Of several sequences with several heads of keys and values, products take copies.
        self.copies = plan.layout.micro > 1 and s.kv_heads > 1
        self.grouped = s.heads > s.kv_heads

    @property
    def unsaved(self) -> int:
        """Bytes of queries, keys and values that are there until attention's output is, though copies are saved."""
        if not self.math or self.selective:
            return 0
        return self.q + (self.k + self.v if self.copies else 0)

    @property
    def shares_output(self) -> bool:
        """Whether the core saves its output, which the projection after it saves as well."""
        return not self.math and not self.selective

    def forward(self, live: LiveBytes, saves: bool) -> None:
        """Ends with the output, and what is saved beside queries, keys and values."""
        if self.math:
            self._math_forward(live, saves)
        elif self.short:
            self._short_forward(live)
        elif self.blocked:
            live.allocate(self.out)
            live.transient(self._block(backward=False))
        else:
            live.allocate(self.out + self.statistics)
            live.free(0 if saves else self.statistics)

    def _math_forward(self, live: LiveBytes, saves: bool) -> None:
        start = live.now
        live.allocate(self.q)  # scaled queries
        if self.grouped:
            live.allocate(self.q)  # those of several heads as rows of one product
            live.free(self.q)
        # What the product of queries and keys reads, where it takes copies: queries are copied already if grouped.
        queries = self.q if self.copies and not self.grouped else 0
        keys, values = (self.k, self.v) if self.copies else (0, 0)
        live.allocate(queries + keys)
        live.allocate(self.square)
        live.free(0 if saves else queries + keys)
        live.allocate(self.capped)  # beside the tanh
        live.allocate(self.square)
        live.free(self.square if saves else self.square + self.capped)  # the scores
        if self.dropped:
            live.allocate(self.square)
            rows = self.s.tokens * self.s.heads
            live.transient(dropout(rows * self.s.seq, rows))
            live.free(0 if saves else self.square)
        live.allocate(values)
        live.allocate(self.out)
        live.free(queries if saves else 0)
        if not saves:
            live.free(live.now - start - self.out)

    def backward(self, live: LiveBytes, apart: bool) -> bool:
        """From the gradient of the output to those of queries, keys and values, when what was saved is gone. apart: the
        output is kept. Returns whether the three gradients are one tensor."""
        if self.selective:
            self.forward(live, saves=True)
        if self.math:
            self._math_backward(live)
        elif self.short:
            live.allocate(self.qkv)
            live.transient(self._products_backward())
        elif self.blocked:
            live.allocate(self.qkv)
            live.transient(self._block(backward=True))
        else:
            live.allocate(self.qkv)
            live.free(self.statistics)
        if self.selective:
            if self.math or self.short:
                live.allocate(self.qkv)  # laid out as what they are gradients of
                live.free(self.qkv)
            live.free(2 * self.out + self.qkv)  # the output and its gradient, which were held until now
        elif not self.math:
            live.free(self.qkv + self.out + (0 if apart else self.out))
        return self.short and not self.selective

    def _math_backward(self, live: LiveBytes) -> None:
        """Frees the gradient of the output, and what the core has saved."""
        copied = self.out if self.grouped or self.copies else 0
        given = 0 if self.selective else self.out
        keys, values = (self.k, self.v) if self.copies or not self.selective else (0, 0)
        live.allocate(copied + self.square + self.v)  # its copy; the gradients of probabilities and values
        live.free(given + copied + values + self.dropped)
        if self.dropped:
            live.allocate(self.square)
            rows = self.s.tokens * self.s.heads
            live.transient(dropout(rows * self.s.seq, rows))
            live.free(self.square)
        live.allocate(self.square)  # the gradients of scores
        live.free(2 * self.square)
        if self.capped:
            live.transient(self.square)  # the gradients before the cap, and before the tanh
            live.free(self.square)
        live.allocate(self.q + self.k)
        live.free(self.square)
        live.transient(self.q)  # the gradients of queries before they were scaled
        live.free(self.q + keys)  # scaled queries, and keys

    def _block(self, backward: bool) -> int:
        """Transients of the largest block of queries of one sequence (`ops/attention.py`)."""
        s, wide = self.s, self.s.statistic
        reach, held = max(window or s.seq for window in self.plan.local.windows), []
        for first in range(0, s.seq, QUERY_ROWS):
            queries = min(QUERY_ROWS, s.seq - first)
            keys = min(first + queries, reach - 1 + queries)
            square = s.heads * queries * keys * wide
            copied = queries * (s.q + backward * s.attended) + keys * (s.k + backward * s.v)
            held.append((3 if self.capped else 2) * square + queries * keys + copied * wide)
        return max(held) + (s.seq * (s.k + s.v) * wide if backward else 0)

    def _short_forward(self, live: LiveBytes) -> None:
        """Forward of `ops/cpu/attention.py`, one sequence after the other."""
        s = self.s
        live.allocate(self.q)
        if s.element == 2 or s.seq > ATTENTION_ROWS:
            live.transient(self.statistics)
            return
        one, square = s.seq * s.q * 4, s.heads * s.seq * s.seq * 4
        repeated = 2 * one if self.grouped else 0
        wide = one * (2 if s.heads == s.kv_heads else 1)
        live.transient(repeated + max(wide + square, 2 * square, square + one))

    def _products_backward(self) -> int:
        """Transients of the gradients of one sequence's queries, keys and values."""
        s = self.s
        one, wide = s.seq * s.q * s.element, s.seq * s.q * 4
        repeated = 2 * one if self.grouped else 0
        return repeated + (self._at_once(one, wide) if s.seq <= ATTENTION_ROWS else self._by_rows(one, wide))

    def _at_once(self, one: int, wide: int) -> int:
        s = self.s
        square, narrow = s.heads * s.seq * s.seq * 4, s.heads * s.seq * s.seq * s.element
        bf16 = s.element == 2
        keys = 0 if self.grouped and not bf16 else wide
        summed = s.seq * s.k * 4 if self.grouped else 0
        return max(
            wide + keys + square,
            2 * square,
            square + (3 if bf16 else 1) * wide,
            2 * square + wide + keys,
            2 * square + (narrow if bf16 else 0),
            square + narrow + (narrow if bf16 else 0) + 2 * one + summed,
        )

    def _by_rows(self, one: int, wide: int) -> int:
        s = self.s
        live = LiveBytes()
        live.transient(3 * wide)
        live.allocate(2 * wide)
        before = 0
        for first in range(0, s.seq, ATTENTION_ROWS):
            rows, seen = min(ATTENTION_ROWS, s.seq - first), min(first + ATTENTION_ROWS, s.seq)
            square = s.heads * rows * seen * 4
            some, all_seen = wide * rows // s.seq, wide * seen // s.seq
            padded = rows * seen * 4  # which keys are hidden
            live.transient(before + padded + max(some + all_seen + square, 2 * square))
            old = before // 3  # the scores' gradients of the rows before, in bf16
            live.transient(old + 2 * square + max(some + all_seen, square // 2))
            live.transient(square + square // 2 + max(one * rows // s.seq, all_seen // 2, square // 2 + all_seen // 2))
            before = square + square // 2
        summed = 2 * s.seq * s.k * 4 if self.grouped else 0
        live.transient(before + summed)
        return live.most
