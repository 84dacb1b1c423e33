"""Peak rate of the machine's matrix products, the reference of a run's utilization."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.runtime.transport.waits import cycles_per_second


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """FLOP/s of square matrix products on all ranks together, measured on all of them at once: of the quickest kind.

    Size 1,024 on CPU and 8,192 on CUDA: large enough for the library's best kernels. A CPU without bf16 instructions is
    quickest in fp32, in which it may compute as well. The median of
    several products counts, so that a moment's disturbance does not.
    """
    size = 8192 if device.type == "cuda" else 1024
    kinds = {dtype} if device.type == "cuda" else {dtype, torch.promote_types(dtype, torch.float32)}
    dist.barrier()
    times = [_median_time(torch.rand(size, size, device=device).to(kind), seconds / len(kinds)) for kind in kinds]
    reached = device if dist.get_backend() == "nccl" else torch.device("cpu")
    rate = torch.tensor(2 * size**3 / min(times), dtype=torch.float64, device=reached)
    dist.all_reduce(rate)
    return float(rate)


def _median_time(a: torch.Tensor, seconds: float) -> float:
    """Seconds of a product, as a linear layer has its operands, which is repeated for so long."""
    b = a.t()
    out = a @ b
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        settle(a.device)
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        settle(a.device)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceQueue:
    """Times calls on a CUDA device by its own clock, without what the host takes to make them: it makes them while the
    device waits in a timed kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._rate = device, cycles_per_second(device)

    def seconds(self, call: Callable[[], object], count: int, waits: float) -> float:
        """Seconds of one of `count` calls. waits: seconds for which the device waits."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        settle(self._device)
        torch.cuda._sleep(max(1, round(waits * self._rate)))
        start.record()
        for _ in range(count):
            call()
        end.record()
        settle(self._device)
        return float(start.elapsed_time(end)) / 1e3 / count
