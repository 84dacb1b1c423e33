"""A node as `nvidia-smi topo -m` draws it: which GPUs are how far from each other, and what that makes of a `Cluster`.

The table names the path between two devices, not its speed. Speeds are those of the device's NVLinks and its PCIe slot,
in one direction.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster import catalog
from shardwise.cluster.catalog import Accelerator, accelerators
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import KINDS, Link
from shardwise.cluster.paths import NEAR, PATHS, NodePaths, named_link, paths_of
from shardwise.errors import UserError

_OLDER = {"SOC": "SYS"}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU\d{1,4}")
_NVLINK = re.compile(r"NV(\d{1,3})")
_LISTED = re.compile(r"GPU \d+: (.+?)(?: \(UUID.*)?")
MOST_DEGREE = 16
"""Largest degree of tensor parallelism that advice names."""
MOST_TEXT = 1_000_000
"""Characters beyond which a text is no such table."""


@dataclass(frozen=True)
class Topology:
    """GPUs of one node. paths: (GPU, GPU or NIC) -> "NV12", "PIX", ...; device: what the driver calls them, empty where
    the text does not say."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    paths: Mapping[tuple[str, str], str]
    device: str = ""

    def between(self) -> Counter[str]:
        """Path -> how many pairs of GPUs have it."""
        pairs = [(a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :]]
        return Counter(self.paths[pair] for pair in pairs)

    def islands(self) -> list[tuple[str, ...]]:
        """GPUs that NVLinks join, directly or over others; one without any is an island of its own."""
        return self._groups(self.gpus, ["NVLink"])

    def ordered(self) -> "Topology":
        """The same node with near GPUs beside each other, as ranks are then numbered: those that NVLinks join, those of
        one PCIe switch, and so on."""
        return replace(self, gpus=tuple(self._arranged(self.gpus, ["NVLink", *PATHS])))

    def _arranged(self, gpus: Sequence[str], levels: list[str]) -> Sequence[str]:
        if len(levels) == 1 or len(gpus) < 2:
            return gpus
        groups = sorted(self._groups(gpus, levels[:-1]), key=len, reverse=True)
        return [gpu for group in groups for gpu in self._arranged(group, levels[:-1])]

    def _groups(self, gpus: Sequence[str], near: list[str]) -> list[tuple[str, ...]]:
        """GPUs that paths of these levels join, directly or over others, in the order of `gpus`."""
        left, found = list(gpus), []
        while left:
            group = [left.pop(0)]
            for gpu in group:
                levels = {other: self.paths[gpu, other] for other in left}
                group += [other for other in left if (levels[other] if levels[other] in PATHS else "NVLink") in near]
                left = [other for other in left if other not in group]
            found.append(tuple(sorted(group, key=gpus.index)))
        return found

    def switched_nics(self) -> tuple[str, ...]:
        return tuple(nic for nic in self.nics if any(self.paths[gpu, nic] in NEAR for gpu in self.gpus))

    def near_nics(self) -> tuple[str, ...]:
        """`switched_nics`; all of them where there are none."""
        return self.switched_nics() or self.nics


