"""Where nothing fits: how many bytes are missing, and which single change would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardwise.cluster import Cluster, catalog
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.predict.search.fitting import RESERVED_BYTES, Memory
from shardwise.predict.search.space import MOST_DEVICES, Frame, Space
from shardwise.report.units import format_bytes

SHORTEST = 128
"""Tokens below which a sequence is not cut further."""


@dataclass(frozen=True)
class Least:
    """The candidate that needs the fewest bytes on its fullest device."""

    layout: Layout
    nbytes: float


def least(space: Space, frames: Iterable[Frame] | None = None) -> Least | None:
    """The candidate of a space, or of some frames of it, that needs least memory; None where there is none at all."""
    memory = Memory(space.model, space.workload, space.attention)
    best: Least | None = None
    for frame in space.frames if frames is None else frames:
        possible = np.array(frame.possible)[:, None, :]
        nbytes = np.where(possible, memory.total(frame), np.inf)
        at = int(nbytes.argmin())
        if not np.isfinite(nbytes.flat[at]):
            continue
        if best is None or nbytes.flat[at] < best.nbytes:
            row, sharding, order = np.unravel_index(at, frame.shape)
            layout = frame.layout(frame.rows[row], frame.shardings[sharding], frame.orders[order])
            best = Least(layout, float(nbytes.flat[at]))
    return best


def usable_bytes(cluster: Cluster, reserved: float = RESERVED_BYTES) -> float:
    """Bytes of a device that training can have. Raises `UserError` where its memory is not known, or is no more than
    what is reserved."""
    memory = cluster.memory_per_device
    if memory is None:
        raise UserError(f"{cluster.device.name}: its memory is not known; describe it in a TOML file (memory_bytes)")
    if memory <= reserved:
        raise UserError(
            f"{cluster.device.name} has {format_bytes(memory)} of memory, {format_bytes(reserved)} reserved"
        )
    return memory - reserved


def why_nothing_fits(space: Space, usable: float, found: Least, reserved: float) -> UserError:
    """One line: what is missing, and the single changes that would do."""
    wanted = f"{space.model.name} does not fit {space.cluster} with {space.workload.batch} sequences of "
    wanted += f"{space.workload.seq} tokens: the leanest layout{_with(space)} ({found.layout}) needs "
    wanted += f"{format_bytes(found.nbytes)} a device, {format_bytes(usable)} are usable"
    ways = list(changes(space, usable, reserved))
    return UserError(f"{wanted}; {' or '.join(ways) if ways else 'no single change would do'}")


def why_no_layout(space: Space) -> UserError:
    """One line where there is no legal layout at all: which fixed key, batch or number of devices is to blame."""
    wanted = f"no layout{_with(space)} splits {space.model.name} over the {space.cluster.devices} devices of "
    wanted += f"{space.cluster} with {space.workload.batch} sequences of {space.workload.seq} tokens"
    ways = [_other_values(key, frames) for key, frames in _freed(space) if frames]
    replicas = sorted({dp for _, _, cp, dp in space.meshes(space.cluster.devices) if space.workload.seq % cp == 0})
    if replicas and not any(space.workload.batch % dp == 0 for dp in replicas):
        ways.append(f"take a batch that is a multiple of {replicas[0]}")
    for nodes in range(space.cluster.nodes - 1, max(0, space.cluster.nodes - 64), -1):
        smaller = replace(space, cluster=replace(space.cluster, nodes=nodes))
        if smaller.frames:
            ways.append(f"use {smaller.cluster}")
            break
    return UserError(f"{wanted}; {' or '.join(ways) if ways else 'give other numbers of devices or sequences'}")


def _freed(space: Space) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """Each fixed key, and the frames that there are where it is free."""
    for key in space.fixed:
        yield key, replace(space, fixed={k: v for k, v in space.fixed.items() if k != key}).frames


def _other_values(key: str, frames: Iterable[Frame]) -> str:
    """Of a degree that has frames of its own, the values that it can have."""
    if key not in ("tp", "pp", "ep"):
        return f"leave {key} free"
    values = sorted({getattr(frame, key) for frame in frames})
    return f"leave {key} free (valid {key}: {', '.join(map(str, values))})"


def _with(space: Space) -> str:
    return f" with {_words(space)}" if space.fixed else ""


def _words(space: Space) -> str:
    return ",".join(key if value is True else f"{key}={value}" for key, value in space.fixed.items())


def changes(space: Space, usable: float, reserved: float) -> Iterator[str]:
    """What would make it fit, each alone: a key left free, more nodes, shorter sequences, other devices."""
    for key in space.fixed:
        free = replace(space, fixed={k: v for k, v in space.fixed.items() if k != key})
        if (found := least(free)) and found.nbytes <= usable:
            yield f"leave {key} free ({found.layout} fits)"
    if (cluster := more_nodes(space, usable)) is not None:
        yield f"take {cluster}"
    seq = space.workload.seq // 2
    while seq >= SHORTEST:
        shorter = replace(space, workload=replace(space.workload, seq=seq))
        if (found := least(shorter)) and found.nbytes <= usable:
            yield f"cut sequences to {seq} tokens"
            break
        seq //= 2
    for name in ("H200", "B200"):
        entry = catalog.lookup(name)
        other = replace(space.cluster, device=entry.device, intra=entry.intra, inter=entry.inter)
        found = least(replace(space, cluster=other))
        if found and found.nbytes <= usable_bytes(other, reserved):
            yield f"take {other}"
            break


def more_nodes(space: Space, usable: float) -> Cluster | None:
    """The cluster with the fewest nodes, doubled again and again, on which something fits."""
    nodes = space.cluster.nodes * 2
    while nodes * space.cluster.devices_per_node <= MOST_DEVICES:
        larger = replace(space.cluster, nodes=nodes)
        found = least(replace(space, cluster=larger))
        if found and found.nbytes <= usable:
            return larger
        nodes *= 2
    return None
