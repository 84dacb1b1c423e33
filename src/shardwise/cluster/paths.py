"""Links inside a node by pair of devices, and what a group of its devices reaches over them.

A ring over a group is as fast as its slowest link. NVLinks count where they join the group's devices in a ring: each
device then sends over all of its links to the group's members. Else the group is on PCIe, and the farthest pair's path
is its link. Between nodes a ring goes through each node once, for which a chain of NVLinks will do.

Where each device sends to every other one (all-to-all), each message takes its own pair's link: those over PCIe share
the slot, those over NVLink have links of their own, or share all of them over a switch. Ways over a third device's
NVLinks, which NCCL takes on a DGX-1, are not counted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from shardwise.cluster.catalog import Accelerator
from shardwise.cluster.device import KINDS, Link
from shardwise.errors import UserError
from shardwise.records import dataclass

PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, not the processor",
    "PHB": "the processor's PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes, which all that cross it share",
}
"""Paths over PCIe as nvidia-smi names them, nearest first -> what lies on them."""
NEAR = ("PIX", "PXB")
"""Paths that no processor is on."""
SELF = "X"
RING, CHAIN, PAIRS = "ring", "chain", "pairs"
"""How a collective uses a group's links: in a ring, in a part of one that spans nodes, or each pair's own."""
MOST_RING = 16
"""Devices up to which a ring over some of a group's pairs is looked for."""


@dataclass(frozen=True)
class NodePaths:
    """Links inside a node by pair."""

    names: tuple[tuple[str, ...], ...]
    """[device, device]: the name of the pair's link; "X" for a device and itself."""
    links: tuple[tuple[str, Link], ...]
    """Name -> link of one pair alone, as pairs."""
    ports: float = 0.0
    """Bytes/s of all NVLinks of one device together, in one direction; 0 where not known."""

    def __post_init__(self) -> None:
        known, size = dict(self.links), len(self.names)
        for a, row in enumerate(self.names):
            if len(row) != size:
                raise UserError(f"paths: row {a} has {len(row)} of {size} entries")
            for b, name in enumerate(row):
                if (name == SELF) != (a == b) or name != self.names[b][a]:
                    raise UserError(f"paths: {a} to {b} is {name!r}, but {b} to {a} is {self.names[b][a]!r}")
                if name != SELF and name not in known:
                    raise UserError(f"paths: the link {name!r} is not known; describe it in [links.{name}]")

    @property
    def devices(self) -> int:
        return len(self.names)

    def pair(self, one: int, other: int) -> Link:
        return dict(self.links)[self.names[one][other]]

    def counts(self) -> Counter[str]:
        """Name -> how many pairs have it."""
        return Counter(name for a, row in enumerate(self.names) for name in row[a + 1 :])

    def group(self, devices: Sequence[int], use: str = RING) -> Link:
        """The link over which a collective over some devices is priced, per device. use: `RING`, `CHAIN` or `PAIRS`."""
        members = tuple(sorted(devices))
        return _exchange(self, members) if use == PAIRS else _group(self, members, use == RING)

    def groups(self, ranks: int, stride: int = 1, use: str = RING) -> Link:
        """The link of the slowest of the groups of `ranks` devices `stride` apart that fill a node."""
        block = ranks * stride
        starts = (first + place for first in range(0, self.devices, block) for place in range(stride))
        found = (range(start, min(start + block, self.devices), stride) for start in starts)
        return slowest(self.group(members, use) for members in found if len(members) > 1)

    def apart(self, stride: int) -> Link:
        return slowest(self.pair(first, first + stride) for first in range(self.devices - stride))


def _speed(link: Link) -> float:
    kind = KINDS.get(link.kind)
    return (link.bandwidth or 0.0) * (kind.share if kind and kind.share else 1.0)


def slowest(links: Iterable[Link]) -> Link:
    """The link that collectives get least of; of equal ones the farthest."""
    order = list(PATHS)
    return min(links, key=lambda link: (_speed(link), -order.index(link.name) if link.name in PATHS else 0))