def read(text: str) -> Topology:
    """The table that `nvidia-smi topo -m` prints, and the device's name where `nvidia-smi -L` stands above it.

    Raises `UserError` in one line for a text that is not such a table, or only a part of one.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"that is no table of nvidia-smi topo -m: it has more than {MOST_TEXT:,} characters")
    lines = [_ESCAPES.sub("", line).strip() for line in text.splitlines()]
    heads = [at for at, line in enumerate(lines) if _head(line)]
    if not heads:
        raise UserError("that is no table of nvidia-smi topo -m: no line names the columns GPU0, GPU1, ...")
    columns = _head(lines[heads[0]])
    if len(columns) != len(set(columns)):
        raise UserError("the table of nvidia-smi topo -m names a column twice")
    gpus = tuple(name for name in columns if _GPU.fullmatch(name))
    rows = {}
    for line in lines[heads[0] + 1 :]:
        name, *cells = line.split() or [""]
        if name in gpus and name not in rows:
            rows[name] = _row(name, cells, columns)
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        raise UserError(f"the table of nvidia-smi topo -m has no row {missing[0]}: give all of it")
    paths = {(gpu, other): path for gpu, row in rows.items() for other, path in row.items()}
    for a in gpus:
        for b in gpus:
            if paths[a, b] != paths[b, a]:
                raise UserError(f"{a} to {b} is {paths[a, b]}, but {b} to {a} is {paths[b, a]}: is the table whole?")
    names = {match[1].strip() for line in lines if (match := _LISTED.fullmatch(line))}
    if len(names) > 1:
        raise UserError(f"this node has different GPUs ({', '.join(sorted(names))}); a cluster has one kind of device")
    return Topology(gpus, tuple(name for name in columns if name not in gpus), paths, next(iter(names), ""))


def _head(line: str) -> list[str]:
    """The devices that a line names as columns; empty where it is no head of a table."""
    names = re.split(r"\s(?:CPU|NUMA|GPU NUMA)\s", f"{line} ", maxsplit=1)[0].split()
    there = names and _GPU.fullmatch(names[0]) and not any(_path(name) for name in names)
    return names if there else []


def _path(cell: str) -> str:
    known = cell == "X" or cell in PATHS or _NVLINK.fullmatch(cell)
    return cell if known else _OLDER.get(cell, "")


def _row(name: str, cells: list[str], columns: list[str]) -> dict[str, str]:
    if len(cells) < len(columns):
        raise UserError(f"row {name} of the table has {len(cells)} of {len(columns)} entries: give all of it")
    found = {}
    for column, cell in zip(columns, cells, strict=False):
        path = _path(cell)
        if not path or (path == "X") != (column == name) or path == "NV0":
            wanted = "X" if column == name else f"NV#, {', '.join(PATHS)}"
            raise UserError(f"{name} to {column} is {cell!r} in the table; it should be {wanted}")
        found[column] = path
    return found


def device_of(topology: Topology, given: str | None) -> str:
    """The catalog's name of the node's devices: the given one, or what the driver calls them. Raises `UserError`."""
    driver_name = topology.device.removeprefix("NVIDIA ").strip()
    known = {entry.driver_name: name for name, entry in accelerators().devices.items() if entry.driver_name}
    name = known.get(driver_name) if given is None else given
    if name is None:
        reason = f"{topology.device!r} is not in the catalog" if driver_name else "the table does not name the GPUs"
        raise UserError(f"{reason}; give --device, such as --device H100")
    entry = catalog.lookup(name)
    if entry.ports is None:
        raise UserError(f"{entry.device.name} is not NVIDIA's: its links are not those of nvidia-smi topo -m")
    return entry.device.name


def cluster_of(
    topology: Topology, device: str, nodes: int = 1, nic_gbits: float | None = None, islands: bool = False
) -> Cluster:
    """`nodes` such nodes. device: its name in the catalog. nic_gbits: Gb/s of one NIC; without, the network is the
    catalog's usual one, of as many NICs as the table has. islands: groups that NVLinks join become nodes, with PCIe
    between them, of one machine.

    Where paths differ, the cluster has them by pair, in the order of `Topology.ordered`; its `intra` is then that of a
    ring over all GPUs. Machines that share an NVLink switch (NVL72) are one node. Raises `UserError`.
    """
    entry = catalog.lookup(device)
    if islands:
        return _islands(topology, entry, nodes, nic_gbits)
    intra = _intra(topology, topology.gpus, entry)
    gpus, (network, nics) = len(topology.gpus), _network(topology, entry.inter, nic_gbits, nodes)
    nodes, devices = _joined(nodes, gpus, intra, entry)
    if devices > gpus:
        return Cluster(nodes, devices, entry.device, intra, network, entry.host_of(devices))
    paths = _by_pair(topology, entry)
    if paths is not None:
        intra = paths.group(range(gpus))
    return Cluster(nodes, devices, entry.device, intra, network, entry.host_of(devices), nics, paths)


def _joined(nodes: int, devices: int, intra: Link, entry: Accelerator) -> tuple[int, int]:
    """(nodes, devices of one) where one NVLink switch joins the GPUs of several machines: its GPUs are one node."""
    if nodes < 2 or intra.kind != "nvlink" or devices >= entry.domain:
        return nodes, devices
    machines = entry.domain // devices
    if nodes > machines and nodes % machines:
        raise UserError(
            f"NVLinks join {machines} such nodes of {entry.device.name}: give --nodes up to {machines}, or a multiple"
        )
    joined = min(nodes, machines)
    return nodes // joined, devices * joined


def _by_pair(topology: Topology, entry: Accelerator) -> NodePaths | None:
    """Links by pair; None where one link says all: two GPUs, a switch, or one PCIe path between all."""
    gpus = topology.ordered().gpus
    if len(gpus) < 3:
        return None
    paths = paths_of([["X" if a == b else topology.paths[a, b] for b in gpus] for a in gpus], entry, {})
    every = {paths.groups(size).bandwidth for size in range(2, len(gpus) + 1) if len(gpus) % size == 0}
    return paths if len(paths.counts()) > 1 or len(every) > 1 else None


def _islands(topology: Topology, entry: Accelerator, nodes: int, nic_gbits: float | None) -> Cluster:
    found = topology.islands()
    sizes = {len(island) for island in found}
    joined = [gpu for island in found for gpu in island]
    if nodes > 1 or nic_gbits is not None:
        raise UserError("--islands describes one machine: leave out --nodes and --nic-gbits")
    if len(sizes) > 1 or len(found) == 1 or sizes == {1} or joined != list(topology.gpus):
        told = "; ".join(" ".join(island) for island in found)
        raise UserError(f"--islands wants groups of equal size, one after the other, that NVLinks join; here: {told}")
    intra = min((_intra(topology, island, entry) for island in found), key=lambda link: link.bandwidth or 0.0)
    devices, between = sizes.pop(), _pcie(topology, topology.gpus, entry)
    host = entry.host_of(len(topology.gpus)).part(devices, len(topology.gpus))
    return Cluster(len(found), devices, entry.device, intra, between, host)


def _intra(topology: Topology, gpus: tuple[str, ...], entry: Accelerator) -> Link:
    """The link of a group: its NVLinks where they join every pair, else PCIe."""
    usual, ports, device = entry.intra, entry.ports, entry.device.name
    assert ports
    if len(gpus) == 1:
        return usual
    rows = [[topology.paths[gpu, other] for other in gpus if other != gpu] for gpu in gpus]
    counts = [[int(match[1]) for path in row if (match := _NVLINK.fullmatch(path))] for row in rows]
    if any(map(len, counts)) and not ports.nvlinks:
        raise UserError(f"the table has NVLinks, but {device} has none; give --device as it is")
    if most := max((n for row in counts for n in row if n > ports.nvlinks), default=0):
        raise UserError(f"the table has NV{most}, but {device} has {ports.nvlinks} NVLinks; give --device as it is")
    if any(len(row) < len(gpus) - 1 for row in counts):
        return _pcie(topology, gpus, entry)
    # Over a switch all links lead to each peer; without one, each to one peer alone.
    switched = any(sum(row) > ports.nvlinks for row in counts)
    links = min(max(row) if switched else sum(row) for row in counts)
    how = "over a switch" if switched else f"at most {max(map(max, counts))} of them to one peer"
    source = f"nvidia-smi topo -m: {links} NVLinks of {ports.nvlink_bandwidth / 1e9:g} GB/s a direction, {how}"
    found = Link(None, links * ports.nvlink_bandwidth, source, kind="nvlink")
    if usual.kind != "nvlink":
        return found
    return usual if usual.bandwidth == found.bandwidth else replace(found, alpha=usual.alpha)


def _pcie(topology: Topology, gpus: tuple[str, ...], entry: Accelerator) -> Link:
    found = {topology.paths[a, b] for a in gpus for b in gpus if a != b}
    link = named_link(max(found & PATHS.keys(), key=list(PATHS).index), entry)
    assert link
    return replace(link, source=f"nvidia-smi topo -m: {link.source}", name="")


def _network(topology: Topology, usual: Link, nic_gbits: float | None, nodes: int) -> tuple[Link, int]:
    """The network between nodes, and the NICs that a node's GPUs share; 0 where they have one each, or more."""
    nics, gpus = len(topology.near_nics()), len(topology.gpus)
    shared = nics if nics < gpus and nodes > 1 else 0
    if nic_gbits is None:
        return usual, shared
    if not 0 < nic_gbits < 1e6:
        raise UserError("--nic-gbits must be a positive number of Gb/s")
    if not nics:
        raise UserError("--nic-gbits: the table has no NICs")
    source = f"nvidia-smi topo -m: {nics} NICs of {nic_gbits:g} Gb/s (given) for {gpus} GPUs"
    each = nic_gbits * 1e9 / 8
    bandwidth = each if shared else each * nics / gpus
    return Link(None, bandwidth, source, kind="network", name=f"{nics}x{nic_gbits:g}Gb"), shared


