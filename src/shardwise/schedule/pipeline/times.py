"""`Times`: what the actions of a pipeline take, in seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import add

from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.plan import PipelineSchedule

MOST_SECONDS = 1e9
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "": 1.0}


@dataclass(frozen=True)
class Times:
    """Seconds for one micro-batch, by stage: forward, input (gradient), weight (gradient).

    together: what an overlapped F&B takes of the sum of its two parts; 1 hides nothing. hop: one message, α + β times
    its bytes. overlap: messages go on beside computations; else the sender stands still for `hop`. gather, reduce:
    parameters and gradients of a stage, by stage. tied: the exchange of the tied table's gradients.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    together: float = 1
    hop: float = 0
    overlap: bool = True
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    tied: float = 0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("gather", "reduce"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * stages)
        assert all(len(getattr(self, name)) == stages for name in ("input", "weight", "gather", "reduce"))

    @classmethod
    def none(cls, stages: int) -> Times:
        return cls((0,) * stages, (0,) * stages, (0,) * stages)

    @classmethod
    def equal(cls, stages: int, forward: float, input: float, weight: float) -> Times:
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages)

    @classmethod
    def shared(
        cls, schedule: PipelineSchedule, forward: float, input: float, weight: float, shares: Sequence[float] = ()
    ) -> Times:
        """From what a *rank* takes for one micro-batch if the model is split evenly: a stage takes its part of it.

        So schedules with one and with several chunks a rank are compared on the same model. shares: stage -> its part
        of the model, adding up to 1 (see `StageRunner.shares`); left out, equal parts.
        """
        parts = [share * schedule.ranks for share in shares] or [schedule.ranks / schedule.stages] * schedule.stages
        by_stage = (tuple(part * whole for part in parts) for whole in (forward, input, weight))
        return cls(*by_stage)  # type: ignore[arg-type]

    def of(self, action: Action) -> float:
        """Seconds of a computation."""
        if action.parts:
            return self.together * sum(map(self.of, action.parts))
        return self.by_kind[action.kind][action.stage]

    @cached_property
    def by_kind(self) -> Mapping[str, tuple[float, ...]]:
        """Seconds of each kind of computation but OVERLAP_F_B, by stage."""
        both = tuple(map(add, self.input, self.weight))
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": both}

    def with_hop(self, alpha: float, beta: float = 0, nbytes: float = 0, overlap: bool = True) -> Times:
        """Times with messages of `nbytes` bytes that take alpha + beta x nbytes seconds."""
        return replace(self, hop=alpha + beta * nbytes, overlap=overlap)


def seconds_of(text: str) -> float:
    """A time such as 20ms, 1.5s, 300us; a bare number is seconds. Raises `UserError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-zµ]*)\s*", text)
    if not match or match[2] not in UNITS:
        raise UserError(f"{text!r} is no time; give one such as 20ms, 1.5s or 300us")
    if (seconds := float(match[1]) * UNITS[match[2]]) > MOST_SECONDS:
        raise UserError(f"{text!r} is too long a time; give at most {MOST_SECONDS:g} seconds")
    return seconds


def parse_times(text: str) -> dict[str, float]:
    """F, I and W of a text such as F=20ms,I=20ms,W=20ms, or F=1,B=2, where I and W are half of B each.

    Raises `UserError` for other names, and where one is missing.
    """
    found: dict[str, float] = {}
    for word in text.split(","):
        name, given, value = word.partition("=")
        name = name.strip().upper()
        if name not in "FIWB" or len(name) != 1 or not given or name in found:
            raise UserError(f"times {text!r}: give F=20ms,I=20ms,W=20ms, or F=20ms,B=40ms")
        found[name] = seconds_of(value)
    if found.keys() == {"F", "B"}:
        return {"F": found["F"], "I": found["B"] / 2, "W": found["B"] / 2}
    if found.keys() != {"F", "I", "W"}:
        raise UserError(f"times {text!r}: give F=20ms,I=20ms,W=20ms, or F=20ms,B=40ms")
    return found
