"""Cluster: equal nodes of equal devices, with one kind of link inside a node and one between nodes."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cluster import catalog
from shardwise.cluster.catalog import Accelerator
from shardwise.cluster.device import HOST_FIELDS, MOST_OVER_PCIE, PCIE, RATES, UNKNOWN, Device, Host, Link, Speed
from shardwise.cluster.networks import network_of
from shardwise.cluster.paths import CHAIN, PAIRS, RING, NodePaths, paths_of, slowest
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass
from shardwise.small_files import read_small

MOST_COUNTED = 999_999_999
"""Limit of the number of nodes, and of devices per node."""

MOST_NAME = 60
"""Characters of a link's name."""
_TIMES = r"\s*[x\u00d7*]\s*"
_TEXT = re.compile(rf"(?:(\d+){_TIMES})?(\d+){_TIMES}(?!\d+{_TIMES})(\S.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes with `devices_per_node` devices each.

    Ranks fill node after node: rank r is on node r // devices_per_node.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    host: Host = UNKNOWN
    """Host of each node."""
    nics: int = 0
    """NICs of a node, each as fast as `inter`; 0: one for each device."""
    paths: NodePaths | None = None
    """Links inside a node by pair, where they differ; `intra` is then that of a ring over all of a node's devices."""

    def __post_init__(self) -> None:
        if type(self.nics) is not int or not 0 <= self.nics <= MOST_COUNTED:
            raise UserError(f"a cluster's nics must be an integer from 0 to {MOST_COUNTED:,}, not {self.nics!r}")
        for what in ("nodes", "devices_per_node"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise UserError(f"a cluster's {what} must be a positive integer, not {value!r}")
            if value > MOST_COUNTED:
                raise UserError(f"a cluster's {what} must be at most {MOST_COUNTED:,}, not {reprlib.repr(value)}")
        if self.paths is not None and self.paths.devices != self.devices_per_node:
            raise UserError(f"paths are those of {self.paths.devices} devices, but a node has {self.devices_per_node}")
        if self.memory_per_device == 0:
            raise UserError(
                f"device {self.device.name!r}: memory_bytes must be more than {self.device.memory_bytes} for "
                f"{self.devices_per_node:,} ranks that share it"
            )

    @property
    def devices(self) -> int:
        """Number of devices, which is the largest number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def memory_per_device(self) -> int | None:
        """Bytes that each rank has when all devices are used: the ranks on a CPU share their machine's memory."""
        total = self.device.memory_bytes
        return total // self.devices_per_node if total is not None and self.device.kind == "cpu" else total

    @property
    def network_share(self) -> float:
        """Part of `inter`'s bandwidth that each device has when all of a node send at once."""
        return min(1.0, self.nics / self.devices_per_node) if self.nics else 1.0

    @property
    def over_pcie(self) -> bool:
        """Whether the GPUs of a node reach each other over PCIe alone; a link of unknown kind counts by its speed."""
        link = self.intra
        if link.kind or self.device.kind != "cuda" or self.devices_per_node == 1:
            return link.kind in PCIE and self.devices_per_node > 1
        return link.bandwidth is not None and link.bandwidth <= MOST_OVER_PCIE

    def link(self, rank: int, other: int) -> Link:
        per_node = self.devices_per_node
        if rank // per_node != other // per_node:
            return self.inter
        return self.paths.pair(rank % per_node, other % per_node) if self.paths and rank != other else self.intra

    def seen_by(self, ranks: int, stride: int = 1, pairs: bool = False) -> Cluster:
        """This cluster as groups of `ranks` devices, `stride` apart, that fill it see it: one link inside a node.
        pairs: in collectives in which each device sends to every other one."""
        if self.paths is None:
            return self
        near = min(ranks, -(-self.devices_per_node // stride))
        if near < 2 or stride >= self.devices_per_node:
            return replace(self, paths=None)
        use = PAIRS if pairs else CHAIN if near < ranks else RING
        return replace(self, intra=self.paths.groups(near, stride, use), paths=None)

    def seen_by_group(self, group: Sequence[int]) -> Cluster:
        """This cluster as one group of devices sees it: with the slowest link that it has inside a node."""
        if self.paths is None:
            return self
        nodes: dict[int, list[int]] = {}
        for device in group:
            nodes.setdefault(device // self.devices_per_node, []).append(device % self.devices_per_node)
        use = CHAIN if len(nodes) > 1 else RING
        links = [self.paths.group(members, use) for members in nodes.values() if len(members) > 1]
        return replace(self, intra=slowest(links) if links else self.intra, paths=None)

    def without_paths(self) -> Cluster:
        """This cluster with the link of a whole node between all of its devices."""
        return replace(self, paths=None)

    def __str__(self) -> str:
        """The text form, `[NODESx]GPUSxDEVICE`.

        `parse` reads it back when device and links are the catalog's; what a file described otherwise is not in it.
        """
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}"

    def with_link(self, bandwidth: float) -> Cluster:
        """This cluster with another bandwidth inside its nodes, in bytes/s and one direction, in place of what was
        measured there by size. Raises `UserError` for a bandwidth that no link has."""
        source = f"bandwidth given; the rest: {self.intra.source}"
        link = replace(self.intra, bandwidth=bandwidth, speeds=(), source=source, name="")
        return replace(self, intra=link, paths=None)

    def with_network(self, text: str) -> Cluster:
        """This cluster with the network between nodes that a text names (`networks.network_of`). Raises `UserError` for
        a text that names none, and on one node, which has none."""
        if self.nodes == 1:
            raise UserError(f"network {text[:60]!r} is between nodes, and {self} is one node: leave it out")
        return self._networked(text)

    def _networked(self, text: str) -> Cluster:
        inter, nics = network_of(text, self.device.name, self.devices_per_node)
        return replace(self, inter=inter, nics=nics)

    def with_host_memory(self, nbytes: int) -> Cluster:
        """This cluster with so much host memory in each node. Raises `UserError` on CPUs, whose memory is the host's,
        and for no memory at all."""
        if self.device.kind == "cpu":
            raise UserError("the ranks of a CPU have the host's memory: write device.memory_bytes of a TOML file")
        source = "; ".join(filter(None, ("memory given", self.host.source)))
        return replace(self, host=replace(self.host, memory_bytes=nbytes, source=source))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read `[NODESx]GPUSxDEVICE` (8xH100 is one node, 8x8xH100 eight, 4xcpu this machine), or a TOML file.

        The file:

            nodes = 2                  # 1 if left out
            devices_per_node = 8
            network = "8x200Gb"        # or "NDR", "EFA", "RoCE 100Gb": in place of nics and [inter]
            nics = 1                   # of a node, each as fast as [inter]; one for each device if left out
            device = "H100"            # from the catalog, with its usual links; or a table:
            # [device]
            # name = "MyGPU"
            # kind = "cuda"            # or "cpu"
            # memory_bytes = 80e9
            # memory_bandwidth = 2e12  # bytes/s
            # peak_flops = { bfloat16 = 300e12 }
            # watts = 700              # what its board may draw
            paths = ["X NV4", "NV4 X"] # in place of [intra]: links by pair, in the words of nvidia-smi topo -m
            [links.NV4]                # such a link, where the catalog's device does not say: as [intra]
            [intra]                    # links: these figures, else the catalog's, else not known
            alpha = 3e-6               # seconds
            bandwidth = 200e9          # bytes/s, one direction
            kind = "nvlink"            # or "pcie" (through switches), "host" (PCIe through the host)
            [inter]
            bandwidth = 25e9           # of one NIC; of one device if nics is left out
            kind = "network"           # or "omni-path", of whose bandwidth collectives reach less than of InfiniBand's
            [host]                     # of each node, in place of the catalog's: these figures, else not known
            memory_bytes = 512e9       # shared by the node's ranks; a CPU's is device.memory_bytes
            link_bandwidth = 54e9      # bytes/s to one device, one direction
            links_bandwidth = 200e9    # bytes/s to all devices of the node at once
            adamw_rate = 4e9           # parameters/s that its cores update, all ranks together
            disk_read = 5e9            # bytes/s, all ranks together
            disk_write = 4e9

        A device may have a table `time`, which `shardwise calibrate device` writes. A link may have what `shardwise
        calibrate network` measures, too (see `Link`): startup, copy_alpha, reads, and speeds, a list of tables such as
        { bytes = 65536, bandwidth = 40e9, addition = 90e9, copy = 30e9 }.

        Raises `UserError` in one line for a text that is neither, an unknown device, or a field that is wrong.
        """
        text = text.strip()
        if text.lower().endswith(".toml"):
            return _from_toml(Path(text))
        match = _TEXT.fullmatch(text)
        if not match:
            usual = "write [NODESx]GPUSxDEVICE, such as 8xH100 or 4xcpu"
            hint = f"write 1x{text} for one device" if catalog.knows(text) else usual
            raise UserError(f"cluster {text!r} is not understood; {hint}, or the path of a .toml file")
        entry = catalog.lookup(match[3])
        devices = _count(match[2], text)
        return cls(
            _count(match[1] or "1", text), devices, entry.device, entry.intra, entry.inter, entry.host_of(devices)
        )


def _count(digits: str, text: str) -> int:
    # More digits than any cluster has: int() itself refuses very long ones with an error of its own.
    if len(digits) > len(str(MOST_COUNTED)) or int(digits) < 1:
        raise UserError(f"cluster {text!r}: the counts must lie between 1 and {MOST_COUNTED}")
    return int(digits)


def _from_toml(path: Path) -> Cluster:
    import tomllib

    damaged = f"cluster file {path} is not valid TOML:"
    with os_errors(f"read cluster file {path}", typed=path, damaged=damaged):
        data = tomllib.loads(read_small(path))
    try:
        return _from_table(data)
    except UserError as error:
        raise UserError(f"cluster file {path}: {error}") from None


def _from_table(data: dict[str, Any]) -> Cluster:
    _only(data, "", "nodes", "devices_per_node", "network", "nics", "device", "paths", "links", "intra", "inter",
          "host")  # fmt: skip
    if "device" not in data or "devices_per_node" not in data:
        raise UserError(f"{'device' if 'device' not in data else 'devices_per_node'} is missing")
    if isinstance(data["device"], str):
        entry = catalog.lookup(data["device"])
        device, intra, inter = entry.device, entry.intra, entry.inter
    else:
        entry = None
        device, intra, inter = _device(_table(data, "device")), Link(None, None), Link(None, None)
    cluster = Cluster(
        data.get("nodes", 1),
        data["devices_per_node"],
        device,
        _link(data, "intra", intra),
        _link(data, "inter", inter),
        nics=data.get("nics", 0),
    )
    cluster = _with_paths(data, cluster, entry)
    cluster = replace(cluster, host=_host(data, cluster, entry.host_of(cluster.devices_per_node) if entry else Host()))
    if "network" not in data:
        return cluster
    if "inter" in data or "nics" in data:
        raise UserError(f"network names the links between nodes: leave out {'nics' if 'nics' in data else '[inter]'}")
    if not isinstance(data["network"], str):
        raise UserError(f"network must be a text, not {data['network']!r}")
    return cluster._networked(data["network"])


def _with_paths(data: dict[str, Any], cluster: Cluster, entry: Accelerator | None) -> Cluster:
    if "paths" not in data:
        if "links" in data:
            raise UserError("[links] describes the links that paths names: give paths")
        return cluster
    if "intra" in data:
        raise UserError("paths names the links inside a node: leave out [intra]")
    rows = data["paths"]
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise UserError(f"paths must be a list of texts, one row per device, not {reprlib.repr(rows)}")
    tables = _table(data, "links") if "links" in data else {}
    links = {name: _link(tables, name, Link(None, None), "links.") for name in tables}
    links = {name: replace(link, name=link.name or name[:MOST_NAME]) for name, link in links.items()}
    paths = paths_of([row.split() for row in rows], entry, links)
    if paths.devices < 2:
        raise UserError("paths needs the rows of two devices or more")
    return replace(cluster, intra=paths.group(range(paths.devices)), paths=paths)


def _host(data: dict[str, Any], cluster: Cluster, usual: Host) -> Host:
    if "host" not in data:
        return usual
    table = _table(data, "host")
    _only(table, "host.", *HOST_FIELDS)
    if cluster.device.kind == "cpu" and "memory_bytes" in table:
        raise UserError("host.memory_bytes: the ranks of a CPU have the host's memory; write device.memory_bytes")
    memory, rates = _number(table, "host.", "memory_bytes"), {name: _number(table, "host.", name) for name in RATES}
    source = str(table.get("source", "the cluster file")) if table else ""
    return Host(None if memory is None else int(memory), source=source, **rates)


def _device(table: dict[str, Any]) -> Device:
    _only(table, "device.", "name", "kind", "memory_bytes", "memory_bandwidth", "peak_flops", "source", "time", "watts")
    name = table.get("name")
    if not isinstance(name, str) or not name[:1].isalpha() or not name.isprintable():
        raise UserError(f"device.name must be a text that starts with a letter, not {name!r}")
    if catalog.knows(name):
        raise UserError(f'device.name {name!r} is in the catalog; write device = "{name}", or choose another name')
    memory = _number(table, "device.", "memory_bytes")
    peaks = _table(table, "peak_flops") if "peak_flops" in table else {}
    return Device(
        name=name,
        kind=table.get("kind", "cuda"),
        memory_bytes=None if memory is None else int(memory),
        memory_bandwidth=_number(table, "device.", "memory_bandwidth"),
        peak_flops={d: v for d in peaks if (v := _number(peaks, "device.peak_flops.", d)) is not None},
        source=str(table.get("source", "the cluster file")),
        measured=_table(table, "time") if "time" in table else {},
        watts=_number(table, "device.", "watts"),
    )


def _link(data: dict[str, Any], name: str, usual: Link, of: str = "") -> Link:
    if name not in data:
        return usual
    table, name = _table(data, name), of + name
    _only(table, f"{name}.", "alpha", "bandwidth", "startup", "copy_alpha", "reads", "speeds", "source", "kind", "name")
    alpha, bandwidth = _number(table, f"{name}.", "alpha"), _number(table, f"{name}.", "bandwidth")
    source = str(table.get("source", "the cluster file"))
    usual_alpha, usual_bandwidth = alpha is None and usual.alpha is not None, bandwidth is None and usual.bandwidth
    if usual.source and (usual_alpha or usual_bandwidth):
        source = f"{source}; the rest: {usual.source}"
    called = table.get("name", "")
    if not isinstance(called, str) or not called.isprintable() or len(called) > MOST_NAME:
        raise UserError(f"{name}.name must be a short text, not {reprlib.repr(called)}")
    reads = table.get("reads", False)
    if type(reads) is not bool:
        raise UserError(f"{name}.reads must be true or false, not {reads!r}")
    return Link(
        usual.alpha if alpha is None else alpha,
        usual.bandwidth if bandwidth is None else bandwidth,
        source,
        _number(table, f"{name}.", "startup") or 0.0,
        _number(table, f"{name}.", "copy_alpha") or 0.0,
        reads,
        _speeds(table, f"{name}.speeds"),
        str(table.get("kind", usual.kind)),
        called,
    )


def _speeds(table: dict[str, Any], where: str) -> tuple[Speed, ...]:
    rows = table.get("speeds", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{where} must be a list of tables, not {rows!r}")
    found = []
    for row in rows:
        fields = ("bytes", "bandwidth", "addition", "copy", "again")
        _only(row, f"{where}.", *fields)
        nbytes, *others = (_number(row, f"{where}.", field) for field in fields)
        if nbytes is None:
            raise UserError(f"{where}: bytes is missing")
        found.append(Speed(nbytes, *others))
    return tuple(found)


def _only(table: dict[str, Any], prefix: str, *known: str) -> None:
    for field in table:
        if field not in known:
            raise UserError(f"unknown field {prefix}{field}; known are {', '.join(prefix + k for k in known)}")


def _table(data: dict[str, Any], field: str) -> dict[str, Any]:
    value = data[field]
    if not isinstance(value, dict):
        raise UserError(f"{field} must be a table, not {value!r}")
    return value


def _number(table: dict[str, Any], prefix: str, field: str) -> float | None:
    value = table.get(field)
    # bool is an int to Python; nan and inf are numbers to TOML.
    if value is not None and (type(value) not in (int, float) or not abs(value) < float("inf")):
        raise UserError(f"{prefix}{field} must be a finite number, not {value!r}")
    return value
