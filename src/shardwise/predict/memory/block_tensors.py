"""A block's tensors in the order in which its forward and backward pass allocate and free them.

Follows `decoder/` and `runtime/` line by line, each tensor as a number of bytes, so the most that a pass holds at one
time needs no list of moments to choose from.
"""

from shardwise.layout.placement import width_held
from shardwise.layout.units import UnitPlan
from shardwise.ops.limits import converted_bytes, dense_rows
from shardwise.predict.memory.context_tensors import attention_tensors
from shardwise.predict.memory.expert_tensors import MixtureTensors
from shardwise.predict.memory.sizes import MapInputs, Sizes, query_norms, recomputes_activation, shared_width
from shardwise.predict.memory.transients import (
    LiveBytes,
    dropout,
    gather,
    norm_backward,
    norm_forward,
    rolled,
    scatter,
    weight_gradient,
)


class BlockTensors:
    """One block of a rank. apart: the gradients of its weights come later; adds: to gradients that are there."""

    def __init__(self, plan: UnitPlan, s: Sizes, part: str, apart: bool = False, adds: bool = False) -> None:
        self.plan, self.s, self.apart, self.adds = plan, s, apart, adds
        self.mixture = MixtureTensors.of(plan, s, part) if plan.blueprint.routes_in(part) else None
        self.ffn = shared_width(plan) if self.mixture else s.ffn
        self.live, self.attention = LiveBytes(), attention_tensors(plan, s)
        self.stream = s.stream * s.hidden * s.element
        self.full = s.tokens * s.hidden * s.element
        self.inner = s.tokens * self.ffn * s.element
        self.q, self.k, self.v = self.attention.q, self.attention.k, self.attention.v
        self.gated, self.sp = plan.model.gated, plan.layout.sp
        self.pre, self.post = plan.model.norm_placement != "post", plan.model.norm_placement != "pre"
        self.pieces = plan.layout.tp // plan.layout.inner_ranks
        """Ranks whose outputs of each map are gathered."""
        # A row's statistics: one number in fp32, or two in the precision of the weights.
        self.statistics = s.statistic if plan.model.norm == "rmsnorm" else 2 * s.element
        self.rotates = bool(plan.model.rotated)
        self.cuda = plan.cuda
        self.compiled = plan.layout.compile == "block"
        self.reads = MapInputs.of(plan, part)
        lora = plan.model.lora
        self.low = s.tokens * lora.rank * s.element if lora else 0
        """Bytes between the two factors of an adapter."""
        self.base = lora.base if lora else ""
        """dtype of weights in fewer bits, which are converted for each product."""

    # -- forward

    def forward(self, saves: bool) -> int:
        """The most bytes in a forward pass beyond the block's input."""
        self._forward(saves)
        return self.live.most

    def _forward(self, saves: bool, again: bool = False) -> None:
        """Ends with the block's output, and what is saved besides its input."""
        start = self.live.now
        if self.plan.fused:
            self._fused_forward(again and self.plan.layout.recompute == "full")
        else:
            self._plain_forward(saves)
        if not saves:
            self.live.free(self.live.now - start - self.stream)

    def _fused_forward(self, again: bool) -> None:
        """again: whether it is computed for backward, by recompute=full."""
        live = self.live
        self._norm()
        self._column([self.attention.qkv])
        # On CUDA a rotated copy takes the place of what the product gave.
        live.transient(self.attention.qkv if self.cuda else rolled(self.plan, self.q + self.k))
        self.attention.forward(live, saves=not self.attention.selective)
        self._row(self.s.attended)  # and the residual, in its place
        self._norm()
        self._column([2 * self.inner])
        live.allocate(2 * self.inner)  # silu, product
        if not again or not self.cuda or self.plan.layout.tp > 1:  # else nothing reads the output
            self._row(self.s.ffn)

    def _plain_forward(self, saves: bool) -> None:
        live, stream = self.live, self.stream
        if self.pre:
            self._norm()
        self._attend(saves)
        if self.pre and not (saves and self.reads.attention):
            live.free(stream)
        self._post_norm(saves)
        self._add()
        if self.pre:
            self._norm()
        routed = self._mixture_forward(saves) if self.mixture else 0
        if self.ffn:
            self._feed_forward(saves)
            live.free(routed)  # its sum with the output of shared experts takes no more than these
        if not saves:
            live.free(self.pre * stream + (3 if self.gated else 2) * self.inner)
        else:
            live.free(self.pre * (not self.reads.feed_forward) * stream + (not self.reads.down) * self.inner)
        self._post_norm(saves)
        live.free(stream)  # attention's output, whose name is taken now
        self._add()
        live.free(stream)
        if self.plan.model.parallel_residual:
            live.free(stream)  # attention's sum, which no norm has saved

    def _mixture_forward(self, saves: bool) -> int:
        """Routed experts; returns the bytes of their output."""
        assert self.mixture
        self.mixture.forward(self.live)
        self.live.free(0 if saves else sum(self.mixture.saved().values()))
        return self.stream

    def _feed_forward(self, saves: bool) -> None:
        live = self.live
        self._column([self.inner] * (1 + self.gated))
        live.allocate(self.inner)  # silu or gelu
        if self.gated:
            live.allocate(self.inner)
            live.free(0 if saves else self.inner)
        self._row(self.ffn)
        if self.mixture:
            live.transient(self.stream)

    def _attend(self, saves: bool) -> None:
        """Attention from its normed input to its output."""
        live, attention = self.live, self.attention
        before = live.now
        self._project(saves)
        attention.forward(live, saves and self.plan.layout.recompute != "selective")
        if attention.math:
            live.allocate(attention.out)  # heads side by side
            live.free(attention.out)
        self._row(self.s.attended)
        unread = 0 if self.reads.output or attention.shares_output else attention.out
        live.free(attention.unsaved + unread if saves else live.now - before - self.stream)

    def _project(self, saves: bool) -> None:
        live = self.live
        self._column([self.q, self.k, self.v])
        if self.plan.model.qk_norm:
            for rows, width in query_norms(self.plan, self.s):
                self._normed(rows, width)
            live.free(0 if saves else self.q + self.k)
        if self.rotates:
            for nbytes in (self.q, self.k):
                live.allocate(nbytes)
                live.transient(rolled(self.plan, nbytes))
            live.free(self.q + self.k)

    def _post_norm(self, saves: bool) -> None:
        """The norm of a branch's output, which it saves."""
        if self.post:
            self._norm()
            self.live.free(0 if saves else self.stream)

    def _norm(self) -> None:
        self._normed(self.s.stream, self.s.hidden)

    def _normed(self, rows: int, width: int) -> None:
        """A norm's output and its statistics."""
        self.live.allocate(rows * (width * self.s.element + self.statistics))
        self.live.transient(norm_forward(self.plan, self.s, rows * width, self.compiled))

    def _add(self) -> None:
        """The sum with the residual stream, of what dropout leaves."""
        drops = bool(self.plan.model.dropout)
        if drops:
            self._dropped()
        self.live.allocate(self.stream)
        self.live.free(self.stream if drops else 0)

    def _dropped(self) -> None:
        self.live.allocate(self.stream)
        self.live.transient(dropout(self.s.stream * self.s.hidden, self.s.stream))

    def _gathered(self, width: int = 0) -> int:
        """Bytes of what is gathered along the sequence, now there. width: its width, 0 for the stream's."""
        if not self.sp:
            return 0
        full = self.s.tokens * (width or self.s.hidden) * self.s.element
        self.live.transient(gather(self.plan, self.s, width))
        self.live.allocate(full)
        return full

    def _scattered(self, width: int = 0) -> None:
        """A partial sum that is there becomes one of the residual stream, or of another width."""
        if self.sp:
            s, width = self.s, width or self.s.hidden
            self.live.transient(scatter(self.plan, s, width) - s.tokens * width * s.element)
            self.live.free((s.tokens - s.stream) * width * s.element)

    def _column(self, outputs: list[int], width: int = 0) -> None:
        gathered = self._gathered(width)
        for nbytes in outputs:
            self._output_of(nbytes, width or self.s.hidden)
        self.live.free(gathered)

    def _row(self, inputs: int) -> None:
        self._output_of(self.full, inputs)
        self._scattered()

    def _dense(self, outputs: int, inputs: int) -> int:
        """Bytes of the block of a weight in fewer bits that is converted at a time."""
        return dense_rows(outputs, inputs) * inputs * converted_bytes(self.base, self.s.element) if self.base else 0

    def _output_of(self, nbytes: int, inputs: int) -> None:
        """A map's output; where the ranks' parts are gathered, beside these parts as they come and a rank's own."""
        if self.pieces > 1:
            self.live.transient(2 * nbytes + nbytes // self.pieces)
        self.live.allocate(nbytes)
        self.live.transient(max(self.low, self._dense(nbytes // (self.s.tokens * self.s.element), inputs)))

    # -- backward

    def backward(self, keeps_gradient: bool) -> int:
        """The most bytes in a backward pass beyond what is saved, with what is computed again.

        keeps_gradient: somebody holds the gradient of the block's output until the end.
        """
        live, recompute = self.live, self.plan.layout.recompute in ("full", "input")
        live.allocate(self.stream)
        if recompute:
            self._forward(saves=True, again=True)
        elif recomputes_activation(self.plan, self.mixture is not None):
            live.allocate(self.inner)
        kept = keeps_gradient or recompute or (self.apart and not self.sp and not self.plan.model.dropout)
        if self.plan.fused:
            self._fused_backward(kept)
        else:
            self._plain_backward(kept)
        return live.most

    def _fused_backward(self, kept: bool) -> None:
        live, stream, qkv = self.live, self.stream, self.attention.qkv
        self._row_backward(self.inner, self.s.ffn, self.inner, fused=True)
        live.allocate(2 * self.inner)
        live.free(4 * self.inner)
        self._column_backward([2 * self.s.ffn], 2 * self.inner)
        self._norm_backward()
        self._row_backward(self.attention.out, self.s.attended, self._output, fused=True)
        # the gradients of the norm's output and of the block's, and the residual
        live.free(2 * stream + (0 if kept else stream))
        whole = self.attention.backward(live, self.apart)
        if not whole:
            live.allocate(qkv)
        live.transient(rolled(self.plan, self.q + self.k))
        self._column_backward([self.s.q + self.s.k + self.s.v], 0 if whole else qkv)
        self._norm_backward()
        live.free(stream + (0 if whole and self.apart else qkv))
        self._sum()

    def _plain_backward(self, kept: bool) -> None:
        live, stream, model = self.live, self.stream, self.plan.model
        parallel = model.parallel_residual
        if self.ffn:
            self._feed_forward_backward()
        if self.mixture:
            if self.ffn:
                live.allocate(0 if self.apart else stream)  # the normed input, which the router reads
            self.mixture.backward(live, self.apart, self.adds)
            live.free(stream + (stream if self.ffn else 0))  # that input, and the sum of two gradients of it
        if self.pre:
            self._norm_backward()
            live.free(stream if parallel else 2 * stream)  # the residual
        self._sum()
        if parallel or kept:
            live.allocate(stream)  # one of the two stays
        own = self._branch_backward()
        self._row_backward(self.attention.out, self.s.attended, self._output * self.reads.output)
        live.free(own + (stream if parallel and not kept else 0))
        self._queries_backward()
        if self.pre:
            self._norm_backward()
            live.free(stream)
        self._sum()

    def _feed_forward_backward(self) -> None:
        live, inner = self.live, self.inner
        own = self._branch_backward()
        self._row_backward(inner, self.ffn, inner * self.reads.down)
        live.free(own)
        if self.gated:
            live.allocate(2 * inner)
            live.free(3 * inner)  # the product's gradient, silu, up
        live.allocate(inner)
        live.free(2 * inner)  # its gradient; gate, or up
        branches = 1 + self.gated
        self._column_backward([self.ffn] * branches, branches * inner, reads=self.reads.feed_forward)

    def _sum(self) -> None:
        """The sum of two gradients of the residual stream, in a tensor of its own."""
        self.live.allocate(self.stream)
        self.live.free(2 * self.stream)

    def _queries_backward(self) -> None:
        """From the gradient of the core's output to that of the norm's."""
        live, s, model = self.live, self.s, self.plan.model
        whole = self.attention.backward(live, self.apart)
        if self.rotates:
            for nbytes in (self.k, self.q):
                live.allocate(nbytes)
                live.transient(rolled(self.plan, nbytes))
                live.free(0 if whole else nbytes)
        if model.qk_norm:
            for rows, width in reversed(query_norms(self.plan, s)):
                live.transient(norm_backward(self.plan, s, rows * width))
                # Its input goes with the statistics; the gradient takes the place of the output's.
                live.free(rows * (width * s.element + self.statistics))
        grads = self.attention.qkv + (self.q + self.k if self.rotates and whole else 0)
        copies = 0
        if self.attention.math and not self.attention.selective:
            # with heads side by side
            copies = (self.q if s.heads > 1 else 0) + self.k * (2 if s.kv_heads > 1 else 1)
        live.allocate(copies)
        # Without a norm before it that is the block's own input, which others hold.
        given = 0 if self.pre or not self.reads.attention else self.stream
        self._column_backward([s.q, s.k, s.v], grads + copies - given, reads=self.reads.attention)
        live.free(copies if self.apart else 0)  # of what they were made of

    @property
    def _output(self) -> int:
        """Bytes of attention's output, where its core does not save it, too."""
        return 0 if self.attention.shares_output else self.attention.out

    def _branch_backward(self) -> int:
        """Bytes of the gradient before dropout and a branch's norm, if it is another one; they are kept for the weights
        without sp."""
        drops = bool(self.plan.model.dropout)
        if drops:
            self._dropped()
        if self.post:
            self._norm_backward()
            self.live.free(self.stream * (1 + drops))  # what the norm was given, and its output's gradient
        own = self.stream if drops or self.post else 0
        return 0 if self.apart and not self.sp else own

    def _row_backward(self, gradient: int, columns: int, saved: int, fused: bool = False) -> None:
        """gradient: of the input, in bytes; saved: what goes with it. fused: the weights' gradient comes first."""
        live = self.live
        gathered = self._gathered()
        piece = self._piece([self.s.hidden], columns)
        if fused:
            live.transient(piece)
        live.allocate(gradient)
        if not fused:
            live.transient(max(piece, self.low, self._dense(self.s.hidden, columns)))
        if not self.apart:
            live.free(gathered + saved)

    def _column_backward(self, rows: list[int], grads: int, width: int = 0, reads: bool = True) -> None:
        """grads: bytes of the gradients of the outputs. The input, of a width, goes with them, unless they are kept.
        reads: whether it is there, for gradients of weights."""
        live, s, deep = self.live, self.s, width or self.s.hidden
        live.allocate(s.tokens * deep * s.element)
        live.transient(max(self.low, *(self._dense(count, deep) for count in rows)))
        self._scattered(width)
        if not reads:
            live.free(grads)
        elif not self.apart:
            gathered = self._gathered(width)
            live.transient(max(self._piece(rows, deep), self.low))
            live.free(gathered + grads + s.stream * deep * s.element)

    def _piece(self, rows: list[int], columns: int) -> int:
        if self.apart or not self.adds or self.plan.blueprint.freezes:
            return 0
        return max(weight_gradient(self.plan, self.s, width_held(count, self.pieces), columns) for count in rows)

    def _norm_backward(self, width: int = 0) -> None:
        """From the gradient of a norm's output, which stays, to that of its input."""
        s, elements = self.s, self.s.stream * (width or self.s.hidden)
        self.live.transient(norm_backward(self.plan, s, elements, self.compiled))
        self.live.allocate(elements * s.element)
        self.live.free(s.stream * self.statistics)

    def of_weights(self) -> int:
        """The most bytes while the gradients of the weights are computed apart, beyond what is kept for them."""
        s, live, fused = self.s, self.live, self.plan.fused
        live.transient(max(self._piece([s.hidden], self.ffn), self._piece([s.hidden], s.attended)))
        for rows, width in (([self.ffn] * (1 + self.gated), s.hidden), *self._columns()):
            gathered = self._gathered(width)
            live.transient(self._piece([sum(rows)] if fused else rows, width))
            live.free(gathered)
        return live.most

    def _columns(self) -> list[tuple[list[int], int]]:
        """(widths of outputs, width of the input) of the column-parallel maps before attention's core."""
        s = self.s
        return [([s.q, s.k, s.v], s.hidden)]
