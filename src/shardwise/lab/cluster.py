"""The cluster of a lab's hosts, for predictions: a measured machine's device, the hosts' links between its nodes."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster, Link
from shardwise.errors import UserError
from shardwise.lab.link import LabLink


def lab_cluster(machine: Cluster, links: list[LabLink]) -> Cluster:
    """Hosts as nodes with one NIC each, and as many ranks together as measured this machine at once.

    machine: as `calibrate device --ranks N --transport gloo` writes it. Raises `UserError` when it is no CPU, or its
    ranks cannot be spread over the hosts.
    """
    if machine.device.kind != "cpu":
        raise UserError("the lab's ranks compute on this machine's cores: give --cluster a file of `calibrate device`")
    hosts, slowest = len(links), min(links, key=lambda link: link.bandwidth)
    ranks, rest = divmod(machine.devices, hosts)
    if rest:
        raise UserError(
            f"--cluster describes {machine.devices} ranks, which {hosts} hosts cannot share evenly: calibrate with "
            f"--ranks {hosts * max(1, ranks)}"
        )
    alpha = (machine.intra.alpha or 0.0) + max(link.latency for link in links)
    source = f"a lab's link of {slowest}; latency of a message inside a host added"
    between = Link(alpha, slowest.payload, source, kind="network")
    return replace(machine.without_paths(), nodes=hosts, devices_per_node=ranks, inter=between, nics=1)
