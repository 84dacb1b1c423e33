"""The cluster of a command line, or of the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.quantities import bytes_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.cluster import Cluster


VARIABLE = "SHARDWISE_CLUSTER"
"""Names the cluster where --cluster is left out."""


def add_cluster(
    parser: argparse.ArgumentParser, required: bool = False, host: bool = True, network: bool = True
) -> None:
    """Add --cluster and, with `host`, --host-memory, with `network`, --network."""
    parser.add_argument(
        "--cluster",
        metavar="TEXT",
        required=required and not os.environ.get(VARIABLE),
        help=f"[NODESx]GPUSxDEVICE, such as 8x8xH100, or a TOML file ({VARIABLE})",
    )
    if network:
        add_network(parser)
    if not host:
        return
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory of each node's host for offloaded state, such as 128GB"
    )


def add_network(parser: argparse._ActionsContainer, action: Any = "store") -> None:
    """Add --network. action: of argparse."""
    parser.add_argument(
        "--network",
        metavar="TEXT",
        action=action,
        help="links between nodes: 100Gb (of a node), 8x400Gb, NDR, RoCE 400Gb, EFA (the device's usual network)",
    )


def usual_cluster(args: argparse.Namespace) -> None:
    """Let the environment name a cluster that was left out."""
    if args.cluster is None:
        args.cluster = os.environ.get(VARIABLE) or None


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster of --cluster, or of the environment, with --network and --host-memory. Raises `UserError`."""
    usual_cluster(args)
    cluster = Cluster.parse(args.cluster)
    if getattr(args, "network", None) is not None:
        cluster = cluster.with_network(args.network)
    if getattr(args, "host_memory", None) is None:
        return cluster
    return cluster.with_host_memory(bytes_of("--host-memory", args.host_memory))


def check_name(file: Path | None) -> None:
    """Raise `UserError` for a name that other commands would not read as a file's."""
    if file and file.suffix != ".toml":
        raise UserError(f"--out {file}: a cluster file's name ends in .toml")


def known_cluster(file: Path | None) -> Cluster | None:
    """The cluster in a file; None where there is none yet. Raises `UserError` where it could not be written later."""
    from shardwise.cluster import Cluster
    from shardwise.report.files import check_place

    check_name(file)
    if file is None:
        return None
    if not file.parent.is_dir():
        raise UserError(f"--out {file}: there is no directory {file.parent}")
    before = Cluster.parse(str(file)) if file.exists() else None
    check_place(file)
    return before


def write_cluster(
    file: Path, cluster: Cluster, header: Sequence[str], remarks: Mapping[str, str] | None = None
) -> None:
    """Write a cluster file, whole or not at all. remarks: key -> comment behind its value."""
    from shardwise.cluster.writing import to_toml
    from shardwise.report.files import write_whole

    write_whole(file, to_toml(cluster, header, remarks))
