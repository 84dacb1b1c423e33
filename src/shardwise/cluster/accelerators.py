"""Known accelerators and the links that they usually come with: `accelerators.toml`, with a source for each figure."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardwise.cluster.device import Device, Link
from shardwise.cluster.host import UNKNOWN, Host
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
