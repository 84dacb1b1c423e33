"""Memory of a device that training can use: one number for plans, estimates and their errors."""

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.report.room import DeviceRoom
from shardwise.report.units import format_bytes

RESERVED_BYTES = 2e9
"""Memory of a GPU for the driver's context and loaded kernels, in bytes: 0.5 to 2 GB, stas00/ml-engineering,
training/performance/README.md. Excludes fragmentation. Zero on a CPU."""


MARGINS = {
    "measured": (0.02, "kernels that save a little differently: peaks were within 0.4% on an H100 and an H200"),
    "own": (0.05, "kernels of a device on which peaks were not measured: within 3.6% on CPUs"),
    "other": (0.1, "other software's kernels and allocator: predicted peaks of published runs are 8% off on average"),
}
"""Provenance of a predicted peak -> (share by which a real one may be higher, what for). docs/memory.md."""
MEASURED = ("H100-80GB-SXM", "H200")
"""Devices on which this project's peaks were measured."""
UNEVEN = 0.05
"""More share of a peak where experts, whose loads are taken as even, keep more rows."""


def room_of(
    cluster: Cluster, engine: str | None = None, routed: bool = False, reserved: float | None = None
) -> DeviceRoom:
    """A device's room, with a margin by provenance; none where `reserved` sets the reserve. engine: profile of the
    software, None for this project's runtime; routed: the model has experts. Raises as `usable_bytes` does."""
    usable = usable_bytes(cluster, reserved)
    if reserved is not None:
        return DeviceRoom(usable)
    own = engine is None or engine.startswith("shardwise")
    share, why = MARGINS["other" if not own else "measured" if cluster.device.name in MEASURED else "own"]
    more = ", and for experts that are chosen unevenly" if routed else ""
    return DeviceRoom(usable, share + UNEVEN * routed, why + more)


def try_room(cluster: Cluster | None, engine: str | None = None, routed: bool = False) -> DeviceRoom | None:
    """The same, None where nothing is known of the device's memory, or all of it is reserved."""
    if cluster is None or cluster.memory_per_device is None or cluster.memory_per_device <= reserved_bytes(cluster):
        return None
    return room_of(cluster, engine, routed)


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
