"""Host of a node: its memory, its links to the devices, its cores and its disk."""

from __future__ import annotations

from dataclasses import fields, replace

from shardwise.cluster.device import check_number
from shardwise.records import dataclass

RATES = ("link_bandwidth", "links_bandwidth", "adamw_rate", "disk_read", "disk_write")


@dataclass(frozen=True)
class Host:
    """Host of one node. A number that was neither measured nor published is None, never a guess."""

    memory_bytes: int | None = None
    """Bytes of the node's memory, shared by its ranks. None for a CPU cluster: its devices' memory is the host's."""
    link_bandwidth: float | None = None
    """Bytes/s between the host and one device, in one direction, from pinned memory. On a CPU, of a copy in memory."""
    links_bandwidth: float | None = None
    """Bytes/s between the host and all devices of the node at once, in one direction."""
    adamw_rate: float | None = None
    """Parameters/s that the node's cores update by AdamW in fp32, all ranks together."""
    disk_read: float | None = None
    """Bytes/s read from the node's disks by direct I/O, all ranks together."""
    disk_write: float | None = None
    """Bytes/s written to the node's disks by direct I/O, all ranks together."""
    source: str = ""
    """Source of the numbers."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", *RATES):
            check_number(f"host.{name}", getattr(self, name))

    def part(self, devices: int, of_all: int) -> Host:
        """Part of a host of `of_all` devices that comes with `devices` of them."""
        share = min(1.0, devices / of_all)
        if share == 1.0:
            return self
        shared = ("links_bandwidth", "adamw_rate", "disk_read", "disk_write")
        rates = {name: value * share for name in shared if (value := getattr(self, name)) is not None}
        memory = None if self.memory_bytes is None else int(self.memory_bytes * share)
        return replace(self, memory_bytes=memory, source=f"{devices} of {of_all} devices' part: {self.source}", **rates)


UNKNOWN = Host()
HOST_FIELDS = tuple(field.name for field in fields(Host))
