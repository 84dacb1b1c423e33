"""One step of a user's module on fake tensors and a fake process group: the runtime itself, without values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.units import UnitPlan
from shardwise.runtime.fake_group import fake_comms
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.describe import DescribedModule, call, run_order
from shardwise.runtime.module.initial import place_buffers
from shardwise.runtime.module.inputs import tensors_in, with_rows
from shardwise.runtime.module.program import LossFunction, ModuleProgram
from shardwise.runtime.module.recorder import FakeStepRecorder, RawStep
from shardwise.runtime.module.stage_recorder import RawStages, StageRecorder
from shardwise.runtime.transport.comms import Comms

MICRO_BATCHES = 2
"""Micro-batches of a traced step: the first one, and one that adds its gradients to what is there."""


def fake_copy(module: nn.Module, fake: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy whose parameters and buffers are fake; shared ones stay shared. No weight is copied. dtype: of those that
    are floating-point numbers; None for their own."""
    memo: dict[int, Any] = {}
    with fake:
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(_blank(parameter, dtype), parameter.requires_grad)
        for buffer in module.buffers():
            memo.setdefault(id(buffer), _blank(buffer, dtype))
    return copy.deepcopy(module, memo)


def _blank(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype if dtype and x.is_floating_point() else x.dtype)


def fake_order(
    module: nn.Module, fake: FakeTensorMode, blocks: Sequence[str], example: Any, rows: int,
    loss: LossFunction | None,
) -> list[str]:  # fmt: skip
    """As of `run_order`, without values. As registered where the module does not run so as it is, such as one whose
    experts are not split yet."""
    with fake:
        batch = with_rows(example, rows)
    try:
        blank = fake_copy(module, fake)
        with fake:
            return run_order(blank, blocks, batch, loss)
    except Exception:
        return list(blocks)


def fake_step(
    module: nn.Module, described: DescribedModule, layout: Layout, batches: Sequence[Any], loss: LossFunction,
    crowd: int = 1,
) -> tuple[UnitPlan, RawStep]:  # fmt: skip
    """Record the forward and backward passes of a module that is taken over; its parameters are fake, and this is
    called on fake tensors, inside `fake_ranks`. crowd: rows that experts here receive for each one that is sent. Raises
    `UserError` for a loss with more than one pass."""
    program = _program_of(module, described, layout, len(batches))
    for form in (form for forms in program.experts.values() for form in forms):
        form.exchange.crowd = crowd
    batches = [program.of_rows(batch) for batch in batches]
    with FakeStepRecorder(program) as recorder:
        program.gradients(loss, batches)
    if program.engine.passes > 1:
        raise UserError("trace: the loss calls the module twice with gradients, and a prediction has one pass")
    recorder.raw.inputs = recorder.followed(tensors_in(batches[0]))
    return program.plan, recorder.raw


def fake_stages(
    module: nn.Module, described: DescribedModule, layout: Layout, batches: Sequence[Any], loss: LossFunction
) -> RawStages:
    """Record the passes of a module that is described as a chain, as one stage; else as of `fake_step`."""
    program = _program_of(module, described, layout, len(batches))
    with StageRecorder(program) as recorder:
        recorder.record(loss, [program.of_rows(batch) for batch in batches])
    return recorder.raw


def _program_of(module: nn.Module, described: DescribedModule, layout: Layout, micro_batches: int) -> ModuleProgram:
    units = unit_plan(described.blueprint, layout, Workload.of_rows(layout, micro_batches))
    return fake_program(module, described, units, fake_comms(units))


def fake_program(module: nn.Module, described: DescribedModule, plan: UnitPlan, comms: Comms) -> ModuleProgram:
    """The program of a rank, of a module with fake parameters that is taken over."""
    values, device = (lambda parameter, index: index.double()), torch.device("cpu")
    place_buffers(module, plan.layout, values, device)
    return ModuleProgram(module, described, plan, comms, OptimizerConfig(), values, device)


def default_loss(run: Callable[..., Any], batch: Any) -> tuple[Tensor, int]:
    """The sum of a result's tensors; its `loss` where it has one. Raises `UserError` where none has a gradient."""
    out = call(run, batch)
    if isinstance(loss := getattr(out, "loss", None), Tensor):
        return loss, 1
    used = [x for x in tensors_in(out) if x.requires_grad]
    if not used:
        raise UserError("no output depends on the parameters, so there is no gradient: give loss=")
    total = used[0].sum()
    for x in used[1:]:
        total = total + x.sum()
    return total, 1
