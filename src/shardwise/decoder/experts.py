"""Mixtures of experts: a router chooses a few of many feed-forward parts for each token.

Routing is in functions of its own, since every form of a mixture routes in one way. Scores and weights are in fp32 for
bf16 inputs."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder.modules import Batch, GatedMLP
from shardwise.model import ModelConfig
from shardwise.model.config import Experts


class Routing(NamedTuple):
    """Experts of T tokens, of E experts k each."""

    chosen: Tensor
    """int64 [T, k]."""
    weights: Tensor
    """Factors of the outputs of the chosen experts: [T, k]."""
    shares: Tensor
    """Scores of each token over all experts, which add up to 1: [T, E]."""
    logits: Tensor
    """[T, E]."""


def route(logits: Tensor, bias: Tensor | None, e: Experts, chosen: Tensor | None = None) -> Routing:
    """Experts of each token from the router's logits [T, E]. bias: added to the scores for the choice alone. chosen:
    the choice, where it has been made before."""
    scores = logits.sigmoid() if e.scoring == "sigmoid" else logits.softmax(-1)
    if chosen is None:
        choice = scores.detach() if bias is None else scores.detach() + bias
        chosen = (_within_groups(choice, e) if e.active_groups < e.groups else choice).topk(e.active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if e.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    shares = scores / scores.sum(-1, keepdim=True) if e.scoring == "sigmoid" else scores
    return Routing(chosen, weights * e.scale if e.scale != 1.0 else weights, shares, logits)


def _within_groups(choice: Tensor, e: Experts) -> Tensor:
    """Scores [T, E], with those outside of the best groups at minus infinity."""
    grouped = choice.unflatten(-1, (e.groups, -1))
    best = grouped.amax(-1) if e.group_score == "max" else grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    closed = torch.ones_like(best, dtype=torch.bool)
    closed.scatter_(-1, best.topk(e.active_groups, -1).indices, False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


def counts(chosen: Tensor, sequences: Tensor, batch: int, e: Experts, real: Tensor | None = None) -> Tensor:
    """Tokens of each of `batch` sequences that chose each expert: int64 [batch, E]. chosen: [T, k]; sequences: int64
    [T], each token's; real: [T], whether it is a token and no padding."""
    ones = torch.ones_like(chosen) if real is None else real[:, None].expand_as(chosen).to(torch.int64)
    cells = sequences[:, None] * e.count + chosen
    return chosen.new_zeros(batch * e.count).index_add_(0, cells.flatten(), ones.flatten()).view(batch, e.count)


def taken(chosen: Tensor, e: Experts) -> Tensor:
    """Whether an expert takes a token: bool [B, S, k] of chosen [B, S, k], whole sequences in order. Each expert takes
    the first ones of a sequence, up to its capacity."""
    flat = chosen.flatten(1)
    one_hot = (flat[..., None] == torch.arange(e.count, device=flat.device)).to(torch.int64)
    earlier = (one_hot.cumsum(1) - one_hot).gather(-1, flat[..., None]).squeeze(-1)
    return (earlier < e.most(chosen.shape[1])).view_as(chosen)


def auxiliary_loss(routing: Routing, loads: Tensor, tokens: int, e: Experts, real: Tensor | None = None) -> Tensor:
    """Sum of the auxiliary losses of T tokens, as if each were a sequence's: the caller multiplies it by the share of a
    token. loads: [T or 1, E], tokens that chose each expert among those that a token is counted with, of which there
    are `tokens`. real: [T].

    Balance: E / k times the sum over experts of (part of the choices) x (mean share) (Fedus et al. 2022, section 2.2;
    DeepSeek-V3, section 2.1.2). z: the squared log-sum-exp of the logits (Zoph et al. 2022).
    """
    each = e.balance_loss * e.count / e.active * (loads / tokens * routing.shares).sum(-1)
    if e.z_loss:
        each = each + e.z_loss * routing.logits.logsumexp(-1).square()
    return (each if real is None else each.masked_fill(~real, 0.0)).sum()


