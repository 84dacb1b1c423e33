"""Known devices and the links that they usually come with, each figure with its source.

GB and TB are powers of ten. Memory is what CUDA reports as total, in bytes: less than the marketed "80GB" of 80 GiB,
because the driver keeps some for itself.
"""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.cluster.device import Device, Link
from shardwise.errors import UserError

_MIB = 1024**2


@dataclass(frozen=True)
class Entry:
    """A device with the links inside a node and between nodes that it is usually deployed with."""

    device: Device
    intra: Link
    inter: Link


_ML_ENGINEERING = "stas00/ml-engineering, compute/accelerator/README.md and network/README.md"
_AICONFIGURATOR = "ai-dynamo/aiconfigurator 095f58a51c4c"
# Latency of one more step: all-gather of a small message, (8 ranks - 2 ranks) / 6 steps, in nccl_perf.parquet. What a
# collective costs once, however many steps it has, is not in it.
_NCCL = f"{_AICONFIGURATOR}, systems/data/{{}}_sxm/comm/nccl: small all-gathers, (t(8) - t(2)) / 6"


def _h100() -> Entry:
    device = Device(
        name="H100-80GB-SXM",
        kind="cuda",
        memory_bytes=81089 * _MIB,
        memory_bandwidth=3.35e12,
        peak_flops={
            "bfloat16": 989e12,
            "float16": 989e12,
            "float8_e4m3fn": 1979e12,
            "int8": 1979e12,
            "tfloat32": 494.5e12,
            "float32": 67e12,
        },
        source=f"{_ML_ENGINEERING}; memory: torch 2.7 total_memory=81089MB (network/benchmarks); "
        f"bandwidth: {_AICONFIGURATOR}, systems/h100_sxm.yaml",
    )
    intra = Link((10.4e-6 - 5.2e-6) / 6, 450e9, f"NVLink4, {_ML_ENGINEERING}; alpha: {_NCCL.format('h100')}")
    return Entry(device, intra, Link(None, 50e9, f"InfiniBand NDR400, one port a GPU, {_ML_ENGINEERING}"))


def _a100() -> Entry:
    device = Device(
        name="A100-80GB-SXM",
        kind="cuda",
        memory_bytes=81049 * _MIB,
        memory_bandwidth=2.039e12,
        peak_flops={
            "bfloat16": 312e12,
            "float16": 312e12,
            "int8": 624e12,
            "tfloat32": 156e12,
            "float32": 19.5e12,
        },
        source=f"{_ML_ENGINEERING}; memory: 79.15 GiB total capacity, as torch's out-of-memory errors report it; "
        f"bandwidth: {_AICONFIGURATOR}, systems/a100_sxm.yaml",
    )
    intra = Link((15.1e-6 - 9.0e-6) / 6, 300e9, f"NVLink3, {_ML_ENGINEERING}; alpha: {_NCCL.format('a100')}")
    return Entry(device, intra, Link(None, 25e9, f"InfiniBand HDR200, one port a GPU, {_ML_ENGINEERING}"))


def _cpu() -> Entry:
    device = Device("CPU", "cpu", _machine_memory(), None, {}, "this machine: sysconf and the cgroup's memory.max")
    loopback = Link(None, None, "not known before it is measured")
    return Entry(device, loopback, loopback)


_ENTRIES = {"H100-80GB-SXM": _h100, "A100-80GB-SXM": _a100, "CPU": _cpu}
_ALIASES = {"H100": "H100-80GB-SXM", "A100": "A100-80GB-SXM"}


def names() -> list[str]:
    """Every name that `lookup` knows, aliases first."""
    return [*_ALIASES, *_ENTRIES]


def lookup(name: str) -> Entry:
    """The device of that name or alias, in any case. Raises `UserError` with the nearest names."""
    by_lower = {known.lower(): known for known in names()}
    found = by_lower.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.strip().lower(), by_lower, n=2, cutoff=0.4)
        nearest = " or ".join(by_lower[n] for n in near)
        hint = f"did you mean {nearest}?" if near else f"known are {', '.join(names())}"
        raise UserError(f"no device {name!r} in the catalog; {hint}; other devices are described in a TOML file")
    return _ENTRIES[_ALIASES.get(found, found)]()


def _machine_memory() -> int | None:
    """Bytes that this machine, or the container around us, lets its processes use together."""
    limits = []
    with suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Without a limit the file says "max", which is no integer.
    with suppress(ValueError, OSError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((limit for limit in limits if limit > 0), default=None)
