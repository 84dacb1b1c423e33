"""Hardware: devices, the links between them, clusters. Imports nothing but the standard library."""

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import KINDS, Device, Host, Link, Speed

__all__ = ["KINDS", "Cluster", "Device", "Host", "Link", "Speed"]
