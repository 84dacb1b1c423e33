"""Residuals of error feedback as training state: a stored tensor per parameter, independent of the layout.

What counts is the sum of an element's residuals over the ranks that add up its gradient. A save folds them to it; a
restore puts it into one of these ranks, whichever layout reads it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import Checkpoint, needs
from shardwise.checkpoint.names import unwrapped
from shardwise.layout.axes import PP, REPLICA
from shardwise.runtime.pipeline.program import StepProgram

RESIDUAL = "residual"
"""Kind of the stored tensor of each parameter where errors of packed gradients are fed back."""


def folded_residuals(program: StepProgram) -> dict[str, Tensor]:
    """Unit -> the sum of all ranks' residuals over this rank's interval, in fp32. All ranks call this together."""
    plan, comms = program.plan, program.comms
    folded = {}
    for name, flat in program.engine.units.items():
        own = torch.zeros(flat.unit.shard_numel, device=flat.whole.device)
        folded[name] = own if flat.residuals is None else flat.residuals.folded(comms)
    actions = plan.pipeline.actions if plan.pipeline.schedule else ()
    peer = next((action.peer for action in actions if action.kind == "SUM_TIED"), None)
    if peer is not None:  # both ends of the pipeline add up the table's gradient
        own, theirs = folded["tied"], torch.empty_like(folded["tied"])
        arriving, leaving = comms.receive(theirs, PP, peer, "tied"), comms.send(own, PP, peer, "tied")
        arriving.wait()
        leaving.wait()
        own.add_(theirs)
    return folded


def restore_residuals(program: StepProgram, checkpoint: Checkpoint | None) -> None:
    """Set this rank's residuals: an element's stored sum on one of the ranks that add up its gradient, 0 on the others.
    checkpoint: None where none is stored."""
    plan, targets = program.plan, _targets(program)
    for held in needs(plan.subject, plan.layout, dist.get_rank()) if checkpoint else ():
        if (target := targets.get(held.unit)) is not None:
            assert checkpoint is not None
            start = program.engine.units[held.unit].start
            program.comms.pulse.work(f"the reading of {held.name}")
            values = checkpoint.read(f"{RESIDUAL}/{unwrapped(held.name)}", held.local, "float32")
            target[held.start - start : held.stop - start].copy_(torch.from_numpy(values))


def average_residuals(program: StepProgram) -> None:
    """Give every replica that trains apart from the others the mean of all their residuals. All ranks call this
    together."""
    folded, comms = folded_residuals(program), program.comms
    targets = _targets(program)
    for name, own in folded.items():
        comms.all_reduce(own, REPLICA, name)
        if (target := targets.get(name)) is not None:
            target.copy_(own.div_(comms.size(REPLICA)))


def _targets(program: StepProgram) -> dict[str, Tensor | None]:
    """Drop all residuals; unit -> the memory for those of this rank's interval, None where another rank feeds them
    back."""
    targets = {
        name: None if flat.residuals is None else flat.residuals.restore(program.comms)
        for name, flat in program.engine.units.items()
    }
    if program.plan.local.copies_table:
        targets.pop("tied")  # its other end has it
    return targets
