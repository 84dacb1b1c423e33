"""Peak rate of the machine's matrix products, the reference of a run's utilization."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """FLOP/s of square matrix products on all ranks together, measured on all of them at once.

    Size 1,024 on CPU and 8,192 on CUDA: large enough for the library's best kernels. The median of several products
    counts, so that a moment's disturbance does not.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.rand(size, size, device=device).to(dtype)
    out = a @ a
    dist.barrier()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 3:
        settle(device)
        started = time.perf_counter()
        torch.mm(a, a, out=out)
        settle(device)
        times.append(time.perf_counter() - started)
    rate = torch.tensor(2 * size**3 / sorted(times)[len(times) // 2], dtype=torch.float64, device=device)
    dist.all_reduce(rate)
    return float(rate)


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
