"""Job of the processes that run ranks' shares of a step, and their results. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from shardwise.codec import Json
from shardwise.runtime.job.rank import RankJob


@dataclass(frozen=True)
class ShareJob(RankJob):
    """Settings of the shares' job file."""

    model: dict[str, Any]
    layout: str
    workload: dict[str, Any]
    backend: str
    """Backend of the real run's collectives (`layout.units.Backend`)."""
    device: str
    """Name of torch: "cpu" or "cuda"."""
    ranks: list[int]
    """Rank of the layout that each process plays."""
    sizes: list[float]
    """Bytes at which prices are given."""
    prices: list[tuple[str, list[int], list[float]]]
    """(operation, ranks of the group, seconds at each size)."""
    message: tuple[float, float]
    """Seconds of a message between two stages, and of the tied table's gradients."""
    background: bool
    """Whether the backend's collectives continue while a rank computes."""
    warm: int
    """Warm-up steps."""
    repeats: int
    """Steps that count."""


@dataclass(frozen=True)
class ShareWait:
    """One wait for a collective. start, stop: seconds since the step began."""

    op: str
    axes: str
    ranks: tuple[int, ...]
    """Ranks of the group."""
    predicted: float
    """Seconds that the collective lasts, hidden or not."""
    start: float
    stop: float


@dataclass(frozen=True)
class ShareStep(Json):
    """One step of one share."""

    seconds: float
    parts: dict[str, float]
    """Seconds of arithmetic by part of the step."""
    waits: tuple[ShareWait, ...]
    """Waits for collectives, in order."""
    began: float
    """Seconds after which the share could begin a pipeline's schedule; 0 without one."""
    spans: tuple[tuple[float, float], ...]
    """(start, end) of each computation of a pipeline's schedule; without one, empty."""


@dataclass(frozen=True)
class Share(Json):
    """The measured steps of one rank's share."""

    rank: int
    steps: tuple[ShareStep, ...]
    ledger: tuple[tuple[Any, ...], ...]
    """Rows of the ledger of its last step."""
