"""`Trainable`: what reports and checkpoints need of a program, whether it trains a decoder or a user's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.layout.units import UnitPlan
from shardwise.ops.gradients import WeightGradient
from shardwise.report.step_report import Bytes
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.engine import Engine

if TYPE_CHECKING:
    from shardwise.runtime.expert.exchange import ExpertLoads
    from shardwise.runtime.offload.activations import OffloadedActivations
    from shardwise.runtime.sync.outer_step import OuterStep


class Trainable(Protocol):
    """A module bound to its buffers, with its optimizer."""

    plan: UnitPlan
    comms: Comms
    device: torch.device
    engine: Engine
    optimizer: Any
    """An `Optimizer`, or what acts as one."""
    outer: OuterStep | None
    offloaded: OffloadedActivations | None
    expert_loads: ExpertLoads
    after_compute: Callable[[list[WeightGradient]], object]
    """As of `StageRunner`."""

    @property
    def bytes_on_disk(self) -> Bytes: ...
