"""A decoder's maps as generation computes them: without gradients, split over tp, several of one input in one product.

Cuts are those of training (`layout/placement.py`, `runtime/tensor/swap.py`): column-parallel maps communicate
nothing, row-parallel ones sum over tp, and the head's logits are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch, Decoder
from shardwise.decoder.attention import Attention
from shardwise.decoder.decoder import Head
from shardwise.decoder.gpt import MLP, GPTBlock
from shardwise.decoder.llama import GatedMLP, LlamaBlock
from shardwise.decoder.modules import Linear, Linears, Lookup, RMSNorm, TiedLinear, swap_forward
from shardwise.layout.axes import TP
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Cut
from shardwise.runtime.tensor.fused import end_to_end
from shardwise.runtime.tensor.swap import vocabulary_range
from shardwise.runtime.transport.comms import Comms
from shardwise.serving.attention import PagedCache, Rows
from shardwise.serving.blocks import (
    attention_forward,
    block_forward,
    gated_mlp_forward,
    mlp_forward,
    rms_norm_forward,
)
from shardwise.serving.products import MakeProduct, Product

LOGITS = "logits"
"""Unit of the ledger: the gather of the logits that are wanted."""


def apply_generation(
    decoder: Decoder, part: str, plan: UnitPlan, comms: Comms, keep: MakeProduct, cache: PagedCache | None
) -> int:
    """Give the modules of a part, whose weights have been read, the forward of generation.

    keep: how its matrices are kept. cache: a block's. Returns the bytes that the matrices then take less than in their
    flat buffer, to which nothing of the part refers any more where `keep.copies`.
    """
    module = dict(decoder.parts())[part]
    if keep.copies:
        _own_vectors(module)
    saved, cuts = 0, {p.name: p.cut for p in plan.blueprint.parameters_of(part)}
    for name, child in reversed(list(module.named_modules(prefix=part))):
        saved += _swap(child, cuts.get(f"{name}.weight"), part, plan, comms, keep)
        _fuse(child, cache, stays=keep.copies)
    if plan.kind(part) == "head":
        swap_forward(module, partial(_head, decoder.head, plan, comms))
    return saved


def _own_vectors(part: nn.Module) -> None:
    """Norms and biases get memory of their own."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def _swap(module: nn.Module, cut: Cut | None, unit: str, plan: UnitPlan, comms: Comms, keep: MakeProduct) -> int:
    if isinstance(module, Linears):
        maps = [child for child in module.children() if isinstance(child, Linear)]
        swap_forward(module, _columns(maps, keep))
        return _drop(maps, keep)
    if isinstance(module, TiedLinear) or (isinstance(module, Linear) and cut == "vocab"):
        swap_forward(module, keep(module.weight, None))
        return _drop([module], keep) if isinstance(module, Linear) else 0
    if isinstance(module, Linear) and cut == "row":
        swap_forward(module, _row(module, unit, comms, keep))
        return _drop([module], keep)
    if isinstance(module, Lookup):
        swap_forward(module, _lookup(module, unit, plan, comms))
    return 0


def _fuse(module: nn.Module, cache: PagedCache | None, *, stays: bool) -> None:
    """What is more than one map, over the forwards that its parts have got. stays: its weights will not change."""
    if isinstance(module, RMSNorm):
        swap_forward(module, rms_norm_forward(module, stays))
    elif isinstance(module, Attention):
        assert cache is not None
        swap_forward(module, attention_forward(module, cache))
    elif isinstance(module, GatedMLP):
        swap_forward(module, gated_mlp_forward(module))
    elif isinstance(module, MLP):
        swap_forward(module, mlp_forward(module))
    elif isinstance(module, LlamaBlock | GPTBlock):
        swap_forward(module, block_forward(module))


def _drop(maps: Sequence[Linear], keep: MakeProduct) -> int:
    """Forget matrices of which there are copies."""
    if not keep.copies:
        return 0
    saved = sum(each.weight.nbytes - keep.nbytes(each.weight) for each in maps)
    for each in maps:
        each.register_parameter("weight", None)
    return saved


def _columns(maps: Sequence[Linear], keep: MakeProduct) -> Product:
    """Several column-parallel maps of one input, side by side: one product where their weights lie end to end."""
    weight, bias = _joined([m.weight for m in maps], keep), _joined([m.bias for m in maps], keep)
    if weight is None or (bias is None and maps[0].bias is not None):
        products = [keep(m.weight, m.bias) for m in maps]
        return lambda x: torch.cat([each(x) for each in products], -1)
    return keep(weight, bias)


def _joined(tensors: Sequence[Tensor | None], keep: MakeProduct) -> Tensor | None:
    """One tensor of all rows; None where that would take memory of its own that is not given back."""
    found = [tensor for tensor in tensors if tensor is not None]
    if not found:
        return None
    joined = end_to_end(found)
    return torch.cat(found) if joined is None and keep.copies else joined


def _row(module: Linear, unit: str, comms: Comms, keep: MakeProduct) -> Product:
    if comms.size(TP) == 1:
        return keep(module.weight, module.bias)
    partial_sum, bias = keep(module.weight, None), module.bias

    def forward(x: Tensor) -> Tensor:
        y = partial_sum(x)
        comms.all_reduce(y, TP, unit)
        return y if bias is None else y.add_(bias)

    return forward


def _lookup(module: Lookup, unit: str, plan: UnitPlan, comms: Comms) -> Product:
    if plan.layout.tp == 1:
        return lambda ids: F.embedding(ids, module.weight)
    start, stop = vocabulary_range(plan)

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < start) | (ids >= stop)
        y = F.embedding((ids - start).masked_fill_(elsewhere, 0), module.weight)
        y.masked_fill_(elsewhere.unsqueeze(-1), 0)
        comms.all_reduce(y, TP, unit)
        return y

    return forward


def _head(head: Head, plan: UnitPlan, comms: Comms, x: Tensor, batch: Batch) -> Tensor:
    """Logits [B, vocabulary] of the wanted rows, the same on every tp rank."""
    assert isinstance(batch, Rows)
    if batch.wanted is not None:
        x = x.index_select(1, batch.wanted)
    logits = head.out(head.norm(x))[0]
    if plan.layout.tp > 1:
        logits = comms.gather_dim(logits, 1, TP, LOGITS)[:, : plan.model.vocab]
    return logits
