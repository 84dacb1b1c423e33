"""Shortfall if nothing fits: the missing bytes, and single changes that would make the model fit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

from shardwise.cluster import Cluster, catalog
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.options import runs_text
from shardwise.planner.bounds import state_floor
from shardwise.planner.ranking import UNLIMITED, best_of, blocks, exact_memory, host_bound
from shardwise.planner.space import LayoutColumns, Space, why_not_fixed
from shardwise.predict.fixing import HOMES, words_of
from shardwise.predict.memory.capacity import reserved_bytes, usable_bytes
from shardwise.predict.node_bytes import NOTHING, NodeBytes
from shardwise.predict.supported import MOST_DEVICES
from shardwise.records import dataclass
from shardwise.report.units import format_apart, format_bytes

SHORTEST = 128
"""Tokens below which a sequence is not cut further."""

NODE = 8
"""Devices of a usual node."""


@dataclass(frozen=True)
class SmallestCandidate:
    """The candidate that needs the least memory on its fullest device."""

    layout: Layout
    nbytes: float
    """Infinite where a node's host has too little memory."""
    node: NodeBytes = NOTHING


def least(space: Space, frames: Iterable[LayoutColumns] | None = None) -> SmallestCandidate | None:
    """The candidate of a space, or of some frames of it, that needs least memory; None where there is none at all."""
    exact = exact_memory(space)
    found = best_of((block for _, block in blocks(space, exact, None, UNLIMITED, frames=frames)), exact, "memory")
    if not found:
        return None
    layout = found[0].layout
    return SmallestCandidate(layout, exact.total(layout), exact.node(layout))


def fits(space: Space, usable: float, frames: Iterable[LayoutColumns] | None = None) -> SmallestCandidate | None:
    """Result of `least`, where it needs no more than `usable` bytes."""
    if state_floor(space) > usable:
        return None
    found = least(space, frames)
    return found if found and found.nbytes <= usable else None


def why_no_state_fits(space: Space, usable: float, reserved: float | None) -> UserError | None:
    """One line where weights, gradients and optimizer state alone need more than all devices have, found without a
    search; None where they do not."""
    if (floor := state_floor(space)) <= usable:
        return None
    if not space.frames:
        return why_no_layout(space)
    needed, there = format_apart(floor, usable)
    wanted = (
        f"{space.model.name} does not fit {space.cluster}: weights, gradients and optimizer state alone need {needed} "
    )
    wanted += f"per device, spread over all {space.cluster.devices:,}, but {there} are usable"
    return _with_changes(f"{wanted}{_less(space.cluster, reserved)}", space, usable, reserved)


def why_nothing_fits(space: Space, usable: float, found: SmallestCandidate, reserved: float | None) -> UserError:
    """One line: what is missing, and the single changes that would do."""
    if found.nbytes == UNLIMITED:
        return why_not_on_the_host(space, found.node.host)
    needed, there = format_apart(found.nbytes, usable)
    wanted = f"{space.model.name} does not fit {space.cluster} with {space.workload.batch_words}: "
    wanted += f"the leanest layout{_with(space)} ({found.layout}) needs "
    wanted += f"{needed} per device, but {there} are usable{_less(space.cluster, reserved)}"
    return _with_changes(wanted, space, usable, reserved)


def _with_changes(wanted: str, space: Space, usable: float, reserved: float | None) -> UserError:
    ways = list(changes(space, usable, reserved))
    return UserError(f"{wanted}; {' or '.join(ways) if ways else 'no single change would do'}")


def why_not_on_the_host(space: Space, needed: float | None = None) -> UserError:
    """One line where layouts need more of the host than a node has. needed: bytes; None for the least by the bound."""
    if needed is None:
        needed = min(
            float(host_bound(space.model, frame, space.cluster, space.workload.optimizer).min())
            for frame in space.frames
        )
    wanted, there = format_apart(needed, space.cluster.host.memory_bytes or 0)
    disk = "" if space.homes.layout.offload_home == "nvme" else ", or keep state on disk (offload=nvme)"
    return UserError(
        f"{space.model.name} does not fit the hosts of {space.cluster}: what{_with(space)} leaves the devices needs "
        f"{wanted} of each node's memory, which has {there}; give --host-memory if it has more, take more nodes{disk}"
    )


def why_no_layout(space: Space) -> UserError:
    """One line where there is no legal layout at all: which fixed key, batch or number of devices is to blame."""
    wanted = f"no layout{_with(space)} splits {space.model.name} over the {space.cluster.devices} devices of "
    wanted += f"{space.cluster} with {space.workload.batch_words}"
    ways = [_other_values(key, free.frames) for key, free in _freed(space) if free.frames]
    replicas = sorted({dp for _, _, cp, dp in space.meshes(space.cluster.devices) if space.workload.seq % cp == 0})
    if replicas and not any(space.workload.batch % dp == 0 for dp in replicas):
        ways.append(f"take a batch that is a multiple of {replicas[0]}")
    for nodes in range(space.cluster.nodes - 1, max(0, space.cluster.nodes - 64), -1):
        if (smaller := space.on_nodes(nodes)).frames:
            ways.append(f"use {smaller.cluster}")
            break
    return UserError(f"{wanted}; {' or '.join(ways) if ways else 'give other numbers of devices or sequences'}")


