"""How the runtime computes a plain decoder: linear maps and lookup are swapped by the cuts of their parameters.

The same for every degree: without tensor parallelism the maps are whole and communicate nothing.
"""

from __future__ import annotations

from torch import nn

from shardwise.decoder import Decoder
from shardwise.decoder.attention import Attention
from shardwise.decoder.llama import LlamaBlock
from shardwise.decoder.modules import Linear, Linears, Lookup, TiedLinear, swap_forward
from shardwise.layout.placement import place
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Cut
from shardwise.runtime.tensor.blocks import fuse_block
from shardwise.runtime.tensor.linear import TPContext, column, columns, lookup, row
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.gradients import WeightGradients


def apply_tensor_parallel(decoder: Decoder, plan: UnitPlan, comms: Comms, weights: WeightGradients) -> set[nn.Module]:
    """Give every module whose weight can be cut its split forward. Weights are cut elsewhere (`engine.py`).

    Returns the modules whose gradients no longer pass through autograd's accumulation: they write into their places.
    A compiled block whose maps are whole stays as it is, because the compiler cannot write there.
    """
    swapped: set[nn.Module] = set()
    cuts = {p.name: p.cut for p in plan.blueprint.parameters()}
    for unit, part in decoder.parts():
        if plan.layout.compile == "block" and plan.layout.tp == 1 and plan.kind(unit) == "block":
            continue
        site = TPContext(comms, unit, plan.layout.sp, weights)
        for name, module in part.named_modules(prefix=unit):
            swapped.update(_swap(module, cuts.get(f"{name}.weight"), site, plan))
    return swapped


def _swap(module: nn.Module, cut: Cut | None, site: TPContext, plan: UnitPlan) -> list[nn.Module]:
    """Swap one module's forward; returns the modules whose weights it uses."""
    if isinstance(module, Linears):
        maps = [child for child in module.children() if isinstance(child, Linear)]
        swap_forward(module, columns(site, list(maps)))
        return list(maps)
    if isinstance(module, TiedLinear) or (isinstance(module, Linear) and cut == "vocab"):
        swap_forward(module, column(site, module))
        return [module]
    if isinstance(module, Linear) and cut == "row":
        swap_forward(module, row(site, module))
        return [module]
    if isinstance(module, Lookup):
        swap_forward(module, lookup(site, module, vocabulary_range(plan) if plan.layout.tp > 1 else None))
        return [module]
    if isinstance(module, Attention):
        module.core.first_head = plan.tp_rank * (plan.model.heads // plan.layout.tp)
    if isinstance(module, LlamaBlock) and plan.fuses_blocks:
        fuse_block(module, site)
    return []


def vocabulary_range(plan: UnitPlan) -> tuple[int, int]:
    """First and last + 1 token id whose logits and embedding rows this tp rank holds."""
    placed = place(plan.blueprint.table, plan.layout, plan.tp_rank)
    return (placed.start, placed.stop) if placed.dim is not None else (0, plan.model.vocab)