@lru_cache(maxsize=4096)
def _group(paths: NodePaths, members: tuple[int, ...], closed: bool) -> Link:
    pairs = {(a, b): paths.pair(a, b) for a in members for b in members if a != b}
    near = {pair for pair, link in pairs.items() if link.kind == "nvlink"}
    if not near or not _ring(members, near, closed):
        return slowest(link for pair, link in pairs.items() if pair not in near)
    switched = _switched(paths, members)
    each = [[pairs[a, b].bandwidth or 0.0 for b in members if (a, b) in near] for a in members]
    reached = min(max(row) if switched else sum(row) for row in each)
    best = max((pairs[pair] for pair in near), key=_speed)
    return best if reached == best.bandwidth else replace(best, bandwidth=reached, name=f"{best.name} together")


@lru_cache(maxsize=4096)
def _exchange(paths: NodePaths, members: tuple[int, ...]) -> Link:
    """The pair's link that is done last, with the bytes/s that a device sends to all others until then."""
    switched = _switched(paths, members)
    last: dict[float, Link] = {}
    for a in members:
        links = [paths.pair(a, b) for b in members if b != a]
        for link in links:
            alike = sum(other.kind == "nvlink" if link.kind == "nvlink" else other.kind != "nvlink" for other in links)
            sharing = alike if switched or link.kind != "nvlink" else 1
            last[sharing / (_speed(link) or 1.0)] = replace(
                link, bandwidth=link.bandwidth and link.bandwidth * len(links) / sharing
            )
    return last[max(last)]


def _switched(paths: NodePaths, members: Sequence[int]) -> bool:
    """Whether all links lead to each peer, over a switch; without one, each leads to one peer alone."""
    links = ([paths.pair(a, b) for b in range(paths.devices) if b != a] for a in members)
    whole = (sum(link.bandwidth or 0.0 for link in mine if link.kind == "nvlink") for mine in links)
    return bool(paths.ports) and max(whole) > paths.ports


def _ring(members: tuple[int, ...], near: set[tuple[int, int]], closed: bool) -> bool:
    """Whether some order of the members makes a ring of near pairs, or a chain where it need not be closed."""
    if len(near) == len(members) * (len(members) - 1):
        return True
    if len(members) > MOST_RING:
        return False

    def onward(first: int, at: int, left: frozenset[int]) -> bool:
        if not left:
            return not closed or (at, first) in near
        return any(onward(first, b, left - {b}) for b in sorted(left) if (at, b) in near)

    return any(onward(first, first, frozenset(members) - {first}) for first in members[: 1 if closed else None])


def named_link(name: str, entry: Accelerator) -> Link | None:
    """The link of one pair that nvidia-smi names: its NVLinks, or the PCIe slot; None for another name, and for a
    device without such ports."""
    ports = entry.ports
    if ports is None:
        return None
    if name in PATHS:
        source = f"{name}, over {PATHS[name]}; at most PCIe {ports.pcie} x16"
        return Link(None, ports.slot_bandwidth, source, kind="pcie" if name in NEAR else "host", name=name)
    count = int(name[2:]) if name.startswith("NV") and name[2:].isdecimal() and len(name) < 6 else 0
    if not 0 < count <= ports.nvlinks:
        return None
    alpha = entry.intra.alpha if entry.intra.kind == "nvlink" else None
    source = f"{count} NVLinks of {ports.nvlink_bandwidth / 1e9:g} GB/s a direction"
    return Link(alpha, count * ports.nvlink_bandwidth, source, kind="nvlink", name=name)


def paths_of(rows: Sequence[Sequence[str]], entry: Accelerator | None, given: Mapping[str, Link]) -> NodePaths:
    """The paths of a table of names. given: links in place of what `named_link` says of the device's. Raises
    `UserError` for names that are not known, and tables that are not those of pairs."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != SELF):
        link = given.get(name) or (named_link(name, entry) if entry else None)
        if link is None:
            raise UserError(f"paths: the link {name!r} is not known; describe it in [links.{name}]")
        found[name] = link
    ports = entry.ports.nvlinks * entry.ports.nvlink_bandwidth if entry and entry.ports else 0.0
    return NodePaths(tuple(map(tuple, rows)), tuple(found.items()), ports)