def _freed(space: Space) -> Iterator[tuple[str, Space]]:
    for key in space.fixed:
        yield key, replace(space, fixed={k: v for k, v in space.fixed.items() if k != key})


def _other_values(key: str, frames: Iterable[LayoutColumns]) -> str:
    if key == "stages":
        cuts = sorted({runs_text(frame.stages(order)) for frame in frames for order in frame.orders if frame.pp > 1})
        return f"choose one of {len(cuts)} cuts, such as stages={' or '.join(cuts[:3])} (estimate prices others)"
    if key not in ("tp", "pp", "ep"):
        return f"leave {key} free"
    values = sorted({getattr(frame, key) for frame in frames})
    return f"leave {key} free (valid {key}: {', '.join(map(str, values))})"


def _with(space: Space) -> str:
    return f" with {words_of(space.fixed)}" if space.fixed else ""


def _less(cluster: Cluster, reserved: float | None) -> str:
    """Difference between usable bytes and the device's."""
    less = reserved_bytes(cluster, reserved)
    return f" ({format_bytes(cluster.memory_per_device or 0)} less {format_bytes(less)} reserved)" if less else ""


def changes(space: Space, usable: float, reserved: float | None) -> Iterator[str]:
    """Single changes that would make it fit: a key left free, more devices, fewer or shorter sequences, other
    devices."""
    for key, free in _freed(space):
        if found := fits(free, usable):
            yield f"leave {key} free ({found.layout} fits)"
    if words := offloading(space, usable):
        yield words
    model = space.model
    if model.lora and not model.lora.base:
        narrow = model.replace(lora=replace(model.lora, base="nf4"))
        if fits(replace(space, model=narrow), usable):
            yield "store frozen weights in 4 bits (--lora base=nf4)"
    if cluster := more_devices(space.cluster, lambda larger: fits(replace(space, cluster=larger), usable)):
        yield f"take {cluster}"
    if batch := _halved(space, usable, "batch", 1):
        yield f"cut the batch to {batch} sequence{'s' * (batch > 1)}"
    # A trace has rows of one length.
    if not model.trace and (seq := _halved(space, usable, "seq", SHORTEST)):
        yield f"cut sequences to {seq} tokens"
    for name in ("H200", "B200"):
        entry = catalog.lookup(name)
        other = replace(space.cluster, device=entry.device, intra=entry.intra, inter=entry.inter, paths=None)
        if fits(replace(space, cluster=other), usable_bytes(other, reserved)):
            yield f"take {other}"
            break


OFFLOADS = [dict.fromkeys(keys, home) for home in ("cpu", "nvme") for keys in (HOMES[:1], HOMES)]
"""Homes that are tried, nearest first."""


def offloading(space: Space, usable: float) -> str:
    """The nearest homes with which something fits, and what a node's host then holds; empty where none does, and where
    the homes are fixed or the engine has no others."""
    if any(key in space.fixed for key in HOMES) or not space.features.offload:
        return ""
    for homes in OFFLOADS:
        fixed = {**space.fixed, **homes}
        if not why_not_fixed(space.model, fixed) and (found := fits(replace(space, fixed=fixed), usable)):
            node, known = found.node, space.cluster.host.memory_bytes
            held = f"{format_bytes(node.host)} of memory" + f" and {format_bytes(node.disk)} of disk" * (node.disk > 0)
            unknown = "" if known or space.cluster.device.kind == "cpu" else ", if it has so much (--host-memory)"
            return f"give --fix {words_of(homes)} ({found.layout} fits with {held} of each node{unknown})"
    return ""


def _halved(space: Space, usable: float, key: Literal["batch", "seq"], smallest: int) -> int:
    """The workload's batch, or length of sequences, halved again and again until something fits; 0 where nothing does
    down to `smallest`."""
    number = getattr(space.workload, key) // 2
    while number >= smallest:
        if fits(replace(space, workload=replace(space.workload, **{key: number})), usable):
            return int(number)
        number //= 2
    return 0


def more_devices(cluster: Cluster, fits: Callable[[Cluster], object]) -> Cluster | None:
    """The smallest cluster that fits: a single node's devices are doubled up to `NODE`, then nodes."""
    larger = _doubled(cluster)
    while larger.devices <= MOST_DEVICES:
        if fits(larger):
            return larger
        larger = _doubled(larger)
    return None


def _doubled(cluster: Cluster) -> Cluster:
    if cluster.nodes == 1 and 2 * cluster.devices_per_node <= NODE and cluster.device.kind != "cpu":
        return replace(cluster.without_paths(), devices_per_node=2 * cluster.devices_per_node)
    return replace(cluster, nodes=2 * cluster.nodes)
