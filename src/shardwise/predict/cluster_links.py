"""The links that a prediction is made for, in one line and as plain data: those of the cluster, given or assumed."""

from collections.abc import Iterator
from typing import Any

from shardwise.cluster import KINDS, Cluster, Link, catalog
from shardwise.cluster.paths import NodePaths
from shardwise.codec import keyed
from shardwise.report.units import format_bytes


def links_json(cluster: Cluster) -> dict[str, Any]:
    """Links inside a node and between nodes, null where there are none: names, bytes/s per device or NIC, NICs of a
    node, and whether they are assumed, as the usual ones of the device."""
    inside, between = _assumed(cluster)
    near = None if cluster.devices_per_node == 1 else _json(cluster.intra, inside and cluster.paths is None)
    if near and cluster.paths is not None:
        pairs = {link.name: {"pairs": count} | _json(link, False) for link, count in _by_pair(cluster.paths)}
        near |= {"by_pair": pairs}
    far = None if cluster.nodes == 1 else _json(cluster.inter, between)
    return {
        "inside_node": near,
        "between_nodes": far and far | {"nics_per_node": cluster.nics or cluster.devices_per_node},
    }


def links_line(cluster: Cluster) -> str:
    """One line; empty on one device, which has no links."""
    inside, between = _assumed(cluster)
    parts: list[tuple[str, bool]] = []
    if cluster.paths is not None:
        each = (f"{pairs} pairs over {_said(link)}" for link, pairs in _by_pair(cluster.paths))
        parts.append((f"{'; '.join(each)} inside a node", False))
    elif cluster.devices_per_node > 1:
        parts.append((f"{_said(cluster.intra)} per device inside a node", inside))
    if cluster.nodes > 1:
        shared = f"NIC, {cluster.nics} per node," if cluster.nics else "device"
        parts.append((f"{_said(cluster.inter)} per {shared} between nodes", between))
    if not parts:
        return ""
    usual = f"assumed, usual for {cluster.device.name}"
    if between and (rack := _rack(cluster)):
        change = f"; machines on one NVLink switch are one node: --cluster {rack}"
    elif cluster.nodes > 1 and between and cluster.inter.bandwidth is None:
        change = "; name the network: --network 100Gb, NDR, EFA"
    else:
        change = "; --network names another" if cluster.nodes > 1 and between else ""
    if all(assumed for _, assumed in parts):
        return f"links: {'; '.join(text for text, _ in parts)} ({usual}{change})"
    return f"links: {'; '.join(f'{text} ({usual})' if assumed else text for text, assumed in parts)}{change}"


def with_links(data: dict[str, Any], cluster: Cluster | None) -> dict[str, Any]:
    """Plain data of a prediction with the links that it is made for."""
    return data | {"cluster_links": links_json(cluster) if cluster else None}


def link_lines(cluster: Cluster | None) -> Iterator[str]:
    if cluster is not None and (line := links_line(cluster)):
        yield line


def _assumed(cluster: Cluster) -> tuple[bool, bool]:
    if not catalog.knows(cluster.device.name):
        return False, False
    usual = catalog.lookup(cluster.device.name)
    return cluster.intra == usual.intra, cluster.inter == usual.inter and not cluster.nics


def _rack(cluster: Cluster) -> str:
    """The cluster as it is where one NVLink switch joins devices of several nodes (NVL72); empty where none does."""
    domain = catalog.lookup(cluster.device.name).domain if catalog.knows(cluster.device.name) else 0
    if cluster.nodes == 1 or cluster.devices_per_node >= domain:
        return ""
    racks = f"{cluster.devices // domain}x" if cluster.devices > domain else ""
    return f"{racks}{min(cluster.devices, domain)}x{cluster.device.name}"


def _by_pair(paths: NodePaths) -> list[tuple[Link, int]]:
    links, counts = dict(paths.links), paths.counts()
    return sorted(((links[name], count) for name, count in counts.items()), key=lambda one: -(one[0].bandwidth or 0.0))


def _said(link: Link) -> str:
    name = link.name if link.name and link.name != "unknown" else KINDS[link.kind].words if link.kind else "links"
    return f"{name}, {format_bytes(link.bandwidth)}/s" if link.bandwidth else f"{name} of unknown speed"


def _json(link: Link, assumed: bool) -> dict[str, Any]:
    return keyed(link, "name? kind? bandwidth alpha") | {"assumed": assumed, "source": link.source}
