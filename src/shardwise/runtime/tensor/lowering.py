"""The decoder's forms on one rank: `ops.table` applied part by part, with the communication of the layout's cuts."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shardwise.decoder import Decoder
from shardwise.layout.context import cuts_sequences
from shardwise.layout.placement import place
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import Mode, OpContext, Options
from shardwise.ops.gradients import WeightGradients
from shardwise.ops.table import lower
from shardwise.runtime.context.cores import context_core
from shardwise.runtime.expert.exchange import RankExchange
from shardwise.runtime.tensor.redistribute import compose
from shardwise.runtime.transport.comms import Comms


def context_of(part: str, mode: Mode, plan: UnitPlan, comms: Comms | None, device: torch.device) -> OpContext:
    """Inputs of a part's forms. comms: None where the forms communicate through other forms that they wrap."""
    layout = plan.layout
    return OpContext(
        part,
        Options(
            mode,
            device.type,
            split=layout.tp > 1,
            attention=layout.attention,  # type: ignore[arg-type]
            recompute=layout.recompute,
            compiled=layout.compile == "block" and plan.blueprint.kind(part) == "block",
            fused=plan.fused,
            cut_sequence=cuts_sequences(layout),
        ),
        arounds=compose(plan, comms, part) if comms is not None else {},
        vocabulary=vocabulary_range(plan) if layout.tp > 1 else None,
        first_head=plan.tp_rank % layout.inner_ranks * (plan.model.heads // layout.inner_ranks),
        across_ranks=partial(context_core, part, plan, comms, device) if comms is not None else None,
        exchange=RankExchange(plan, comms, part) if comms is not None and plan.blueprint.routes else None,
    )


def lower_for_training(
    decoder: Decoder, plan: UnitPlan, comms: Comms, weights: WeightGradients, device: torch.device
) -> set[nn.Module]:
    """Give every module of a decoder its form. Weights are cut elsewhere (`engine.py`). weights: when their gradients
    are computed. Returns the modules whose gradients do not pass through autograd's accumulation."""
    writing: set[nn.Module] = set()
    for name, part in decoder.parts():
        context = context_of(name, "train", plan, comms, device)
        writing |= lower(part, replace(context, weights=weights)).writing
    return writing


def vocabulary_range(plan: UnitPlan) -> tuple[int, int]:
    """First and last + 1 token id whose logits and embedding rows this tp rank holds."""
    placed = place(plan.blueprint.table, plan.layout, plan.tp_rank)
    return placed.box[0]
