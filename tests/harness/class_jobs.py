"""What ranks run for the tests of models by their classes of transformers, and the same training on one device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.module_jobs import LR, SETTINGS, adamw
from shardwise.layout import Layout
from shardwise.layout.axes import DATA
from shardwise.report.step_report import StepReport
from shardwise.runtime.module.class_model import ClassModel
from shardwise.runtime.module.class_run import token_loss
from shardwise.runtime.module.comparison import RankDifference, compare_split
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.initial import MetaValues
from shardwise.runtime.module.split import split
from shardwise.runtime.module.verify import VerifyRequest

ROWS, SEQ, STEPS = 4, 16, 2


@dataclass
class ClassOutcome:
    losses: list[float]
    norms: list[float]
    difference: RankDifference | None = None
    report: StepReport | None = None


def batch(model: ClassModel, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, next tokens), [ROWS, SEQ] each."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocab, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(-1, 1)


def plain(model: ClassModel) -> nn.Module:
    """The class in float64, with the values that its split has."""
    values, module = MetaValues(model.blank()), model()
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        parameter.data = values.made(owner).get_parameter(leaf).detach().double()
    use_exact_products(module)
    return module.double()


def one_device(model: ClassModel) -> ClassOutcome:
    module, outcome = plain(model), ClassOutcome([], [])
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        loss, count = token_loss(module, batch(model, step))
        optimizer.zero_grad()
        (loss / count).backward()  # type: ignore[no-untyped-call]
        used = [p for p in module.parameters() if p.grad is not None]
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(used, SETTINGS.clip)))
        optimizer.step()
        outcome.losses.append(float(loss.detach() / count))
    return outcome


def train_class(rank: int, payload: tuple[ClassModel, str, VerifyRequest]) -> ClassOutcome:
    """Verify, then train as `one_device` does. The last step is measured."""
    model, layout, request = payload
    difference, parsed = compare_split(request), Layout.parse(f"{layout},precision=fp64")
    parts = model.split(parsed, SEQ)
    module = split(model.blank(), parsed, parts.plan, parts=parts.parts, optimizer=SETTINGS)
    module.module.train()
    comms, outcome = module.program.comms, ClassOutcome([], [], difference)
    for step in range(STEPS):
        rows: Any = tuple(x.chunk(comms.size(DATA))[comms.index(DATA)] for x in batch(model, step))
        result = module.train_step(token_loss, rows, lr=LR, measure=step == STEPS - 1)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.report = module.report()
    return outcome
