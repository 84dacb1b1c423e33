"""Rates of a cluster's hosts: what is known of them, and for the rest the one host that was measured.

Cores and disks are a node's, and its ranks share them. No link is faster than its slot, nor than its part of what all
links of the node move at once.
"""

from dataclasses import replace

from shardwise.cluster import Cluster, Host
from shardwise.cluster.catalog import accelerators
from shardwise.records import dataclass

MEASURED, CORE = "measured", "measured-core"
"""Hosts of the catalog that stand in for unknown ones: beside GPUs, and for one thread of a CPU."""
MEASURED_SLOT = "PCIe-5.0"
"""The slot that the measured host's link is in."""


@dataclass(frozen=True)
class HostShare:
    """One rank's share of its node's host, while all ranks of the node use it."""

    link: float
    """Bytes/s between host and device, in one direction. On a CPU, of a copy in memory."""
    cores: float
    """Parameters/s that AdamW updates."""
    read: float
    """Bytes/s read from disk."""
    write: float
    """Bytes/s written to disk."""
    overlaps: bool = True
    """Whether copies and updates run beside the device's computation. A CPU rank's are its own core's work."""
    missing: tuple[str, ...] = ()
    """Unknown rates, replaced by those of a measured host."""
    usual: str = ""
    """Source of that host's."""

    def notes(self, disk: bool) -> tuple[str, ...]:
        """Assumptions in place of missing measurements, a sentence each. disk: whether its rates matter."""
        parts = ", ".join(words for words in self.missing if disk or "disk" not in words)
        if not parts:
            return ()
        return (
            f"host: {parts} not known, so one host's, whose cores and disk the node's ranks share: {self.usual}; "
            "to measure another: `shardwise calibrate device --out FILE.toml`",
        )


def host_share(cluster: Cluster) -> HostShare:
    """The share of a rank on `cluster`, all of whose devices are used."""
    ranks, on_cpu = cluster.devices_per_node, cluster.device.kind == "cpu"
    known, usual = cluster.host, _usual(cluster)
    taken = {name: getattr(known, name) or getattr(usual, name) for name in _WORDS}
    missing = tuple(words for name, words in _WORDS.items() if getattr(known, name) is None)
    link = min(taken["link_bandwidth"], _slot(cluster) or float("inf"))
    if known.links_bandwidth is not None:
        link = min(link, known.links_bandwidth / ranks)
    return HostShare(
        link,
        taken["adamw_rate"] / ranks,
        taken["disk_read"] / ranks,
        taken["disk_write"] / ranks,
        overlaps=not on_cpu,
        missing=missing,
        usual=usual.source,
    )


_WORDS = {
    "link_bandwidth": "link to the device",
    "adamw_rate": "cores' AdamW",
    "disk_read": "disk reads",
    "disk_write": "disk writes",
}
"""Rates of a host that are needed, in words."""


def _usual(cluster: Cluster) -> Host:
    """The measured host in place of an unknown one: with the cluster's slot, or with as many of its cores as there are
    ranks on a CPU."""
    hosts = accelerators().hosts
    measured, core = hosts[MEASURED], hosts[CORE]
    assert measured.adamw_rate and measured.link_bandwidth and core.adamw_rate
    if cluster.device.kind == "cpu":
        rate = min(cluster.devices_per_node * core.adamw_rate, measured.adamw_rate)
        return replace(measured, link_bandwidth=core.link_bandwidth, adamw_rate=rate)
    measured_slot = accelerators().slots[MEASURED_SLOT]
    share = (_slot(cluster) or measured_slot) / measured_slot
    return replace(measured, link_bandwidth=measured.link_bandwidth * min(1.0, share))


def _slot(cluster: Cluster) -> float | None:
    """Bytes/s of the PCIe slot of a device of the catalog, in one direction; None where not known."""
    entry = accelerators().devices.get(cluster.device.name)
    return entry.ports.slot_bandwidth if entry and entry.ports else None
