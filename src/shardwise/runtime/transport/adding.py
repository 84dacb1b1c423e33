"""Sums of what several ranks have, straight into the place where they stay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.ops.limits import sum_chunk


class Target(NamedTuple):
    """Destination of a sum: a flat tensor, which it overwrites, or to which it is added (`adds`)."""

    tensor: Tensor
    adds: bool = False


def wide_room(target: Target, pieces: int) -> Tensor | None:
    """A chunk in fp32, where adding up so many pieces takes more than one addition in bf16."""
    into = target.tensor
    if into.dtype != torch.bfloat16 or pieces + target.adds <= 2:
        return None
    return torch.empty(sum_chunk(len(into)), dtype=torch.float32, device=into.device)


def add_up(pieces: list[Tensor], target: Target, wide: Tensor | None) -> None:
    """Put the sum of flat `pieces`, of the target's size and one dtype, into the target, rounded once where that is
    bf16. wide: what `wide_room` gave. A target that is overwritten may be the first piece itself, and no other.

    Where dtypes differ it goes chunk by chunk: the cache holds what torch converts.
    """
    into, adds = target
    if pieces[0].device != into.device:  # an accumulator in the host's memory, of sums on a device
        pieces = [piece.to(into.device) for piece in pieces]
    if len(pieces) == 2 and not adds and pieces[0].dtype == into.dtype:
        torch.add(pieces[0], pieces[1], out=into)
        return
    apart = wide is not None or (pieces[0].dtype != into.dtype and not into.is_cuda)
    step = max(1, sum_chunk(len(into)) if apart else len(into))
    for part, *rows in zip(*(each.split(step) for each in (into, *pieces)), strict=True):
        total = part if wide is None else wide[: len(part)]
        if not adds:
            total.copy_(rows.pop(0))
        elif wide is not None:
            total.copy_(part)
        for row in rows:
            total.add_(row)
        if wide is not None:
            part.copy_(wide[: len(part)])
