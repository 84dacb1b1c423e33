"""Rates of the host for offloaded state: copies between it and the device, and AdamW on its cores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.layout.homes import CHUNK
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.measure.hardware import timed
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.zero.update import update

LEAST = 3
"""Least number of rounds."""


@dataclass(frozen=True)
class HostRates:
    """Rates of one rank while all ranks measure."""

    down: float
    """Bytes/s from the device to pinned memory of the host; on a CPU, of a copy in memory."""
    up: float
    """Bytes/s from pinned memory of the host to the device."""
    adamw: float
    """Parameters/s of AdamW in fp32 from bf16 gradients, on this rank's threads."""


def host_rates(device: torch.device, elements: int, seconds: float) -> HostRates:
    """Measure a copy down, a copy up and an update of `elements` elements, for about a third of `seconds` each."""
    pinned = device.type == "cuda"
    host = torch.ones(elements, pin_memory=pinned)
    there = torch.ones(elements, device=device)
    nbytes = host.nbytes
    pairs = (host, there), (there, host)
    down, up = (nbytes / _least_seconds(partial(into.copy_, source), device, seconds / 3) for into, source in pairs)
    return HostRates(down, up, elements / _least_seconds(_update(elements), device, seconds / 3))


def _least_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the quickest of several calls: other programs only ever add to them."""
    call()
    return min(timed(call, device, seconds, LEAST))


def _update(elements: int) -> Callable[[], object]:
    """The runtime's update of offloaded state: gradients are converted and clipped a chunk at a time."""
    grads = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    state: list[Tensor] = [torch.zeros(elements) for _ in range(3)]
    chunk, step, config = torch.empty(min(CHUNK, elements)), torch.ones(()), OptimizerConfig()

    def call() -> None:
        for start in range(0, elements, CHUNK):
            master, first, second = (tensor[start : start + CHUNK] for tensor in state)
            local = chunk[: len(master)].copy_(grads[start : start + CHUNK])
            local.mul_(0.999)
            update("adamw", (master, local, first, second), step, config, config.lr, decay=True)

    return call


def of_all_ranks(local: HostRates) -> dict[str, float]:
    """Rates of a node: copies of one rank, the mean over ranks, in the slower direction; updates of all ranks."""
    every: list[HostRates] = gather_objects(local)
    slower = [min(rates.down, rates.up) for rates in every]
    return {"link_bandwidth": sum(slower) / len(slower), "adamw_rate": sum(rates.adamw for rates in every)}
