"""Ulysses (Jacobs et al. 2023): all-to-alls exchange the sequence for heads, and each rank attends over all tokens.

[B, S / cp, H, D] of all heads becomes [B, S, H / cp, D] of all tokens, and attention's output goes back. Where there
are fewer key/value heads than ranks, each goes to all ranks whose queries need it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout.axes import CP
from shardwise.ops.context import COMPLETE, Exchange, Pending, Redistribute
from shardwise.runtime.transport.comms import Comms


class _AllToAll(Redistribute):
    """An all-to-all of [cp, ...], a row for each rank; its backward is another one."""

    def __init__(self, comms: Comms, part: str) -> None:
        self.comms, self.part = comms, part

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.comms.all_to_all(out, x.contiguous(), CP, self.part)
        return out

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return self.forward(grad), COMPLETE


def attend(comms: Comms, part: str, core: Callable[..., Tensor], seq: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`core` over all `seq` tokens, for a cp-th of the heads.

    q: [B, S / cp, H, D]; k: [B, S / cp, K, D]; v: [B, S / cp, K, V]; returns [B, S / cp, H, V].
    """
    padded = q.shape[1] * comms.size(CP)
    out = core(*_to_heads(comms, part, seq, q, k, v))
    return _to_sequence(comms, part, F.pad(out, [0, 0, 0, 0, 0, padded - seq]))


def _to_heads(comms: Comms, part: str, seq: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Queries, keys and values of some heads for all `seq` tokens, without padding."""
    ranks, copies = comms.size(CP), max(1, comms.size(CP) // k.shape[2])
    if copies > 1:
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    # For each rank its heads of queries, keys and values side by side: [cp, B, S / cp, their widths].
    heads = [x.unflatten(2, (ranks, -1)).flatten(3) for x in (q, k, v)]
    rows = torch.cat(heads, 3).permute(2, 0, 1, 3)
    rows = Exchange.apply(_AllToAll(comms, part), rows)  # type: ignore[no-untyped-call]
    split = zip(rows.split([x.shape[3] for x in heads], 3), (q, k, v), strict=True)
    return [x.transpose(0, 1).flatten(1, 2)[:, :seq].contiguous().unflatten(2, (-1, y.shape[3])) for x, y in split]


def _to_sequence(comms: Comms, part: str, out: Tensor) -> Tensor:
    """All heads of attention's output for this rank's tokens."""
    ranks = comms.size(CP)
    rows = out.unflatten(1, (ranks, -1)).transpose(0, 1)
    rows = Exchange.apply(_AllToAll(comms, part), rows)  # type: ignore[no-untyped-call]
    result: Tensor = rows.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return result
