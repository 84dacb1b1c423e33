"""Tensor-parallel forms of a user's maps: those of the catalog's models, communicating as the plan's styles say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwise.layout.placement import place
from shardwise.layout.styles import MapStyle
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import OpContext, Options
from shardwise.ops.linear import linear, lookup
from shardwise.runtime.module.describe import is_conv1d
from shardwise.runtime.tensor.redistribute import around_map
from shardwise.runtime.transport.comms import Comms


def lower_maps(module: nn.Module, plan: UnitPlan, comms: Comms, styles: Mapping[str, MapStyle]) -> None:
    """Give every map that is cut its form. Weights are cut elsewhere (`engine.py`)."""
    parameters = {id(module.get_parameter(p.name)): p for p in plan.blueprint.parameters()}
    for name, style in styles.items():
        if style.cut == "replicated":
            continue
        child = module.get_submodule(name)
        weight = parameters[id(child.weight)]
        outputs, inputs = reversed(weight.shape) if weight.transposed else weight.shape
        around = around_map(style.cut, style.edges, comms, weight.part, (inputs, outputs))
        at = OpContext(
            weight.part,
            Options("train", split=True),
            name,
            {f"{name}.weight": around, "lookup": around},
            vocabulary=place(weight, plan.layout, plan.tp_rank).box[0],
        )
        if isinstance(child, nn.Embedding):
            form = _without_padding(lookup(child, at), child.padding_idx)  # type: ignore[arg-type]
        else:
            form = linear(child, at, is_conv1d(child))  # type: ignore[arg-type]
        child.forward = form  # type: ignore[assignment]


def _without_padding(look_up: Callable[[Tensor], Tensor], padding: int | None) -> Callable[[Tensor], Tensor]:
    """A lookup whose padding token gets no gradient, as in `nn.Embedding`."""
    if padding is None:
        return look_up

    def forward(ids: Tensor) -> Tensor:
        rows = look_up(ids)
        return torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)

    return forward
