"""What one forward pass over a few tokens must read and move: the bounds of serving, without any latency.

`predict.time` says what it takes in practice, where small collectives are all latency. Bytes are those of 16-bit
numbers unless a data type is named; seconds are bytes over a bandwidth.
"""

from __future__ import annotations

from shardwise.cluster import Device
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.parameters import count_parts

SUMS_PER_BLOCK = 2
"""All-reduces that tensor parallelism needs in a block's forward: after attention and after the feed-forward (Shoeybi
et al. 2019). `predict_ledger` has them one by one."""


def stored_bytes(params: float, dtype: str = "bfloat16") -> float:
    """Bytes of so many weights, scales of quantised types apart. Raises `UserError` for an unknown data type."""
    # Brings numpy, which those who only count bytes of 16-bit numbers need not wait for.
    from shardwise.predict.time.kernels import WIDTH

    if dtype not in WIDTH:
        raise UserError(f"no data type {dtype!r} for weights; known are {', '.join(WIDTH)}")
    return params * WIDTH[dtype]


def block_bytes(model: ModelConfig, dtype: str = "bfloat16") -> float:
    """Bytes of the weights of one block, the mean where blocks differ."""
    return stored_bytes(count_parts(model)[1] / model.layers, dtype)


def boundary_bytes(tokens: int, hidden: int, element: int = 2) -> int:
    """Bytes of the residual stream of `tokens` tokens: what a pipeline stage sends to the next one, and what one
    all-reduce of tensor parallelism sums."""
    return tokens * hidden * element


def summed_bytes(model: ModelConfig, tokens: int = 1, element: int = 2) -> int:
    """Payload of all all-reduces of the blocks in one forward pass under tensor parallelism: 2 L T d elements."""
    return SUMS_PER_BLOCK * model.layers * boundary_bytes(tokens, model.hidden, element)


def received_bytes(nbytes: float, ranks: int) -> float:
    """What each rank receives when `nbytes` bytes of weights, cut evenly over the ranks, are gathered: (p-1)/p."""
    return nbytes * (ranks - 1) / ranks


def read_seconds(nbytes: float, device: Device, ranks: int = 1) -> float:
    """Seconds to read `nbytes` bytes of weights, cut over `ranks` devices, from their memory: a bound for decoding.

    Raises `UserError` where the device's bandwidth is not known.
    """
    if device.memory_bandwidth is None:
        raise UserError(f"{device.name}: memory bandwidth not known")
    return nbytes / ranks / device.memory_bandwidth
