"""Values of a frozen base in 8 bits, from those of its weights.

A scale is that of a whole row, so that numbers and scales are equal under every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.units import UnitPlan
from shardwise.model.adapters import is_scale, scale_of
from shardwise.model.parameters import Parameter
from shardwise.ops.products import rounded, row_scales
from shardwise.runtime.zero.flat_unit import FILLED, Values, torch_dtype


class Int8Values:
    """`Values` of a plan's parameters. values: of its weights; those without 8 bits pass through."""

    def __init__(self, plan: UnitPlan, values: Values) -> None:
        self._values, self._dtype = values, torch_dtype(plan.layout.dtype)
        self._weights = {scale_of(p.name): p for p in plan.blueprint.parameters() if p.dtype}
        """Name of scales -> their weight."""
        self._known: dict[str, Tensor] = {}
        """Weight -> scales [outputs]."""

    def __call__(self, parameter: Parameter, index: Tensor) -> Tensor:
        if parameter.dtype:
            scales = self._scales(parameter, index // parameter.shape[1])
            return rounded(self._values(parameter, index), scales).double()
        if is_scale(parameter.name):
            return self._scales(self._weights[parameter.name], index).double()
        return self._values(parameter, index)

    def _scales(self, weight: Parameter, rows: Tensor) -> Tensor:
        """Scales of some rows of a weight. Those of all its rows are computed at once: fake tensors name no rows."""
        if weight.name not in self._known:
            outputs, inputs = weight.shape
            columns = torch.arange(inputs, device=rows.device)
            every = torch.arange(outputs, device=rows.device)
            largest = [
                self._values(weight, some[:, None] * inputs + columns).abs().amax(1)
                for some in every.split(max(1, FILLED // inputs))
            ]
            self._known[weight.name] = row_scales(torch.cat(largest), self._dtype)
        return self._known[weight.name][rows]
