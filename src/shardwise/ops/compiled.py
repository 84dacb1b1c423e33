"""Forms for a compiler, over those of training: what it cannot hold stays eager, and splits a block in pieces.

Bound methods of one function each: the compiler would take a function for each block as a reason to compile it anew.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention
from shardwise.decoder.modules import Dropout
from shardwise.ops.attention import goes_by_blocks
from shardwise.ops.context import OpContext

Forward = Callable[..., Any]


@cache
def _eager(run: Forward) -> Forward:
    """A function that the compiler leaves alone. Brings in the compiler, which takes seconds."""
    eager: Forward = torch.compiler.disable(run)
    return eager


def leave_eager(module: nn.Module, at: OpContext) -> Forward:
    """The form that the module has, outside compiled code: maps that communicate, cores that drop probabilities."""
    module.__dict__["eager_forward"] = module.forward
    return MethodType(_eager(_forward), module)


def _forward(module: Any, *inputs: Any) -> Any:
    return module.eager_forward(*inputs)


def eager_dropout(dropout: Dropout, at: OpContext) -> Forward | None:
    """Dropout's masks are hashes of counters that change every step."""
    return MethodType(_eager(Dropout.of_batch), dropout) if dropout.drop else None


def eager_core(core: CoreAttention, at: OpContext) -> Forward | None:
    """A core that drops probabilities, by such masks, goes through a sequence block by block, or communicates."""
    return leave_eager(core, at) if _eager_core(core, at) else None


def _eager_core(core: CoreAttention, at: OpContext) -> bool:
    blocked = at.options.attention == "sdpa" and goes_by_blocks(core, at)
    return core.dropout.drop > 0 or blocked or at.options.cut_sequence


def checkpointed_core(core: CoreAttention, at: OpContext) -> Forward | None:
    """recompute=selective as the compiler knows it: `recompute.py`'s runs a backward of its own, which it cannot."""
    return None if _eager_core(core, at) else MethodType(_checkpointed, core)


def _checkpointed(core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    out: Tensor = checkpoint(CoreAttention.forward, core, q, k, v, batch, use_reentrant=False, preserve_rng_state=False)
    return out
