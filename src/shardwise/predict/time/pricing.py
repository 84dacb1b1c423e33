"""`Pricing`: what is worth keeping between calls that price on one cluster."""

from __future__ import annotations

from copy import copy

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.predict.time.constants import Constants, constants
from shardwise.predict.time.host_rates import host_share
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.network import MEASURED, Collectives


class Pricing:
    """The kernels of a device, the collectives of a cluster, and a rank's share of its host. layout: whose algorithm,
    if it names one, the collectives run. Raises `UserError` for a device without constants."""

    def __init__(self, cluster: Cluster, known: Constants | None = None, layout: Layout | None = None) -> None:
        self.cluster = cluster
        self.constants = known or constants(cluster.device)
        self.kernels = Kernels(self.constants)
        self.collectives = Collectives(cluster, self.constants, layout)
        self.host = host_share(cluster)
        self.packs = True
        """Whether passes over memory that pack numbers for a collective, and unpack them, are counted."""

    def unhidden(self) -> Pricing:
        """The same for collectives alone, none of them hidden by computation."""
        one = copy(self)
        one.packs = False
        one.constants = self.constants.with_values(tensor_hidden=0.0, tensor_piped=0.0)
        return one


def collective_seconds(name: str, nbytes: int, ranks: int, cluster: Cluster) -> dict[str, float]:
    """Seconds of one collective on a full tensor of `nbytes` bytes, as every command and view prices it:
    `library_seconds` and, where that is faster, `reading_peers_seconds` of a kernel that reads the peers' memory. Empty
    for a collective or a device without measurements. name: all-reduce, all-gather, ..."""
    op = name.replace("-", "_")
    try:
        price = Pricing(cluster).collectives.seconds
    except UserError:
        return {}
    if op not in MEASURED or ranks == 1:
        return {}
    library, read = (float(price(op, nbytes, ranks, reads_peers=reads)) for reads in (False, True))
    return {"library_seconds": library} | ({"reading_peers_seconds": read} if read < library else {})
