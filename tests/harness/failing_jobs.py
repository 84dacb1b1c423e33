"""Steps of a split module in which one rank fails, and what every rank says."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.own_modules import OWN, PARTS, own_batch, summed_loss
from shardwise.runtime.module.split import split


def fail(rank: int, payload: tuple[str, str, int, str]) -> tuple[str, str, float, str]:
    """(class of the error, its words, seconds until it came, words of another step). payload: layout, transport, the
    rank that fails, and how: "returns" something that is no loss, or "raises"."""
    layout, transport, failing, how = payload
    torch.manual_seed(0)
    module = split(OWN["plain"](), f"{layout},precision=fp32", parts=PARTS["plain"], transport=transport, accumulate=2)
    rows = own_batch("plain", 4, 0)
    micro = list(zip(*(part.chunk(2) for part in rows), strict=True))

    def loss(model: nn.Module, batch: Any) -> Any:
        result = summed_loss(model, batch)
        if rank == failing and how == "raises":
            raise ValueError("a bad row")
        return 1.0 if rank == failing else result

    module.train_step(summed_loss, micro)
    dist.barrier()  # a rank that is still in the first step may end there
    started = time.monotonic()
    said = _error(module, loss, micro)
    seconds = time.monotonic() - started
    again = _error(module, summed_loss, micro)
    dist.destroy_process_group()  # its connections may be broken
    return *said, seconds, again[1]


def _error(module: Any, loss: Any, micro: Any) -> tuple[str, str]:
    try:
        module.train_step(loss, micro)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
