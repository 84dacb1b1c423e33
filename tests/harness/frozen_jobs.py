"""Training of a user's module some of whose parameters are frozen, on ranks and in plain PyTorch."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.jobs import _errors
from harness.module_jobs import LR, ROWS, SETTINGS, STEPS, adamw
from harness.own_modules import OWN, PLANS, own_batch, summed_loss
from shardwise.layout import Layout
from shardwise.layout.axes import DATA
from shardwise.model.adapters import SCALE
from shardwise.model.lora import Lora
from shardwise.ops.products import quantise
from shardwise.report.step_report import LedgerRow
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


@dataclass
class FrozenOutcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    """Parameter -> squared distance of its final values to one device's, over the rank's interval."""
    ledger: tuple[LedgerRow, ...] = ()
    optimizer: int = 0
    """Elements of master weights on the rank."""


def build(job: FrozenTraining) -> nn.Module:
    torch.manual_seed(0)
    module = OWN[job.name]()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(job.frozen or ("none",)))
    return module


def one_device(job: FrozenTraining) -> tuple[FrozenOutcome, dict[str, Tensor]]:
    module, outcome = build(job), FrozenOutcome()
    if job.lora:
        add_adapters(module, Lora.parse(job.lora), find_blocks(module, None))
    module.double()
    narrow = round_to_int8(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = adamw(trained)
    for step in range(STEPS):
        loss, count = summed_loss(module, own_batch(job.name, ROWS, step))
        optimizer.zero_grad()
        (loss / count).backward()
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, SETTINGS.clip)))
        optimizer.step()
        outcome.losses.append(float(loss.detach() / count))
    return outcome, {name: p.detach() for name, p in module.named_parameters()} | narrow


def round_to_int8(module: nn.Module) -> dict[str, Tensor]:
    """Set weights beside scales to what 8 bits give, as plain numbers. Returns their int8 numbers and scales."""
    stored: dict[str, Tensor] = {}
    for name, child in module.named_modules():
        if SCALE in child._parameters:
            numbers, scales = quantise(child.weight.detach())
            child.weight.data = numbers.double() * scales[:, None]
            stored |= {f"{name}.weight": numbers, f"{name}.{SCALE}": scales}
    return stored


def train_frozen(rank: int, payload: tuple[FrozenTraining, dict[str, Tensor]]) -> FrozenOutcome:
    """Train as `one_device` does. The last step is measured."""
    job, reference = payload
    layout = Layout.parse(f"{job.layout},precision=fp64")
    plan = PLANS[job.name] if layout.tp > 1 else None
    module = split(build(job), layout, plan, lora=job.lora or None, optimizer=SETTINGS)
    outcome, comms, engine = FrozenOutcome(), module.program.comms, module.program.engine
    for step in range(STEPS):
        rows = tuple(part.chunk(comms.size(DATA))[comms.index(DATA)] for part in own_batch(job.name, ROWS, step))
        loss, norm, _ = module.train_step(summed_loss, rows, lr=LR, measure=step == STEPS - 1)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    for state in module.program.optimizer.states:
        outcome.errors |= _errors(state.flat, state.master, reference)
        outcome.optimizer += len(state.master)
    for flat in engine.units.values():
        if flat.unit.frozen:
            outcome.errors |= _errors(flat, flat.interval, reference)
    outcome.ledger = comms.ledger()
    if job.folder:
        module.save(Path(job.folder))
    dist.barrier()
    comms.close()
    return outcome
