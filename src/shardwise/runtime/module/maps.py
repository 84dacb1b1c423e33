"""Forms of a user's maps: those of the catalog's models, communicating as the styles of a plan say.

Linear maps write the gradients of their weights where these stay, whether they are cut or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.placement import place
from shardwise.layout.styles import MapStyle
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import Around, Exchange, OpContext, Options
from shardwise.ops.gradients import WeightGradients
from shardwise.ops.linear import linear
from shardwise.runtime.expert.exchange import RankExchange
from shardwise.runtime.module.adapters import AdaptedMap
from shardwise.runtime.module.describe import DescribedModule, is_conv1d, is_plain_map
from shardwise.runtime.module.experts import RankExperts, lower_experts
from shardwise.runtime.tensor.redistribute import around_map
from shardwise.runtime.transport.comms import Comms


def lower_maps(
    module: nn.Module, plan: UnitPlan, comms: Comms, described: DescribedModule, weights: WeightGradients
) -> tuple[set[nn.Module], dict[str, list[RankExperts]]]:
    """Give every linear map, and every table or experts that are cut, its form; in compiled blocks what is cut alone.
    Weights are cut elsewhere (`engine.py`). weights: when their gradients are computed. Returns (the maps whose
    gradients do not pass through autograd's accumulation, part -> forms of its experts)."""
    styles = described.styles
    parameters = {id(module.get_parameter(p.name)): p for p in plan.blueprint.parameters()}
    writing: set[nn.Module] = set()
    experts: dict[str, list[RankExperts]] = {}
    compiled = plan.of_kind("block") if plan.layout.compile == "block" else []
    for name, child in module.named_modules():
        style = styles.get(name, MapStyle())
        if isinstance(child, nn.modules.batchnorm._NormBase) and "weight" in child._parameters:
            part = parameters[id(child.weight)].part if child.weight is not None else ""
            child.forward = outside(partial(_beside_statistics, child, child.forward), part in compiled)
        if name in described.experts.modules:
            part = parameters[id(next(child.parameters(recurse=False)))].part
            experts.setdefault(part, []).append(lower_experts(child, plan, RankExchange(plan, comms, part)))
            child.forward = outside(child.forward, part in compiled)  # type: ignore[method-assign]
            continue
        if not is_plain_map(child) and style.cut == "replicated":
            continue
        weight = parameters[id(child.weight)]
        # Under a pipeline a tied head computes on another stage than the part of its weight.
        part = weight.part if described.chain is None else described.chain.home(f"{name}.")
        if part in compiled and style.cut == "replicated" and not isinstance(child, AdaptedMap):
            continue
        outputs, inputs = reversed(weight.shape) if weight.transposed else weight.shape
        around = around_map(style.cut, style.edges, comms, part, (inputs, outputs))
        if isinstance(child, nn.Embedding):
            form = _lookup(child, place(weight, plan.layout, plan.tp_rank).box[0], around)
        else:
            at = OpContext(part, Options("train", split=True), name, {f"{name}.weight": around}, weights)
            form = linear(child, at, is_conv1d(child))  # type: ignore[arg-type]
            writing.add(child)
        child.forward = outside(form, part in compiled)  # type: ignore[assignment]
    return writing, experts


def _beside_statistics(norm: Any, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """A batch norm's forward pass, with its weights as wide as its running statistics, which kernels require."""
    held, stats = dict(norm._parameters), norm.running_mean
    try:
        if stats is not None:
            norm._parameters |= {leaf: p if p is None else p.to(stats.dtype) for leaf, p in held.items()}
        return forward(*args)
    finally:
        norm._parameters |= held


def outside(form: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """What communicates, which the compiler leaves as it is where the block around it is compiled."""

    return torch.compiler.disable(lambda *args, **kwargs: form(*args, **kwargs)) if compiled else form  # type: ignore[no-any-return]


def _lookup(table: nn.Embedding, held: tuple[int, int], around: Around) -> Callable[[Tensor], Tensor]:
    """A lookup in rows `held` of a table, by the table's own forward: others are zero, and what leaves is the sum. The
    padding token gets no gradient, as in the whole table."""
    forward, padding, table.padding_idx = table.forward, table.padding_idx, None

    def run(ids: Tensor) -> Tensor:
        elsewhere = ((ids < held[0]) | (ids >= held[1])).unsqueeze(-1)
        rows = forward((ids - held[0]).masked_fill(elsewhere[..., 0], 0)).masked_fill(elsewhere, 0)
        rows = Exchange.apply(around.leave, rows.clone())  # type: ignore[no-untyped-call]  # summed in place
        return rows if padding is None else torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)

    return run