def explained(topology: Topology) -> Iterator[str]:
    """Summary of the table, line by line: the paths between GPUs, nearest first, and where the NICs are."""
    order = list(PATHS)
    pairs = topology.between()
    for path in sorted(pairs, key=lambda path: (order.index(path) if path in order else -1, path)):
        over = PATHS[path] if path in PATHS else f"{path[2:]} NVLinks"
        yield f"{path}: {pairs[path]} pair{'s' if pairs[path] > 1 else ''} of GPUs, over {over}"
    groups = topology.islands()
    if 1 < len(groups) < len(topology.gpus):
        yield f"NVLinks join {'; '.join(' '.join(group) for group in groups if len(group) > 1)}, and not all GPUs"
    ordered = topology.ordered().gpus
    if ordered != topology.gpus:
        numbers = ",".join(gpu.removeprefix("GPU") for gpu in ordered)
        yield f"near GPUs have to be neighbors: start with CUDA_VISIBLE_DEVICES={numbers}, the order of this file"
    if topology.nics:
        yield f"{len(topology.nics)} NICs, {len(topology.switched_nics())} of them behind the PCIe switch of a GPU"


def advice(cluster: Cluster) -> Iterator[str]:
    """One line on the links that tensor parallelism of each degree has inside a node of the cluster."""
    said = []
    for size in range(2, min(cluster.devices_per_node, MOST_DEGREE) + 1):
        if cluster.devices_per_node % size == 0:
            link = cluster.seen_by(size).intra
            kind = KINDS[link.kind].words if link.kind else "its link"
            said.append(f"tp={size} {kind}, {(link.bandwidth or 0.0) / 1e9:.4g} GB/s")
    if said:
        yield f"per device and direction: {'; '.join(said)}"


