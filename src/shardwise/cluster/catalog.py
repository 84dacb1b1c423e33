"""Known devices by name, and the links that they usually come with (`accelerators.toml` has the numbers).

GB and TB are powers of ten. Memory is what CUDA reports as total, in bytes: less than the marketed "80GB" of 80 GiB,
because the driver keeps some for itself.
"""

from __future__ import annotations

import os
import re
import reprlib
from contextlib import suppress
from functools import cache
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


def knows(name: str) -> bool:
    """Whether `lookup` finds a device of that name."""
    return _device_named(name) is not None


def lookup(name: str) -> Accelerator:
    """The device of that name, alias or name in the driver, whatever its case, spaces and dashes: "A100 40GB", "4090".
    Raises `UserError` with the nearest names."""
    found = _device_named(name)
    if found is None:
        import difflib

        by_lower = {known.lower(): known for known in names()}
        near = difflib.get_close_matches(name.strip().lower(), by_lower, n=2, cutoff=0.4)
        nearest = " or ".join(by_lower[n] for n in near)
        hint = f"did you mean {nearest}?" if near else "`shardwise list devices` has all names"
        raise UserError(
            f"no device {reprlib.repr(name)} in the catalog; {hint}; other devices are described in a TOML file"
        )
    return _cpu() if found == "CPU" else accelerators().devices[found]


_MAKERS = ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "googlecloud", "google", "cloud", "aws", "apple")
_SERIES = ("rtx", "tpu")
"""Words before a model's number that people leave out."""
_SIZE = re.compile(r"(\d{1,4})gb")
_NEAR_SIZE = 0.12
"""Largest difference of the memory in a name from the device's own, as a share: 80 GB are 79.2 GiB to the driver."""


def _device_named(name: str) -> str | None:
    """The device that a text names, None where there is none. A size that the catalog's name leaves out must be near
    the device's memory."""
    table = accelerators()
    if name in table.devices or name in table.aliases:
        return table.aliases.get(name, name)  # without all spellings of all names, which take milliseconds
    words, known = _words(name), _by_words()
    for key in _keys(words):
        if key in known:
            return known[key]
    sizes = [word for word in words if _SIZE.fullmatch(word)]
    found = {known.get(key) for key in _keys([w for w in words if w not in sizes])} - {None, "CPU"}
    if len(sizes) != 1 or len(found) != 1:
        return None
    memory = table.devices[device := str(found.pop())].device.memory_bytes or 0
    size = int(sizes[0].removesuffix("gb"))
    near = any(abs(memory / (size * unit) - 1) < _NEAR_SIZE for unit in (1e9, 2**30))
    return device if near else None


def _words(name: str) -> list[str]:
    """The words of a name that tell devices apart: without makers and kinds of memory, sizes as "80gb"."""
    text = re.sub(r"(\d)[\s_-]*gi?b?\b", r"\1gb", name[:200].lower())
    text = re.sub(r"\bsxm\d\b", "sxm", re.sub(r"\bpci\b|\bpci-e\b", "pcie", text))
    words = re.findall(r"[a-z0-9]+", text)
    return [word for word in words if word not in _MAKERS and not re.fullmatch(r"hbm\d?e?|gpus?", word)]


def _keys(words: list[str]) -> list[str]:
    """Spellings of words: run together, also in another order, and without the series."""
    joined = "".join(words)
    while maker := next((maker for maker in _MAKERS if joined.startswith(maker)), None):
        joined = joined[len(maker) :]
    short = next((joined.removeprefix(series) for series in _SERIES if joined.startswith(series)), joined)
    apart = [word for word in words if word not in _SERIES]
    return [key for key in (joined, short, " ".join(sorted(words)), " ".join(sorted(apart))) if key.strip()]


@cache
def _by_words() -> dict[str, str]:
    """Spelling -> device. A spelling of several devices is that of none, but for a name's own."""
    table = accelerators()
    texts = {"CPU": "CPU"} | {name: name for name in table.devices} | table.aliases
    texts |= {entry.driver_name: name for name, entry in table.devices.items() if entry.driver_name}
    first: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}
    for text, device in texts.items():
        own, *more = _keys(_words(text))
        first.setdefault(own, set()).add(device)
        for key in more:
            others.setdefault(key, set()).add(device)
    known = {key: devices for key, devices in others.items() if key not in first} | first
    return {key: next(iter(devices)) for key, devices in known.items() if len(devices) == 1}


def machine_memory() -> int | None:
    """Bytes that this machine, or the container around us, lets its processes use together."""
    limits = []
    with suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Without a limit the file says "max", which is no integer.
    with suppress(ValueError, OSError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((limit for limit in limits if limit > 0), default=None)
