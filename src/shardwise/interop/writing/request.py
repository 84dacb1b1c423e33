"""`WriteRequest`, what is to be written, and `EngineFile`, what has been."""

from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.interop.reading.settings import ServerSettings
from shardwise.layout import Layout, Workload
from shardwise.model.parameters import Model

NODE = 8
"""Ranks per node where no cluster says it."""


@dataclass(frozen=True)
class WriteRequest:
    """A layout of a model for an engine."""

    model: Model
    layout: Layout
    workload: Workload = field(default_factory=Workload)
    """Sequence length and batch of a training step; empty for a server."""
    served: ServerSettings | None = None
    """Numbers of a server; None for training."""
    cluster: Cluster | None = None
    """Ranks per node; None: 8."""
    source: str = ""
    """The model as the engine loads it: a folder, a hub's name, or the catalog's."""
    version: str = ""
    """Version of the engine; empty for its newest that is known."""
    launched: bool = False
    """Whether a job says which nodes there are."""
    notes: tuple[str, ...] = ()
    """Comments on numbers that were not given."""

    @property
    def stored(self) -> str:
        """The precision of a quantized model's files, which an engine reads from their configuration; else empty."""
        return self.model.counted.stored if self.model.counted else ""

    @property
    def stored_cache(self) -> str:
        """torch's name of the type of keys and values that such files name; empty where they name none."""
        return self.model.counted.cache_type if self.model.counted else ""


@dataclass(frozen=True)
class EngineFile(Json):
    """A configuration that has been written."""

    json_keys = "engine version layout ranks=layout.ranks file text comments"

    engine: str
    version: str
    layout: Layout
    file: str
    text: str
    comments: tuple[str, ...] = ()


def nodes_for(layout: Layout, cluster: Cluster | None) -> tuple[int, int]:
    """(nodes, ranks per node) of a layout. Raises `UserError` where ranks do not fill nodes."""
    ranks = layout.ranks
    node = cluster.devices_per_node if cluster else NODE
    if cluster and ranks > cluster.devices:
        raise UserError(f"layout {layout} needs {ranks} ranks, but {cluster} has fewer")
    if ranks <= node:
        return 1, ranks
    if ranks % node:
        raise UserError(f"{ranks} ranks do not fill nodes of {node}: say with --cluster what a node has")
    return ranks // node, node