_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's common ancestors of two devices -> what nvidia-smi calls them."""

_SWITCH, _LINKS = 2, 18
"""NVML's device type for a switch at the other end of a link; the most NVLinks of a device."""


def ask() -> Topology:
    """This host's GPUs, without its NICs. Raises `UserError` where pynvml is not there, or finds no driver or GPU."""
    try:
        import pynvml
    except ImportError:
        raise UserError(
            "no file is given, and pynvml is not there to ask the driver: install nvidia-ml-py, or pipe "
            "nvidia-smi topo -m into calibrate topology -"
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            return _found(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UserError(f"NVML: {error}; give a file with the output of nvidia-smi topo -m") from None


def _found(nvml: Any) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        raise UserError("NVML finds no GPU on this host")
    names = {_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
    if len(names) > 1:
        raise UserError(f"this node has different GPUs ({', '.join(sorted(names))}); a cluster has one kind of device")
    gpus = tuple(f"GPU{index}" for index in range(len(handles)))
    buses = [_text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower() for handle in handles]
    ends = [_ends(nvml, handle) for handle in handles]
    paths = {}
    for i, one in enumerate(handles):
        for j, other in enumerate(handles):
            # Both ends count: a link that only one of them reports is not up.
            links = min(ends[i].count("") + ends[i].count(buses[j]), ends[j].count("") + ends[j].count(buses[i]))
            level = "X" if i == j else _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), "SYS")
            paths[gpus[i], gpus[j]] = f"NV{links}" if links and i != j else level
    return Topology(gpus, (), paths, names.pop())


def _ends(nvml: Any, handle: Any) -> list[str]:
    """The bus of the device at the other end of each NVLink that is up; empty for a switch."""
    found = []
    for link in range(_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH:
                found.append("")
            else:
                found.append(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower())
        except nvml.NVMLError:
            # Devices without that link, or without any.
            continue
    return found


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
