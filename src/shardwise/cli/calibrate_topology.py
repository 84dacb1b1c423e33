"""`calibrate topology`: the output of `nvidia-smi topo -m`, or what NVML says of this host, as a cluster file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.clusters import check_name, write_cluster
from shardwise.cli.output import print_json
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.report.units import format_bytes

if TYPE_CHECKING:
    from shardwise.cluster.topology import Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", nargs="?", metavar="FILE", help="output of nvidia-smi topo -m, - for standard input (ask NVML)"
    )
    parser.add_argument("--device", metavar="NAME", help="of the catalog (what nvidia-smi -L above the table says)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="how many such nodes there are (1)")
    parser.add_argument("--nic-gbits", type=float, metavar="X", help="Gb/s of a NIC (the catalog's usual network)")
    parser.add_argument("--islands", action="store_true", help="groups that NVLinks join are nodes, PCIe between them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="cluster file to write (standard output)")


def run(args: argparse.Namespace) -> int:
    from shardwise.cluster.topology import advice, cluster_of, device_of, explained
    from shardwise.cluster.writing import to_toml

    check_name(args.out)
    topology = _topology(args.table)
    device = device_of(topology, args.device)
    cluster = cluster_of(topology, device, args.nodes, args.nic_gbits, args.islands)
    lines = [*explained(topology), *advice(cluster)]
    if args.json:
        print_json(_as_json(topology, cluster, lines))
    if args.out:
        write_cluster(args.out, cluster, lines)
        if not args.json:
            print("\n".join([*lines, *_links(cluster), f"written: --cluster {shlex.quote(str(args.out))}"]))
    elif not args.json:
        print(to_toml(cluster, lines), end="")
    return 0


def _topology(table: str | None) -> Topology:
    from shardwise.cluster.topology import MOST_TEXT, ask, read

    if table is None:
        return ask()
    if table == "-":
        return read(sys.stdin.read(MOST_TEXT + 1))
    try:
        with Path(table).open(encoding="utf-8", errors="replace") as file:
            return read(file.read(MOST_TEXT + 1))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {table}: {getattr(error, 'strerror', None) or error}") from None


def _links(cluster: Cluster) -> Iterator[str]:
    for name, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter)):
        if name == "inside a node" or cluster.nodes > 1:
            speed = f"{format_bytes(link.bandwidth)}/s" if link.bandwidth else "speed not known"
            yield f"{name}: {speed} a device, one direction ({link.source})"


def _as_json(topology: Topology, cluster: Cluster, lines: list[str]) -> dict[str, object]:
    links = {
        name: {"bandwidth": link.bandwidth, "alpha": link.alpha, "source": link.source}
        for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    return {
        "cluster": str(cluster),
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "paths": dict(topology.between()),
        "islands": [list(island) for island in topology.islands()],
        "nics": list(topology.nics),
        "near_nics": list(topology.near_nics()),
        "explained": lines,
        "order": [int(gpu.removeprefix("GPU")) for gpu in topology.ordered().gpus],
        "by_pair": [list(row) for row in cluster.paths.names] if cluster.paths else None,
        "shared_nics": cluster.nics or None,
        **links,
    }
