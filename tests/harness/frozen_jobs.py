"""Training of a user's module some of whose parameters are frozen, on ranks and in plain PyTorch."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import module_jobs
from harness.jobs import _errors
from harness.module_jobs import LR, SETTINGS, STEPS, OwnOutcome, distances, end, rows_of
from harness.own_modules import OWN, PLANS, summed_loss
from shardwise.decoder.bases import quantized
from shardwise.layout import Layout
from shardwise.model.adapters import SCALE
from shardwise.model.lora import Lora
from shardwise.runtime.module.adapters import add_adapters
from shardwise.runtime.module.describe import find_blocks
from shardwise.runtime.module.split import split


@dataclass(frozen=True)
class FrozenTraining:
    """frozen: beginnings of the names of parameters. lora: adapters in place of that."""

    name: str
    layout: str
    frozen: tuple[str, ...] = ()
    lora: str = ""
    folder: str = ""
    """Folder for a checkpoint at the end."""


def build(job: FrozenTraining) -> nn.Module:
    torch.manual_seed(0)
    module = OWN[job.name]()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(job.frozen or ("none",)))
    return module


def one_device(job: FrozenTraining) -> tuple[OwnOutcome, dict[str, Tensor]]:
    module = build(job)
    if job.lora:
        add_adapters(module, Lora.parse(job.lora), find_blocks(module, None))
    module.double()
    narrow = round_to_base(module)
    outcome, final = module_jobs.one_device(module, job.name)
    return outcome, final | narrow


def round_to_base(module: nn.Module) -> dict[str, Tensor]:
    """Set weights beside scales to what their base gives, as plain numbers. Returns their stored numbers and scales."""
    stored: dict[str, Tensor] = {}
    for name, child in module.named_modules():
        if SCALE in child._parameters:
            weight = child.weight.detach()
            numbers, scales = quantized(child.frozen_base.name, [weight], weight.dtype)
            child.weight.data = child.frozen_base.dense(numbers, scales, weight.dtype)
            stored |= {f"{name}.weight": numbers, f"{name}.{SCALE}": scales}
    return stored


def train_frozen(rank: int, payload: tuple[FrozenTraining, dict[str, Tensor]]) -> OwnOutcome:
    """Train as `one_device` does. The last step is measured."""
    job, reference = payload
    layout = Layout.parse(f"{job.layout},precision=fp64")
    plan = PLANS[job.name] if layout.tp > 1 else None
    module = split(build(job), layout, plan, lora=job.lora or None, optimizer=SETTINGS)
    outcome, comms, engine = OwnOutcome(), module.program.comms, module.program.engine
    for step in range(STEPS):
        rows = rows_of(comms, job.name, step)
        loss, norm, _ = module.train_step(summed_loss, rows, lr=LR, measure=step == STEPS - 1)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    outcome.errors = distances(module, reference)
    outcome.optimizer = sum(len(state.master) for state in module.program.optimizer.states)
    for flat in engine.units.values():
        if flat.unit.frozen:
            outcome.errors |= _errors(flat, flat.interval, reference)
    outcome.ledger = comms.ledger()
    if job.folder:
        module.save(Path(job.folder))
    end(module)
    return outcome