def bias_step(loads: Tensor, e: Experts) -> Tensor:
    """Change of the router's bias after a step whose tokens chose the experts so often: [E]."""
    loads = loads.double()
    return e.bias_rate * torch.sign(loads.mean() - loads)


class _WithLoss(torch.autograd.Function):
    """The first tensor; the second, a scalar, is added to what backward starts from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.new_ones(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.loss


class Router(nn.Module):
    """Logits of all experts. weight: [E, hidden]; bias: [E] or None."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, config.hidden))
        self.bias = nn.Parameter(torch.empty(experts.count)) if experts.router_bias else None
        self.experts = experts

    def forward(self, x: Tensor) -> Routing:
        wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        bias = None if self.bias is None else self.bias.detach().to(wide)
        return route(F.linear(x.to(wide), self.weight.to(wide)), bias, self.experts)


class ExpertWeights(nn.Module):
    """Weights of all experts, a [hidden, ffn] matrix for each, end to end: gate, up, down [E hidden, ffn]."""

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.hidden, self.width = config.hidden, experts.ffn
        for name in ("gate", "up", "down"):
            self.register_parameter(name, nn.Parameter(torch.empty(experts.count * config.hidden, experts.ffn)))
        self.activation = F.silu if config.activation == "silu" else partial(F.gelu, approximate="tanh")

    def matrices(self) -> tuple[Tensor, ...]:
        """Gate, up and down as [E, hidden, ffn]."""
        return tuple(w.unflatten(0, (-1, self.hidden)) for w in (self.gate, self.up, self.down))

    def forward(self, x: Tensor, routing: Routing, takes: Tensor) -> Tensor:
        """Weighted sum of the outputs of each token's experts: [T, hidden]. takes: bool [T, k], which of them count."""
        y = torch.zeros_like(x, dtype=routing.weights.dtype)
        gates, ups, downs = self.matrices()
        for number in range(len(gates)):
            gate, up, down = gates[number], ups[number], downs[number]
            token, slot = torch.where((routing.chosen == number) & takes)
            rows = x[token]
            out = (self.activation(rows @ gate) * (rows @ up)) @ down.t()
            y = y.index_add(0, token, out.to(y.dtype) * routing.weights[token, slot, None])
        return y.to(x.dtype)


class Mixture(nn.Module):
    """Weighted sum of each token's experts, plus shared experts that see every token. x: [B, S, hidden]."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        assert config.experts
        self.name, self.config = name, config.experts
        self.router = Router(config, config.experts)
        self.experts = ExpertWeights(config, config.experts)
        shared = config.experts.shared * config.experts.ffn
        self.shared = GatedMLP(config, shared) if shared else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        rows, e = x.flatten(0, 1), self.config
        routing = self.router(rows)
        chosen = routing.chosen
        sequences = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])
        loads = counts(chosen, sequences, len(x), e)
        takes = torch.ones_like(chosen, dtype=torch.bool)
        if e.capacity:
            takes = taken(chosen.unflatten(0, x.shape[:2]), e).flatten(0, 1)
        y = self.experts(rows, routing, takes)
        if batch.auxiliary and (e.balance_loss or e.z_loss):
            # ([T, E]: choices of each expert among the tokens that a token is counted with, their number)
            tokens = x.shape[1]
            pool = {"sequence": 1, "micro-batch": batch.pool, "global": len(loads)}[self.config.balance]
            pooled = loads.unflatten(0, (-1, pool)).sum(1)
            of_tokens, size = pooled.repeat_interleave(pool * tokens, 0), pool * tokens
            loss = auxiliary_loss(routing, of_tokens, size, e)
            y = _WithLoss.apply(y, loss * (batch.auxiliary / x.shape[1]))  # type: ignore[no-untyped-call]
        if batch.loads is not None:
            batch.loads[self.name] = batch.loads.get(self.name, 0) + loads.sum(0)
        y = y.view_as(x)
        return y if self.shared is None else y + self.shared(x)
