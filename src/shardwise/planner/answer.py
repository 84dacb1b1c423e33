"""Answer of a search: the question, the best results, and the number of candidates considered."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from shardwise.cluster import Cluster
from shardwise.layout import Workload
from shardwise.layout.model_size import size_json
from shardwise.model.parameters import Model
from shardwise.predict.cluster_links import links_json
from shardwise.records import dataclass

One = TypeVar("One")


@dataclass(frozen=True, repr=False)
class Answer(Generic[One]):
    """The question of a search and its best answers."""

    model: Model
    cluster: Cluster
    workload: Workload
    engine: str
    """The profile of the software that is assumed."""
    by: str
    """The goal that ranks them."""
    usable: float
    """Bytes of a device that a run may use."""
    ranked: tuple[One, ...]
    """The best, best first."""
    considered: int
    """Legal candidates."""
    fitting: int
    """Candidates that fit; in training, by the lower bound of their bytes."""

    @property
    def winner(self) -> One:
        return self.ranked[0]

    def asked_json(self) -> dict[str, Any]:
        """The question and the numbers of candidates: fields that plans of training and of serving share."""
        return {
            "model": self.model.name,
            **size_json(self.model),
            "cluster": str(self.cluster),
            "cluster_links": links_json(self.cluster),
            "workload": self.workload.to_json(),
            "engine": self.engine,
            "by": self.by,
            "usable_bytes": self.usable,
            "considered": self.considered,
            "fitting": self.fitting,
        }
