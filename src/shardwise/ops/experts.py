"""A mixture of experts in one function of autograd: routing, the way to the experts, their products, the way back.

Saved are the input, the chosen experts, and of the experts here the rows, gate and up; of the tokens here what their
experts have returned. The rest is computed again in backward: the router's scores, the product of gate and up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch
from shardwise.decoder.experts import Mixture, Routing, auxiliary_loss, counts, route, taken
from shardwise.ops.context import OpContext
from shardwise.ops.exchange import TokenExchange
from shardwise.ops.gradients import GradSlot, grad_slot

KERNEL = getattr(F, "grouped_mm", None)
"""torch's grouped product; None in versions without one."""

ALIGNED = 8
"""Elements of 16 bits to whose multiples torch's grouped kernel wants rows to be aligned."""


def grouped_product(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """rows [R, n], sorted by expert; weights [E, n, m]; ends: the end of each expert's rows. Returns [R, m]."""
    return one_kernel(rows, weights, ends) if has_kernel(rows, weights) else one_by_one(rows, weights, ends)


def has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped kernel is the better choice: on CUDA for bf16. On CPUs it gains little, and it has no
    float64."""
    aligned = not any(size % ALIGNED for size in weights.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and KERNEL is not None


def one_kernel(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """All products in one call."""
    assert KERNEL is not None
    out: Tensor = KERNEL(rows, weights, offs=torch.tensor(ends, dtype=torch.int32, device=rows.device))
    return out


def one_by_one(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """A product for each expert that has rows."""
    out = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for weight, end in zip(weights, ends, strict=True):
        if end > start:
            torch.mm(rows[start:end], weight, out=out[start:end])
        start = end
    return out


class Assignment(NamedTuple):
    """The pairs of rows and experts that are computed."""

    order: Tensor
    """Pairs, as token * k + slot, sorted by expert: int64 [n]."""
    sent: Sequence[int]
    """Pairs for each rank with experts."""
    received: Sequence[int]
    """Pairs from each rank."""
    arrival: Tensor | None
    """Of the rows that come, sorted by expert, the places in the order in which they come; None where that is one."""
    ends: Sequence[int]
    """End of each expert's rows among those sorted, for the experts here."""


class RoutedForm:
    """Training form of the routed part of a mixture."""

    def __init__(self, mixture: Mixture, at: OpContext) -> None:
        self.router, self.weights, self.e = mixture.router, mixture.experts, mixture.config
        self.unit, self.later = at.unit, at.weights
        assert at.exchange is not None
        self.exchange: TokenExchange = at.exchange
        self.exchanged: list[tuple[int, int]] = []
        """(pairs sent, rows received) of each micro-batch since the last step, in the order of backward passes."""
        self.loads: Tensor | None = None
        """Choices of each expert by this rank's rows since the last step, dropped ones, and auxiliary losses:
        float64 [E + 2]."""

    def __call__(self, x: Tensor) -> Tensor:
        leaves = self.router.weight, *(getattr(self.weights, name) for name in ("gate", "up", "down"))
        y: Tensor = _Routed.apply(self, x, *leaves)  # type: ignore[no-untyped-call]
        return y

    # -- routing

    def takes(self, chosen: Tensor, batch: int) -> Tensor | None:
        """Which pairs of the rows are computed: bool [T, k]; None for all."""
        if not (self.e.capacity or self.exchange.padded):
            return None
        places = self.exchange.places(batch).to(chosen.device)
        real = (places >= 0)[:, None]
        if not self.e.capacity:
            return real.expand_as(chosen)
        everywhere = self.exchange.everywhere(chosen, batch).unflatten(0, (batch, self.exchange.seq))
        return taken(everywhere, self.e).flatten(0, 1)[places.clamp(min=0)] & real

    def assign(self, chosen: Tensor, takes: Tensor | None) -> Assignment:
        """Sort pairs by expert, and agree with the other ranks on how many go where."""
        order = chosen.flatten().argsort(stable=True)
        if takes is not None:
            order = self.exchange.kept(order, takes.flatten()[order])
        flat = chosen.flatten()[order]
        per_expert = flat.new_zeros(self.e.count).scatter_add_(0, flat, torch.ones_like(flat))
        sent, received = self.exchange.counts(per_expert)
        arrival = None if len(received) == 1 else by_expert(received, chosen.device)
        ends = accumulate(map(sum, zip(*received, strict=True)))
        return Assignment(order, sent, [sum(of_rank) for of_rank in received], arrival, list(ends))

    def to_experts(self, pairs: Tensor, a: Assignment) -> Tensor:
        """Rows of the pairs, sorted, as the experts here have them, expert by expert."""
        rows = self.exchange.to_experts(pairs, a.sent, a.received)
        return rows if a.arrival is None else rows[a.arrival]

    def to_tokens(self, rows: Tensor, a: Assignment) -> Tensor:
        """The way back: rows of the pairs, sorted."""
        if a.arrival is not None:
            rows = torch.empty_like(rows).index_copy_(0, a.arrival, rows)
        return self.exchange.to_tokens(rows, a.sent, a.received)

    # -- auxiliary losses and loads

    def auxiliary(self, routing: Routing, loads: Tensor, places: Tensor, batch: int) -> Tensor:
        e, exchange = self.e, self.exchange
        real, scope = places >= 0, e.balance
        pooled = exchange.sum_loads(loads, scope)
        size = exchange.seq
        if scope == "sequence":
            of_tokens = pooled[places.clamp(min=0) // exchange.seq]
        else:
            size *= batch * (exchange.sequences if scope == "global" else 1)
            of_tokens = pooled.sum(0, keepdim=True)
        return auxiliary_loss(routing, of_tokens, size, e, real) * (exchange.auxiliary / exchange.seq)

    def note(self, loads: Tensor, dropped: Tensor | int, loss: Tensor | float) -> None:
        if self.loads is None:
            self.loads = torch.zeros(self.e.count + 2, dtype=torch.float64, device=loads.device)
        self.loads[:-2] += loads
        self.loads[-2] += dropped
        self.loads[-1] += loss


def by_expert(received: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Places of rows that come rank by rank and in each by expert, in the order expert by expert. received: rows from
    each rank for each expert here."""
    rows = sum(map(sum, received))
    by_rank = torch.tensor(received)
    starts = (by_rank.flatten().cumsum(0) - by_rank.flatten()).view_as(by_rank).t().flatten()
    lengths = by_rank.t().flatten()
    ahead = lengths.cumsum(0) - lengths
    shifts = torch.repeat_interleave(starts - ahead, lengths, output_size=rows)
    return (shifts + torch.arange(rows)).to(device)


def _activation_backward(form: RoutedForm, grad: Tensor, gate: Tensor) -> Tensor:
    if form.weights.activation is F.silu:
        return torch.ops.aten.silu_backward(grad, gate)
    return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: RoutedForm, x: Tensor, *leaves: Tensor) -> Tensor:
        rows = form.exchange.enter(x)
        chosen, weights = form.router(rows)[:2]
        takes = form.takes(chosen, len(x))
        a = form.assign(chosen, takes)
        own = form.to_experts(rows[a.order // form.e.active], a)
        del rows
        gate_w, up_w, down_w = form.weights.matrices()
        gate, up = grouped_product(own, gate_w, a.ends), grouped_product(own, up_w, a.ends)
        out = grouped_product(form.weights.activation(gate).mul_(up), down_w.transpose(1, 2), a.ends)
        returned = _of_pairs(form.to_tokens(out, a), a.order, chosen)
        del out
        y = (returned * weights[..., None]).sum(1).to(x.dtype)
        ctx.form, ctx.sent, ctx.received, ctx.ends = form, a.sent, a.received, a.ends
        ctx.save_for_backward(x, chosen, own, gate, up, returned, takes, a.order, a.arrival, *leaves)
        return form.exchange.leave(y, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        form: RoutedForm = ctx.form
        x, chosen, own, gate, up, returned, takes, order, arrival, *_ = ctx.saved_tensors
        a = Assignment(order, ctx.sent, ctx.received, arrival, ctx.ends)
        dy = form.exchange.leave_backward(grads[0])
        weight_grads = torch.einsum("th,tkh->tk", dy.to(_wide(dy)), returned.to(_wide(dy)))
        weights, drows = _router_backward(form, form.exchange.enter(x), chosen, takes, weight_grads, len(x))
        dout = form.to_experts(dy[order // form.e.active].mul_(weights.flatten()[order, None]), a)
        del dy
        form.exchanged.append((len(order), len(own)))
        down = _experts_backward(form, a, own, gate, up, dout)
        del dout
        drows += _of_pairs(form.to_tokens(down, a), order, chosen).sum(1)
        del down
        dx, pending = form.exchange.enter_backward(drows, x)
        pending.wait()
        return None, dx, None, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _of_pairs(rows: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Rows of sorted pairs by token and slot: [T, k, hidden]; zero for pairs that are left out."""
    out = rows.new_zeros(chosen.numel(), rows.shape[1]) if len(order) < chosen.numel() else torch.empty_like(rows)
    return out.index_copy_(0, order, rows).unflatten(0, chosen.shape)


def _router_backward(
    form: RoutedForm, rows: Tensor, chosen: Tensor, takes: Tensor | None, weight_grads: Tensor, batch: int
) -> tuple[Tensor, Tensor]:
    """(weights of the pairs, gradient of the rows through the router). Adds the router's own gradient, and loads."""
    e, router, places = form.e, form.router, form.exchange.places(batch).to(rows.device)
    sequences = places.clamp(min=0) // form.exchange.seq
    loads = counts(chosen, sequences, batch, e, places >= 0)
    with torch.enable_grad():
        leaves = rows.detach().requires_grad_(), router.weight.detach().requires_grad_()
        wide = _wide(rows)
        routing = route(F.linear(leaves[0].to(wide), leaves[1].to(wide)), None, e, chosen)
        goal = (routing.weights * (weight_grads if takes is None else weight_grads * takes)).sum()
        loss: Tensor | float = 0.0
        if e.balance_loss or e.z_loss:
            loss = form.auxiliary(routing, loads, places, batch)
            goal = goal + loss
            loss = loss.detach()
    drows, dweight = torch.autograd.grad(goal, leaves)
    grad_slot(router.weight).add(dweight)
    if router.bias is not None:
        grad_slot(router.bias).add_nothing()
    real = (places >= 0)[:, None]
    form.note(loads.sum(0), 0 if takes is None else (real & ~takes).sum(), loss)
    return routing.weights.detach(), drows


def _experts_backward(form: RoutedForm, a: Assignment, own: Tensor, gate: Tensor, up: Tensor, dout: Tensor) -> Tensor:
    """The gradient of the experts' rows; those of their weights are added where they stay, now or later."""
    module = form.weights
    gate_w, up_w, down_w = module.matrices()
    activated = module.activation(gate)
    product = activated * up
    dproduct = grouped_product(dout, down_w, a.ends)
    dgate, dup = _activation_backward(form, dproduct * up, gate), dproduct.mul_(activated)
    del activated
    down = grouped_product(dgate, gate_w.transpose(1, 2), a.ends)
    down += grouped_product(dup, up_w.transpose(1, 2), a.ends)

    def products() -> None:
        for weight, left, right in ((module.gate, own, dgate), (module.up, own, dup), (module.down, dout, product)):
            _add_products(grad_slot(weight), left, right, a.ends, module.hidden)

    form.later.add(form.unit, products, own, dgate, dup, dout, product)
    return down


def _add_products(slot: GradSlot, left: Tensor, right: Tensor, ends: Sequence[int], hidden: int) -> None:
    """Add left^T right of each expert's rows to its matrix: also where there are none, since what is there may be
    another step's. left: [R, hidden]; right: [R, ffn]."""
    start = 0
    for matrix, end in zip(slot.view.unflatten(0, (-1, hidden)), ends, strict=True):
        own = GradSlot(matrix)
        own.empty = slot.empty
        if end > start:
            own.add_product(left[start:end].t(), right[start:end])
        else:
            own.add_nothing()
        start = end
    slot.empty, slot.arrived = False, True


def routed_parts(mixture: Mixture) -> Iterable[nn.Module]:
    return mixture.router, mixture.experts


def mixture(module: Mixture, at: OpContext) -> Callable[[Tensor, Batch], Tensor]:
    """The training form of a mixture of experts. Its shared experts have forms of their own."""
    form = RoutedForm(module, at)
    module.__dict__["routed_form"] = form

    def forward(x: Tensor, batch: Batch) -> Tensor:
        y = form(x)
        return y if module.shared is None else y + module.shared(x)

    return forward
