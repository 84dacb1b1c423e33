"""`StepShape`: the numbers of a layout and a workload that the time of a training step depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

import numpy as np

from shardwise.arrays import Num
from shardwise.layout import Layout, Workload
from shardwise.layout.keys import APART, KEYS
from shardwise.layout.optimizers import DEFAULT, widens_gradients
from shardwise.records import dataclass


def held_of(stages: tuple[int, ...], pp: int) -> tuple[int, int]:
    """Layers of the pipeline rank that has the most of all but the last, and of the last one."""
    *others, last = (sum(stages[rank::pp]) for rank in range(pp))
    return max(others, default=last), last


CUTS_OF_STAGES = ("pp", "virtual")
"""Keys of a split that the number of blocks of a stage depends on."""


@dataclass(frozen=True)
class StepShape:
    """Numbers of a layout and a workload that a step's time depends on. seq: tokens of a sequence; micro_batches: of
    each data-parallel rank; shard: ranks that ZeRO shards over; hpz: ranks over which a second copy is cut, or 0; qwz,
    qgz: weights and gradients go packed, in all splits of a call; feedback: with the errors of packed gradients;
    schedule: the pipeline's, of `SCHEDULES`; held: as of `layers_held`, None for even stages; dtype: of the matrix
    products. offload, offload_params: the homes of optimizer state and of parameters, as in a layout, which may be
    arrays, as schedule may; offloaded: fraction of the optimizer state that is there. saved_bytes: what a block saves
    in a micro-batch and copies to the host and back; wide_gradients: accumulated in fp32 even of one micro-batch."""

    seq: int
    micro: Num = 1
    micro_batches: Num = 1
    tp: Num = 1
    pp: Num = 1
    dp: Num = 1
    cp: Num = 1
    ep: Num = 1
    virtual: Num = 1
    shard: Num = 1
    zero: Num = 0
    hpz: Num = 0
    qwz: bool = False
    qgz: bool = False
    feedback: bool = False
    sp: Any = False
    tpkind: str = "megatron"
    cpkind: str = "ring"
    recompute: Any = "none"
    offload: Any = "none"
    offloaded: Num = 0.0
    offload_params: Any = "none"
    saved_bytes: Num = 0.0
    wide_gradients: bool = False
    schedule: Any = "1f1b"
    held: tuple[Num, Num] | None = None
    dtype: str = "bfloat16"
    optimizer: str = DEFAULT
    """One of `OPTIMIZERS`."""
    apart: Mapping[str, Any] = field(default_factory=dict)
    """Other keys for whose values a module is traced apart."""

    @property
    def width(self) -> float:
        """Bytes of an element of weights, activations and messages: 2 under narrow types, too."""
        return 4.0 if self.dtype == "float32" else 2.0

    @property
    def copied(self) -> Num:
        """Whether later gathers of a step read a second copy of parameters, cut over `hpz` ranks."""
        return np.asarray(self.hpz) > 0

    @property
    def near(self) -> Num:
        """Ranks over which a second copy is cut; 1 without."""
        return np.where(self.copied, self.hpz, 1)

    @property
    def gathers_once(self) -> Num:
        """Whether all micro-batches gather what the first one has fetched: a second copy, or packed weights."""
        return np.asarray(self.copied) | self.qwz

    @property
    def gradient_width(self) -> Num:
        """Bytes of an accumulated gradient (`Dtypes.gradients`)."""
        return np.where(widens_gradients(self.wide_gradients, np.asarray(self.micro_batches)), 4.0, self.width)

    @property
    def wire_width(self) -> Num:
        """Bytes of a gradient as it is reduced (`Dtypes.wire`)."""
        return np.where(np.asarray(self.zero) >= 2, self.width, self.gradient_width)

    def layers_held(self, layers: int) -> tuple[Num, Num]:
        """Layers of the pipeline rank that has the most, and of the last one, which has the head (`StageLayers`)."""
        if self.held is not None:
            return self.held
        return np.ceil(layers / np.asarray(self.pp)), layers // np.asarray(self.pp)

    @property
    def spreads_experts(self) -> Num:
        """Whether experts are on several ranks."""
        return np.asarray(self.ep) > 1

    @property
    def expert_tp(self) -> Num:
        """Ranks that share the width of one expert, as a layout has it by default (`Layout.expert_tp`)."""
        return np.where(np.asarray(self.ep) == 1, self.tp, 1)

    def stage_blocks(self, layers: int) -> Num:
        """Blocks of a stage of the rank that has the most."""
        return self.layers_held(layers)[0] / self.virtual

    def routing_ranks(self, everywhere: bool) -> Num:
        """Ranks that route different tokens of the same sequences, or different tokens at all (`layout/experts.py`)."""
        ranks = self.cp * self.tp // self.expert_tp
        return ranks * self.dp if everywhere else ranks

    @property
    def stage_ranks(self) -> Num:
        """Ranks of a stage of the pipeline."""
        return self.dp * self.cp * self.tp

    @property
    def expert_apart(self) -> Num:
        """Distance of ranks that hold the same of the same experts: expert ranks are taken of a stage's dp x cp x tp
        ranks (Megatron-Core's folded mesh: Liu et al. 2025, arXiv 2504.14960)."""
        return self.ep * self.expert_tp

    @property
    def expert_data(self) -> Num:
        """Ranks that hold the same of the same experts."""
        return np.maximum(self.stage_ranks // self.expert_apart, 1)

    @property
    def expert_shard(self) -> Num:
        """Ranks that ZeRO shards experts over: all that hold the same (`UnitPlan._experts_unit`)."""
        return np.where(np.asarray(self.zero) > 0, self.expert_data, 1)

    @classmethod
    def of(cls, layout: Layout, workload: Workload, dtype: str | None = None) -> StepShape:
        """The split that a layout makes of a training workload. Raises `UserError` where the batch does not divide."""
        keys = {each.name: getattr(layout, each.name) for each in fields(cls) if each.name in KEYS}
        keys |= {"dp": layout.dp // layout.independent, "shard": layout.shard_ranks, "zero": layout.stage}
        return cls(
            **keys | {"offload": layout.offload_home},
            seq=workload.seq,
            held=held_of(layout.stages, layout.pp) if layout.stages else None,
            micro_batches=workload.micro_batches(layout),
            offloaded=layout.offload_fraction,
            wide_gradients=layout.grads == "fp32",
            dtype=dtype or layout.dtype,
            optimizer=workload.optimizer,
            apart={name: getattr(layout, name) for name in APART if name not in keys},
        )
