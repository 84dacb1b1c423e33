"""A decoder's part as generation computes it: `ops.table` applied to it once its weights have been read."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.decoder import Decoder
from shardwise.decoder.experts import Router
from shardwise.layout.experts import across_axes, expert_share
from shardwise.layout.tensor import edges
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import Around
from shardwise.ops.generate import GenerationContext
from shardwise.ops.paged import PagedCache
from shardwise.ops.products import MakeProduct
from shardwise.ops.table import lower
from shardwise.runtime.expert.exchange import RankExchange
from shardwise.runtime.tensor.lowering import context_of
from shardwise.runtime.tensor.redistribute import GatherOutputs, redistribution
from shardwise.runtime.transport.comms import Comms

LOGITS = "logits"
"""Unit of the ledger: the gather of the logits."""


def apply_generation(
    decoder: Decoder,
    part: str,
    plan: UnitPlan,
    comms: Comms,
    keep: MakeProduct,
    cache: PagedCache | None,
    device: torch.device,
) -> int:
    """Give the modules of a part, whose weights have been read, the forms of generation.

    keep: how its matrices are kept. cache: a block's. Returns the bytes that the matrices then need less than in their
    flat buffer, to which nothing of the part refers any more where `keep.copies`.
    """
    module = dict(decoder.parts())[part]
    if keep.copies:
        _own_small(module)
    plain = context_of(part, "generate", plan, comms, device)
    arounds = dict(plain.arounds)
    if plan.layout.tp > 1:
        logits = Around(leave=GatherOutputs(comms, LOGITS, plan.model.vocab))
        arounds |= {p.name: logits for p in plan.blueprint.parameters_of(part) if p.cut == "vocab"} | {"vocab": logits}
    share = exchange = None
    if (experts := plan.model.experts) is not None:
        share = expert_share(plan.layout, experts.count, plan.tp_rank)
        exchange = RankExchange(plan, comms, part, across_axes(plan.layout))
        arounds["experts"] = Around(leave=redistribution(edges(plan.layout)["row"].leave, comms, part))
    context = GenerationContext(
        **vars(plain) | {"arounds": arounds, "exchange": exchange},
        keep=keep,
        cache=cache,
        share=share,
        lasting=plan.layout.stage < 3,
    )
    lower(module, context)
    for each in context.copied:
        each.module.register_parameter(each.name, None)
    return sum(each.saved for each in context.copied)


def _own_small(part: nn.Module) -> None:
    """Norms, biases and routers get memory of their own."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1 or isinstance(module, Router):
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
