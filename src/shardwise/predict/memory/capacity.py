"""Memory of a device that training can use: one number for plans, estimates and their errors."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.report.units import format_bytes

RESERVED_BYTES = 2e9
"""Memory of a GPU for the driver's context and loaded kernels, in bytes: 0.5 to 2 GB, stas00/ml-engineering,
training/performance/README.md. Excludes fragmentation. Zero on a CPU."""


def reserved_bytes(cluster: Cluster, reserved: float | None = None) -> float:
    """Bytes of a device that training cannot use; reserved: the value to take in place of the usual one."""
    if reserved is not None:
        return reserved
    return 0.0 if cluster.device.kind == "cpu" else RESERVED_BYTES


def usable_bytes(cluster: Cluster, reserved: float | None = None) -> float:
    """Bytes of a device that training can use. Raises `UserError` where its memory is not known, or is no more than
    what is reserved."""
    memory, less = cluster.memory_per_device, reserved_bytes(cluster, reserved)
    if memory is None:
        raise UserError(f"{cluster.device.name}: its memory is not known; describe it in a TOML file (memory_bytes)")
    if memory <= less:
        raise UserError(f"{cluster.device.name} has {format_bytes(memory)} of memory, {format_bytes(less)} reserved")
    return memory - less


def capacity_of(cluster: Cluster | None) -> int | None:
    """`usable_bytes` as tables show it; None where nothing is known."""
    if cluster is None or (memory := cluster.memory_per_device) is None:
        return None
    return max(1, round(memory - reserved_bytes(cluster)))


def explained(cluster: Cluster, reserved: float | None = None) -> str:
    """Origin of the usable bytes, in one line; empty where nothing is reserved."""
    less = reserved_bytes(cluster, reserved)
    if not less or cluster.memory_per_device is None:
        return ""
    what = "driver context and kernels" if reserved is None else "--reserve"
    return f"usable: {format_bytes(cluster.memory_per_device)} per device, less {format_bytes(less)} for {what}"
