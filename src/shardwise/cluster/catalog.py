"""Known devices by name, and the links that they usually come with (`accelerators.toml` has the numbers).

GB and TB are powers of ten. Memory is what CUDA reports as total, in bytes: less than the marketed "80GB" of 80 GiB,
because the driver keeps some for itself.
"""

import os
import re
import reprlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.cluster.device import UNKNOWN, Device, Host, Link
from shardwise.errors import UserError, nearest
from shardwise.records import dataclass


@dataclass(frozen=True)
class Ports:
    """Ports of one of NVIDIA's devices."""

    nvlinks: int
    """The most NVLinks of a device."""
    nvlink_bandwidth: float
    """Bytes/s of one NVLink in one direction."""
    pcie: str
    """Generation of the PCIe slot."""
    slot_bandwidth: float
    """Bytes/s of the PCIe slot in one direction."""


@dataclass(frozen=True)
class Accelerator:
    """A device with the links inside a node and between nodes that it is usually deployed with."""

    device: Device
    intra: Link
    inter: Link
    driver_name: str = ""
    """The device in the words of NVIDIA's driver."""
    ports: Ports | None = None
    host: Host = UNKNOWN
    """Host of the machine that it is usually deployed in."""
    of_host: int = 1
    """Devices of that machine."""
    domain: int = 0
    """The most devices that one NVLink switch joins over several machines; 0 where it joins those of one."""

    def host_of(self, devices: int) -> Host:
        """Host of a node of so many devices: of fewer than its machine has, their part of it."""
        return self.host.part(devices, self.of_host)


class KnownNetwork(NamedTuple):
    """A network between nodes that has a name."""

    gbits: float
    """Gb/s of one NIC in one direction."""
    source: str
    """Source of the numbers."""
    nics: int = 0
    """NICs of a node; 0 for one per device."""
    kind: str = "network"
    """Kind of its links (`cluster.KINDS`)."""
    devices: tuple[str, ...] = ()
    """Devices of the cloud's machines that have it; empty where it is no cloud's."""


class Accelerators(NamedTuple):
    """Contents of `accelerators.toml`."""

    devices: dict[str, Accelerator]
    aliases: dict[str, str]
    """Alias -> name of a device."""
    hosts: dict[str, Host]
    """Known hosts by name."""
    links: dict[str, Link]
    """Known links by name."""
    uses: dict[str, tuple[str, ...]]
    """Link -> devices that usually come with it, inside a node or between nodes."""
    networks: dict[str, KnownNetwork]
    """Networks between nodes by name."""
    network_aliases: dict[str, str]
    """Alias -> name of a network."""

    @property
    def slots(self) -> dict[str, float]:
        """PCIe link -> bytes/s of its slot in one direction."""
        return {name: link.bandwidth for name, link in self.links.items() if name.startswith("PCIe") and link.bandwidth}


@cache
def accelerators() -> Accelerators:
    """All known accelerators, read on first use."""
    import tomllib

    table = tomllib.loads((Path(__file__).parent / "accelerators.toml").read_text(encoding="utf-8"))
    links = {
        name: Link(**{"alpha": None, "bandwidth": None, "name": name, **row}) for name, row in table["links"].items()
    }
    ports = {
        name: Ports(**row, slot_bandwidth=links[f"PCIe-{row['pcie']}"].bandwidth or 0.0)
        for name, row in table["ports"].items()
    }
    of_host = {name: row.pop("devices", 1) for name, row in table["hosts"].items()}
    hosts = {name: Host(**row) for name, row in table["hosts"].items()}
    devices = {}
    uses: dict[str, list[str]] = {name: [] for name in links}
    for name, row in table["devices"].items():
        for link in dict.fromkeys((row["intra"], row["inter"])):
            uses[link].append(name)
        intra, inter = links[row.pop("intra")], links[row.pop("inter")]
        driver_name, of_device = row.pop("driver_name", ""), ports.get(row.pop("ports", ""))
        host, domain = row.pop("host", ""), row.pop("domain", 0)
        devices[name] = Accelerator(
            Device(name, **row), intra, inter, driver_name, of_device, hosts.get(host, Host()), of_host.get(host, 1),
            domain,
        )  # fmt: skip
    networks = {
        name: KnownNetwork(**{**row, "devices": tuple(row.get("devices", ()))})
        for name, row in table["networks"].items()
    }
    of_links = {name: tuple(each) for name, each in uses.items()}
    return Accelerators(devices, table["aliases"], hosts, links, of_links, networks, table["network_aliases"])


def names() -> list[str]:
    """Every name that `lookup` knows, aliases first."""
    return [*accelerators().aliases, *accelerators().devices, "CPU"]


def knows(name: str) -> bool:
    return _device_named(name) is not None


def lookup(name: str) -> Accelerator:
    """The device of that name, alias or name in the driver, whatever its case, spaces and dashes: "A100 40GB", "4090".
    Raises `UserError` with the nearest names."""
    found = _device_named(name)
    if found is None:
        by_lower = {known.lower(): known for known in names()}
        near = [by_lower[one] for one in nearest(name.strip().lower(), by_lower, 2, cutoff=0.4)]
        hint = f"did you mean {' or '.join(near)}?" if near else "`shardwise list devices` has all names"
        raise UserError(
            f"no device {reprlib.repr(name)} in the catalog; {hint}; other devices are described in a TOML file"
        )
    if found != "CPU":
        return accelerators().devices[found]
    device = Device("CPU", "cpu", machine_memory(), None, {}, "this machine: sysconf and the cgroup's memory.max")
    loopback = Link(None, None, "not known before it is measured")
    return Accelerator(device, loopback, loopback)


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


HOUR = 3600.0
"""Seconds."""


class DevicePrice(NamedTuple):
    """Price of one device for one hour."""

    usd: float
    """US dollars per device-hour."""
    source: str
    """Provider and date, or that it was given."""
    highest: float
    """Highest list price of the same device; equal to `usd` where there is one."""

    def per_million_tokens(self, devices: int, tokens_per_second: float) -> float:
        """US dollars per million tokens."""
        return self.usd * devices / HOUR / tokens_per_second * 1e6

    def to_json(self) -> dict[str, Any]:
        return {"usd_per_device_hour": self.usd, "source": self.source, "highest_list_price": self.highest}


@cache
def _table() -> tuple[str, dict[str, list[tuple[float, str]]]]:
    """The date, and device -> (US dollars, offer), cheapest first."""
    import tomllib

    table = tomllib.loads((Path(__file__).parent / "prices.toml").read_text(encoding="utf-8"))
    offers: dict[str, list[tuple[float, str]]] = {}
    for row in table["prices"]:
        offers.setdefault(row["device"], []).append((row["usd"], row["offer"]))
    return table["date"], {device: sorted(rows) for device, rows in offers.items()}


def price_date() -> str:
    """Year and month of the list prices."""
    return _table()[0]


def price_of(device: Device, given: float | None = None) -> DevicePrice | None:
    """The given price per device-hour, else the lowest list price; None where the device has none."""
    if given is not None:
        return DevicePrice(given, "--price", given)
    date, offers = _table()
    if device.name not in offers:
        return None
    rows = offers[device.name]
    return DevicePrice(rows[0][0], f"{rows[0][1]}, list price of {date}", rows[-1][0])
