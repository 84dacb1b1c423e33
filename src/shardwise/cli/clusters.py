"""The cluster of a command line, or of the environment."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.quantities import bytes_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.files import check_place, write_whole

VARIABLE = "SHARDWISE_CLUSTER"
"""Names the cluster where --cluster is left out."""

NETWORK = arg(
    "links between nodes: 100Gb (of a node), 8x400Gb, NDR, RoCE 400Gb, EFA (the device's usual network)", "TEXT"
)


@dataclass
class WhereOptions(CommandOptions):
    """The cluster."""

    cluster: str | None = arg(f"[NODESx]GPUSxDEVICE, such as 8x8xH100, or a TOML file ({VARIABLE})", "TEXT")


@dataclass
class NetworkOptions(WhereOptions):
    """The cluster, and its network."""

    network: str | None = NETWORK


@dataclass
class HostOptions(WhereOptions):
    """The cluster, and memory of its hosts."""

    host_memory: int | None = arg(
        "memory of each node's host for offloaded state, such as 128GB", "SIZE", read=bytes_of
    )


def usual_cluster(args: Any) -> None:
    """Let the environment name a cluster that was left out."""
    if args.cluster is None:
        args.cluster = os.environ.get(VARIABLE) or None


def cluster_of(args: Any) -> Cluster:
    """The cluster of --cluster, or of the environment, with --network and --host-memory. Raises `UserError`."""
    usual_cluster(args)
    if args.cluster is None:
        raise UserError(f"the cluster is missing: give --cluster, such as 8xH100, or set {VARIABLE}")
    cluster = args.cluster if isinstance(args.cluster, Cluster) else Cluster.parse(args.cluster)
    if getattr(args, "network", None) is not None:
        cluster = cluster.with_network(args.network)
    if getattr(args, "host_memory", None) is None:
        return cluster
    return cluster.with_host_memory(args.host_memory)


def check_name(file: Path | None) -> None:
    """Raise `UserError` for a name that other commands would not read as a file's."""
    if file and file.suffix != ".toml":
        raise UserError(f"--out {file}: a cluster file's name ends in .toml")


def known_cluster(file: Path | None) -> Cluster | None:
    """The cluster in a file; None where there is none yet. Raises `UserError` where it could not be written later."""
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

    write_whole(file, to_toml(cluster, header, remarks))
