"""The cluster of a command line."""

from __future__ import annotations

import argparse

from shardwise.cli.quantities import bytes_of
from shardwise.cluster import Cluster


def add_cluster(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add --cluster and --host-memory."""
    parser.add_argument(
        "--cluster", metavar="TEXT", required=required, help="[NODESx]GPUSxDEVICE, such as 8x8xH100, or a TOML file"
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory of each node's host for offloaded state, such as 128GB"
    )


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster of --cluster, with --host-memory. Raises `UserError`."""
    cluster = Cluster.parse(args.cluster)
    if args.host_memory is None:
        return cluster
    return cluster.with_host_memory(bytes_of("--host-memory", args.host_memory))
