"""The cluster of a command line, or of the environment."""

from __future__ import annotations

import argparse
import os

from shardwise.cli.quantities import bytes_of
from shardwise.cluster import Cluster

VARIABLE = "SHARDWISE_CLUSTER"
"""Names the cluster where --cluster is left out."""


def add_cluster(parser: argparse.ArgumentParser, required: bool = False, host: bool = True) -> None:
    """Add --cluster and, with `host`, --host-memory."""
    parser.add_argument(
        "--cluster",
        metavar="TEXT",
        required=required and not os.environ.get(VARIABLE),
        help=f"[NODESx]GPUSxDEVICE, such as 8x8xH100, or a TOML file ({VARIABLE})",
    )
    if not host:
        return
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory of each node's host for offloaded state, such as 128GB"
    )


def usual_cluster(args: argparse.Namespace) -> None:
    """Let the environment name a cluster that was left out."""
    if args.cluster is None:
        args.cluster = os.environ.get(VARIABLE) or None


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster of --cluster, or of the environment, with --host-memory. Raises `UserError`."""
    usual_cluster(args)
    cluster = Cluster.parse(args.cluster)
    if getattr(args, "host_memory", None) is None:
        return cluster
    return cluster.with_host_memory(bytes_of("--host-memory", args.host_memory))
