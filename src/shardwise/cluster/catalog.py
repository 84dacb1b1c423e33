"""Known devices by name, and the links that they usually come with (`accelerators.toml` has the numbers).

GB and TB are powers of ten. Memory is what CUDA reports as total, in bytes: less than the marketed "80GB" of 80 GiB,
because the driver keeps some for itself.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardwise.cluster.accelerators import Accelerator, accelerators
from shardwise.cluster.device import Device, Link
from shardwise.errors import UserError


def _cpu() -> Accelerator:
    device = Device("CPU", "cpu", machine_memory(), None, {}, "this machine: sysconf and the cgroup's memory.max")
    loopback = Link(None, None, "not known before it is measured")
    return Accelerator(device, loopback, loopback)


def names() -> list[str]:
    """Every name that `lookup` knows, aliases first."""
    return [*accelerators().aliases, *accelerators().devices, "CPU"]


def lookup(name: str) -> Accelerator:
    """The device of that name or alias, in any case. Raises `UserError` with the nearest names."""
    by_lower = {known.lower(): known for known in names()}
    found = by_lower.get(name.strip().lower())
    if found is None:
        import difflib

        near = difflib.get_close_matches(name.strip().lower(), by_lower, n=2, cutoff=0.4)
        nearest = " or ".join(by_lower[n] for n in near)
        hint = f"did you mean {nearest}?" if near else f"known are {', '.join(names())}"
        raise UserError(f"no device {name!r} in the catalog; {hint}; other devices are described in a TOML file")
    found = accelerators().aliases.get(found, found)
    return _cpu() if found == "CPU" else accelerators().devices[found]


def machine_memory() -> int | None:
    """Bytes that this machine, or the container around us, lets its processes use together."""
    limits = []
    with suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Without a limit the file says "max", which is no integer.
    with suppress(ValueError, OSError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((limit for limit in limits if limit > 0), default=None)
