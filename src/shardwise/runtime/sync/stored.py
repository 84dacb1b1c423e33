"""Training state of `sync=local` in a checkpoint: one value for all replicas, which training continues with.

Replicas have moments of their own, unless outer steps average them. A checkpoint has their mean, and to be the state
that training continues from, whether it is resumed or not, replicas take the mean for theirs when it is saved. Outer
momentum is one for all; what packed outer gradients have lost is stored as the mean of what each replica would add to
its next one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import Checkpoint, needs
from shardwise.checkpoint.names import unwrapped
from shardwise.layout.outer import keeps_momentum, outer_residuals
from shardwise.layout.units import UnitPlan
from shardwise.runtime.residual_state import average_residuals
from shardwise.runtime.zero.trainable import Trainable

MOMENTUM, ERROR = "outer", "outer_error"
"""Kinds of the stored tensors of each parameter: outer momentum, and what packed outer gradients have lost."""


def outer_kinds(plan: UnitPlan) -> dict[str, str]:
    """Kind -> dtype of what is stored for outer steps."""
    kinds = {MOMENTUM: plan.master_dtype} if keeps_momentum(plan) else {}
    return kinds | ({ERROR: "float32"} if any(any(outer_residuals(plan, unit)) for unit in plan.units) else {})


def agree(program: Trainable) -> None:
    """Give all replicas the mean of their moments and of their residuals. Weights they share already: this follows an
    outer step. All ranks call it together."""
    assert program.outer is not None
    if not program.outer.averaged:
        program.outer.average_moments()
    if program.plan.feeds_back:
        average_residuals(program)
    for unit in program.outer.units.values():
        if unit.packed is not None:
            unit.packed.restore(unit.packed.mean_error())


def outer_tensors(program: Trainable) -> dict[str, dict[str, Tensor]]:
    """Kind -> unit -> the values of this rank's interval, after `agree`."""
    units = program.outer.units if program.outer is not None else {}
    return {
        MOMENTUM: {name: unit.momentum for name, unit in units.items() if unit.momentum is not None},
        ERROR: {name: unit.packed.first for name, unit in units.items() if unit.packed is not None},
    }


def restore_outer(program: Trainable, checkpoint: Checkpoint, stored: set[str]) -> None:
    """Set outer state from a checkpoint whose weights are in place; what it has none of starts at zero. stored: the
    kinds that it has."""
    if program.outer is None:
        return
    for unit in program.outer.units.values():
        if unit.momentum is not None:
            unit.momentum.zero_()
        if unit.packed is not None:
            unit.packed.restore(None)
    for kind, tensors in outer_tensors(program).items():
        for held in needs(program.plan.subject, program.plan.layout, dist.get_rank()) if kind in stored else ():
            if (target := tensors.get(held.unit)) is not None:
                start = program.engine.units[held.unit].start
                dtype = outer_kinds(program.plan)[kind]
                values = checkpoint.read(f"{kind}/{unwrapped(held.name)}", held.local, dtype)
                target[held.start - start : held.stop - start].copy_(torch.from_numpy(values))
