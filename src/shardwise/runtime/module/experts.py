"""Form of a user's experts over ranks: tokens travel to the ranks that have their experts, and back.

The exchange is that of the catalog's mixtures (`runtime/expert`). The experts compute by their module's own forward, on
rows that have one expert and the weight 1 each; weights are applied where the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.layout.experts import gathers_sequences
from shardwise.layout.units import UnitPlan
from shardwise.runtime.expert.exchange import RankExchange


def lower_experts(module: nn.Module, plan: UnitPlan, exchange: RankExchange) -> RankExperts:
    """Give a module of experts its form. Its attribute `num_experts`, if it has one, becomes the number here."""
    own = next(module.parameters(recurse=False))
    here = len(own) // plan.layout.ep
    if hasattr(module, "num_experts"):
        module.num_experts = here  # type: ignore[assignment]
    module.forward = form = RankExperts(module, plan, exchange, here)  # type: ignore[assignment]
    return form


def use_exact_products(module: nn.Module) -> None:
    """Let the experts of a `transformers` model compute one by one: its grouped products have no float64."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "_experts_implementation", None) not in (None, "eager", "batched_mm"):
            config._experts_implementation = "eager"


class Route(NamedTuple):
    """Rows that a rank gives to each rank, and has from each, on the way to the experts."""

    sent: Sequence[int]
    received: Sequence[int]


class RankExperts:
    """Experts of one rank, in place of their module's forward. here: how many."""

    def __init__(self, module: nn.Module, plan: UnitPlan, exchange: RankExchange, here: int) -> None:
        self.forward, self.exchange, self.here, self.ep = module.forward, exchange, here, plan.layout.ep
        self.sums = gathers_sequences(plan.layout)
        """Whether every rank of a tensor-parallel group has a part of each expert's width."""
        self.exchanged: list[tuple[int, int]] = []
        """(rows sent, rows received) of each micro-batch of a step, in the order of backward passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 3 or not all(isinstance(x, Tensor) and x.dim() == 2 for x in given):
            raise UserError("experts take (tokens [T, hidden], chosen experts [T, k], their weights [T, k])")
        tokens, chosen, weights = given
        rows, factors = (_Enter.apply(self.exchange, x, self.sums) for x in (tokens, weights))  # type: ignore[no-untyped-call]
        chosen = self.exchange.enter(chosen.unsqueeze(0))
        out = self._across(rows, chosen, factors) if self.ep > 1 else self._local(rows, chosen, factors)
        out = out.clone() if self.sums else out  # summed in place
        left: Tensor = _Leave.apply(self.exchange, out, tokens.shape)  # type: ignore[no-untyped-call]
        return left

    def _local(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Outputs for rows [n, hidden] with their experts [n, k]; an empty batch needs none."""
        out: Tensor = self.forward(rows, chosen, weights) if len(rows) else rows.new_zeros(rows.shape)
        return out

    def _across(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same by experts on other ranks."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        per_expert = flat.new_zeros(self.here * self.ep).scatter_add_(0, flat, torch.ones_like(flat))
        sent, received = self.exchange.counts(per_expert, len(flat))
        route = Route(sent, [sum(of_rank) for of_rank in received])
        there = _Travel.apply(self.exchange, route, rows[order // chosen.shape[1]], self.exchanged)  # type: ignore[no-untyped-call]
        counts = torch.tensor(received, device=flat.device)
        local = torch.arange(self.here, device=flat.device).repeat(len(received))
        local = local.repeat_interleave(counts.flatten(), output_size=len(there)).unsqueeze(1)
        out = self._local(there, local, torch.ones_like(local, dtype=there.dtype))
        back = Route(route.received, route.sent)
        # `there` ties the way back to the way there: both have a backward pass on ranks without rows, too.
        returned = _Travel.apply(self.exchange, back, out, None, there)  # type: ignore[no-untyped-call]
        pairs = torch.zeros_like(returned).index_copy(0, order, returned).unflatten(0, chosen.shape)
        return (pairs * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


class _Enter(torch.autograd.Function):
    """From what every rank of a tensor-parallel group has, [T, n], to the rows that this rank routes. sums: whether
    the gradient is summed, which is done in place."""

    @staticmethod
    def forward(ctx: Any, exchange: RankExchange, x: Tensor, sums: bool) -> Tensor:
        ctx.exchange, ctx.shape, ctx.sums = exchange, (1, *x.shape), sums
        return exchange.enter(x.unsqueeze(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        like = torch.empty(ctx.shape, device="meta")
        grad = grads[0].clone() if ctx.sums else grads[0]
        grad, pending = ctx.exchange.enter_backward(grad.contiguous(), like)
        pending.wait()
        return None, grad.squeeze(0), None


class _Leave(torch.autograd.Function):
    """The way back to what every rank of a tensor-parallel group has, of this shape."""

    @staticmethod
    def forward(ctx: Any, exchange: RankExchange, rows: Tensor, shape: torch.Size) -> Tensor:
        ctx.exchange = exchange
        like = torch.empty((1, *shape), device="meta")
        return exchange.leave(rows, like).squeeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.exchange.leave_backward(grads[0].unsqueeze(0)), None


class _Travel(torch.autograd.Function):
    """Rows to other ranks; their gradients come back. record: takes how many, or None. tie: a tensor whose
    backward pass must follow, or None."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RankExchange, route: Route, rows: Tensor, record: list[tuple[int, int]] | None,
        tie: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.exchange, ctx.route, ctx.record = exchange, route, record
        return exchange.to_experts(rows, route.sent, route.received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None, None]:
        if ctx.record is not None:
            ctx.record.append((sum(ctx.route.sent), sum(ctx.route.received)))
        return None, None, ctx.exchange.to_tokens(grads[0], ctx.route.sent, ctx.route.received), None, None
