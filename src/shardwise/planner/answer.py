"""What every search answers: what was asked, what it found, and how much of what there is that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shardwise.cluster import Cluster
from shardwise.layout import Workload
from shardwise.model import ModelConfig

One = TypeVar("One")


@dataclass(frozen=True)
class Answer(Generic[One]):
    """engine: the profile of the software that is assumed. by: what the best is. usable: bytes of a device. ranked: the
    best, best first. considered: legal candidates, fitting: of them those that fit."""

    model: ModelConfig
    cluster: Cluster
    workload: Workload
    engine: str
    by: str
    usable: float
    ranked: tuple[One, ...]
    considered: int
    fitting: int

    @property
    def winner(self) -> One:
        return self.ranked[0]

    def asked_json(self) -> dict[str, Any]:
        """What was asked, and of how many; the fields that plans of training and of serving have alike."""
        return {
            "model": self.model.name,
            "cluster": str(self.cluster),
            "workload": self.workload.to_json(),
            "engine": self.engine,
            "by": self.by,
            "usable_bytes": self.usable,
            "considered": self.considered,
            "fitting": self.fitting,
        }
