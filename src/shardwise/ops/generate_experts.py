"""A mixture of experts in generation: forward alone, and of the experts here those are read that have rows.

All tensor-parallel ranks have the same tokens and route them in the same way. Each computes its own pairs of a token
and an expert (`ExpertShare`), and its part of the shared experts; one sum over the ranks adds everything up. Rows for
experts of other replicas go there and come back. No token is dropped, whatever `Experts.capacity` says: training drops
by the order of tokens in whole sequences, of which a step of generation has a few tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.decoder.experts import ExpertWeights, Mixture
from shardwise.ops.exchange import TokenExchange
from shardwise.ops.expert_share import ExpertShare
from shardwise.ops.experts import by_expert
from shardwise.ops.generate import GenerationContext, copied, gated, linear, side_by_side
from shardwise.ops.products import MakeProduct, Product


class Pairs(NamedTuple):
    """Pairs of a token and an expert that a rank sees to, sorted by expert."""

    order: Tensor
    """Each as token * k + slot: int64 [n]."""
    counts: Tensor
    """Of each expert of the rank's place: int64 [across * experts of a rank]."""


def own_pairs(chosen: Tensor, share: ExpertShare) -> Pairs:
    """The pairs of a rank. chosen: experts of T tokens, int64 [T, k]."""
    flat, several = chosen.flatten(), share.count * share.places
    order = flat.argsort(stable=True)
    if share.places > 1:
        order = order[flat[order] // share.count % share.places == share.place]
    if share.copies > 1:
        order = order[order // chosen.shape[1] % share.copies == share.copy]
    experts = flat[order]
    if share.places > 1:
        experts = experts // several * share.count + experts % share.count
    return Pairs(order, torch.bincount(experts, minlength=share.across * share.count))


class ServedExperts:
    """The form of a mixture. x: [1, T, hidden] -> the same."""

    def __init__(self, module: Mixture, products: list[Product], shared: Product | None, at: GenerationContext) -> None:
        assert at.exchange is not None and at.share is not None
        self.router, self.active, self.hidden = module.router, module.config.active, module.experts.hidden
        self.products, self.shared, self.leave = products, shared, at.arounds["experts"].leave
        self.exchange: TokenExchange = at.exchange
        self.share: ExpertShare = at.share

    def __call__(self, x: Tensor) -> Tensor:
        y = self._routed(x[0])[None]
        if self.shared is not None:
            y = y.add_(self.shared(x))
        return self.leave.forward(y)

    def serve_others(self) -> None:
        """A step without tokens: other replicas may have some for the experts here."""
        weight = self.router.weight
        self._routed(weight.new_empty(0, self.hidden))

    def _routed(self, rows: Tensor) -> Tensor:
        """Weighted sum of the outputs of the pairs of this rank: [T, hidden]."""
        chosen, weights, *_ = self.router(rows)
        order, counts = own_pairs(chosen, self.share)
        sent, received = self.exchange.counts(counts)
        taken, tokens = [sum(of_rank) for of_rank in received], order // self.active
        own = self.exchange.to_experts(rows.index_select(0, tokens), sent, taken)
        out = self.exchange.to_tokens(self._experts(own, received), sent, taken)
        out = out.to(weights.dtype).mul_(weights.flatten()[order, None])
        y = torch.zeros_like(rows, dtype=weights.dtype).index_add_(0, tokens, out)
        return y.to(rows.dtype)

    def _experts(self, rows: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
        """Outputs of the experts here. rows: rank by rank, and by expert; received: rows from each rank for each
        expert."""
        arrival = by_expert(received, rows.device) if len(received) > 1 else None
        own = rows if arrival is None else rows[arrival]
        out, start = torch.empty_like(own), 0
        for product, count in zip(self.products, map(sum, zip(*received, strict=True)), strict=True):
            if count:
                out[start : start + count] = product(own[start : start + count])
                start += count
        return out if arrival is None else torch.empty_like(out).index_copy_(0, arrival, out)


def mixture(module: Mixture, at: GenerationContext) -> ServedExperts:
    """The form of a mixture. Its shared experts are parts of one sum with the routed ones."""
    shared = None
    if module.shared is not None:
        down = linear(module.shared.down, replace(at, arounds={}))
        shared = gated(side_by_side(module.shared.gate_up), down, module.shared.activation)
    return ServedExperts(module, _products(module.experts, at), shared, at)


def _products(weights: ExpertWeights, at: GenerationContext) -> list[Product]:
    names = "gate", "up", "down"
    gate, up, down = (matrix.detach() for matrix in weights.matrices())
    outputs_first = _turned if at.lasting and not at.keep.copies else lambda stack: stack.transpose(1, 2)
    matrices = outputs_first(gate), outputs_first(up), down
    for name, each in zip(names, matrices, strict=True):
        at.copied.extend(copied(weights, name, at.keep, *each))
    return [_expert(*each, at.keep, weights.activation) for each in zip(*matrices, strict=True)]


def _turned(stack: Tensor) -> Tensor:
    """Matrices [E, n, m], each transposed where it is: [E, m, n]. CPUs without instructions for bf16 take ten times as
    long for a product whose inputs are a matrix's rows."""
    out = stack.view(len(stack), stack.shape[2], stack.shape[1])
    for matrix, place in zip(stack, out, strict=True):
        place.copy_(matrix.t().clone(memory_format=torch.contiguous_format))
    return out


def _expert(gate: Tensor, up: Tensor, down: Tensor, keep: MakeProduct, activation: Product) -> Product:
    if keep.copies:
        return gated(keep(torch.cat((gate, up)), None), keep(down, None), activation)
    gate_of, up_of = keep(gate, None), keep(up, None)
    return gated(lambda x: torch.cat((gate_of(x), up_of(x)), -1), keep(down, None), activation)


def served_parts(module: Mixture) -> Iterable[nn.Module]:
    """Modules of a mixture that its form computes itself."""
    inside: list[nn.Module] = [module.router, module.experts]
    return inside if module.shared is None else [*inside, module.shared, module.shared.down]
