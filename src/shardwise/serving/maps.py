"""A decoder's part as generation computes it: `ops.table` applied to it once its weights have been read."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.decoder import Decoder
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import Around
from shardwise.ops.generate import GenerationContext
from shardwise.ops.paged import PagedCache
from shardwise.ops.products import MakeProduct
from shardwise.ops.table import lower
from shardwise.runtime.tensor.lowering import context_of
from shardwise.runtime.tensor.redistribute import GatherOutputs
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
        _own_vectors(module)
    plain = context_of(part, "generate", plan, comms, device)
    arounds = dict(plain.arounds)
    if plan.layout.tp > 1:
        logits = Around(leave=GatherOutputs(comms, LOGITS, plan.model.vocab))
        arounds |= {p.name: logits for p in plan.blueprint.parameters_of(part) if p.cut == "vocab"} | {"vocab": logits}
    context = GenerationContext(**vars(plain) | {"arounds": arounds}, keep=keep, cache=cache)
    lower(module, context)
    saved = sum(each.weight.nbytes - keep.nbytes(each.weight) for each in context.copied)
    for each in context.copied:
        each.register_parameter("weight", None)
    return saved


def _own_vectors(part: nn.Module) -> None:
    """Norms and biases get memory of their own."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
