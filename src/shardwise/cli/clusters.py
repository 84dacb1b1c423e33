"""The cluster of a command line, or of the environment."""

from __future__ import annotations

import argparse
import os
from typing import Any

from shardwise.cli.quantities import bytes_of
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
