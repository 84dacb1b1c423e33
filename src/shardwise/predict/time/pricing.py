"""`Pricing`: what is worth keeping between calls that price on one cluster."""

from __future__ import annotations

from copy import copy

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.predict.time.constants import Constants, constants
from shardwise.predict.time.host_rates import host_share
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.network import Collectives


class Pricing:
    """The kernels of a device, the collectives of a cluster, and a rank's share of its host. layout: whose algorithm,
    if it names one, the collectives run. Raises `UserError` for a device without constants."""

    def __init__(self, cluster: Cluster, known: Constants | None = None, layout: Layout | None = None) -> None:
        self.cluster = cluster
        self.constants = known or constants(cluster.device)
        self.kernels = Kernels(self.constants)
        self.collectives = Collectives(cluster, self.constants, layout)
        self.host = host_share(cluster)

    def unhidden(self) -> Pricing:
        """The same without what computation hides of collectives."""
        one = copy(self)
        one.constants = self.constants.with_values(tensor_hidden=0.0, tensor_piped=0.0)
        return one
