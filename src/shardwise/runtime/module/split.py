"""`split`: any `nn.Module`, under data and tensor parallelism with every ZeRO stage, with its usual forward."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint import find
from shardwise.errors import DivergedError, UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.context import cuts_sequences
from shardwise.layout.modules import check_described, check_module_layout
from shardwise.model.blueprint import Blueprint
from shardwise.model.lora import Lora
from shardwise.report.compare import ReportComparison, compare
from shardwise.report.step_report import StepReport, merge_roles
from shardwise.runtime.checkpointing import Saver
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.module.adapters import add_adapters
from shardwise.runtime.module.buffers import BuffersBefore, restore_module, written
from shardwise.runtime.module.chain import find_chain
from shardwise.runtime.module.context import check_tokens, length_of
from shardwise.runtime.module.describe import describe, find_blocks, run_order
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.failures import Failures
from shardwise.runtime.module.initial import MetaValues, is_meta, place_buffers, values_in
from shardwise.runtime.module.inputs import built, row_length
from shardwise.runtime.module.program import ModuleProgram
from shardwise.runtime.pipeline.program import StepOutcome
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.zero.flat_unit import Values

TIMEOUT = 600.0
"""Seconds that a rank waits for others."""


def split(
    model: nn.Module | Callable[[], nn.Module],
    layout: Layout | str,
    plan: Mapping[str, str] | None = None,
    example: Any = None,
    *,
    blocks: Sequence[str] | None = None,
    parts: Sequence[str | nn.Module] | None = None,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    optimizer: OptimizerConfig | None = None,
    on_nonfinite: str = "stop",
    device: torch.device | str | None = None,
    transport: str = "auto",
    offload_dir: Path | str | None = None,
) -> SplitModule:
    """Split a module over the ranks of a job. Every rank calls it with the same arguments and weights.

    model: the module, which is taken over: its parameters become this rank's. Or a function that builds it. On the meta
    device its own classes' initial values are made submodule by submodule, and no rank has all of them.
    layout: a `Layout` or its text, such as "dp=2,zero=3" (docs/your_own_model.md has its keys); micro is the number of
    rows of a micro-batch, which only predictions need to know.
    plan: {pattern: style} of tensor parallelism (`layout.styles`); None for the one that a `transformers` model has.
    example: inputs of one forward pass, to find the order in which blocks run, which under a pipeline `parts` has, and
    under cp to see that tokens meet in attention alone; else None where the order is that of registration.
    blocks: classes or paths of the modules that are gathered, reduced and recomputed alone; None to find them.
    parts: under a pipeline, all modules with parameters in the order in which a micro-batch passes through them, or
    patterns of their paths; None for the plan of a `transformers` model. What comes before the blocks is on the first
    stage, what comes after them on the last.
    accumulate: micro-batches per step. lora: low-rank adapters beside its linear maps, all else being frozen, such as
    "rank=16,targets=q_proj+v_proj"; with "base=nf4" the linear maps of its blocks are kept in 4 bits. optimizer:
    AdamW's settings; `lr` is constant but for `train_step(lr=)`.
    on_nonfinite: "stop" raises `DivergedError` after a step that is not finite, which changes nothing. transport: as of
    `make_comms`. offload_dir: for the ranks' files of offload=nvme. Without a process group one is made.
    Raises `UserError` for a module, a plan or a layout that cannot be split.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_module_layout(layout)
    folder = _folder(layout, offload_dir)
    _meet()
    check_module_layout(layout, dist.get_world_size())
    module = _built(model, layout, example)
    found = find_blocks(module, blocks)
    if lora is not None:
        add_adapters(module, Lora.parse(lora) if isinstance(lora, str) else lora, found)
    if layout.precision == "fp64":
        use_exact_products(module)
    chain = find_chain(module, parts, found) if layout.pp > 1 else None
    if example is not None and chain is None:
        found = run_order(module, found, example)
    described = describe(module, layout, plan, found, chain)
    workload = Workload.of_rows(layout, accumulate)
    check_described(described.blueprint, layout, accumulate)
    at = _device(module, device)
    values: Values = MetaValues(module) if is_meta(module) else values_in(module)
    place_buffers(module, layout, values, at)
    comms = make_comms(layout, described.blueprint, dist.get_rank(), timeout=TIMEOUT, transport=transport, quiet=True)
    units = unit_plan(described.blueprint, layout, workload, rank=dist.get_rank(), backend=comms.backend)
    program = ModuleProgram(module, described, units, comms, optimizer or OptimizerConfig(), values, at, folder)
    return SplitModule(program, on_nonfinite, example)


def _folder(layout: Layout, folder: Path | str | None) -> Path | None:
    if folder is None and layout.uses_disk:
        raise UserError(f"layout {layout} keeps state on disk: give split a folder for it, offload_dir=")
    return None if folder is None else Path(folder)


def _built(model: nn.Module | Callable[[], nn.Module], layout: Layout, example: Any) -> nn.Module:
    module = built(model, "split")
    if cuts_sequences(layout):
        check_tokens(module, example)
    return module


def _device(module: nn.Module, wanted: torch.device | str | None) -> torch.device:
    there = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    device = torch.device(wanted or ("cpu" if there.type == "meta" else there))
    if device.type == "cuda" and dist.get_backend() == "gloo":
        raise UserError("a module on a GPU needs NCCL: call torch.distributed.init_process_group('nccl') before split")
    return device


def _meet() -> None:
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Threads of gloo that are there when the interpreter goes abort the process.
    atexit.register(_part)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class SplitModule(nn.Module):
    """A user's module over the ranks of a job: this rank's part of it.

    Calling it outside of a training step is a forward pass without gradients, which all ranks make together, each with
    rows of its own along dp and equal ones along tp. Other attributes are the module's own.
    """

    def __init__(self, program: ModuleProgram, on_nonfinite: str = "stop", example: Any = None) -> None:
        super().__init__()
        if program.rows is not None:
            program.rows.longest = length_of(example)
        if on_nonfinite not in ("stop", "skip"):
            raise UserError(f"on_nonfinite must be stop or skip, not {on_nonfinite!r}")
        self._stops = on_nonfinite == "stop"
        self.module = program.module
        self.program = program
        self._failures = Failures(program.comms)
        self._trains = False
        self._report: StepReport | None = None
        self._savers: dict[Path, Saver] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.program.attribute(name) if self._trains else getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass. Under a pipeline, and outside of a step, it is None but on the last stage."""
        if self._trains and (torch.is_grad_enabled() or self.program.stages is not None):
            return self.program.run(*args, **kwargs)
        if self._trains:
            with self.program.engine.evaluation_in_step():
                return self.program.run(*args, **kwargs)
        with self._failures.shared():
            args, kwargs = self.program.of_rows((args, kwargs))
            return self.program.infer(*args, **kwargs)

    def train_step(
        self, loss_fn: Callable[[Any, Any], Any], batch: Any, *, lr: float | None = None, measure: bool = False
    ) -> StepOutcome:
        """One step of the optimizer. A rank's error is raised on all ranks, with its message.

        loss_fn: (this module, micro-batch) -> (summed loss, number of tokens), of this rank. Losses are divided by the
        tokens of all ranks, however many each has; weights of tokens may make it a fraction. A mean loss alone counts
        once per rank and micro-batch. A parameter without a gradient on any rank is left alone, with its moments.
        batch: this rank's rows, handed to `loss_fn` as they are; a list has `accumulate` micro-batches. Every rank of a
        pipeline has the same, and `loss_fn` computes the loss on the last stage alone.
        measure: whether `report` will be this step's, which follows every tensor and takes longer.
        Raises `DivergedError` on all ranks as `on_nonfinite` says; the split is as it was before the step. Under
        sync=local the outcome is that of this rank's replica, and the error follows the next outer step.
        """
        before = BuffersBefore(self.module)
        with self._failures.shared():
            outcome = self._train_step(loss_fn, batch if isinstance(batch, list) else [batch], lr, measure)
        if outcome.skipped:
            before.restore()
        if self._stops and (words := self.program.diverged(outcome)):
            raise DivergedError(
                f"step {self.program.optimizer.steps + 1}: {words}: use a smaller lr, or on_nonfinite='skip' to leave "
                "it out"
            )
        return outcome

    def _train_step(
        self, loss_fn: Callable[[Any, Any], Any], micro_batches: list[Any], lr: float | None, measure: bool
    ) -> StepOutcome:
        lr = self.program.optimizer.config.lr if lr is None else lr
        seq, micro_batches = row_length(micro_batches[0]), [self.program.of_rows(batch) for batch in micro_batches]
        step = partial(self.program.step, lambda run, rows: loss_fn(self, rows), micro_batches, lr)
        self._trains = True
        try:
            if not measure:
                return step()
            self.program.learn_shapes(lambda run, rows: loss_fn(self, rows), micro_batches)
            with StepMeasurement(self.program) as measurement:
                outcome = step()
        finally:
            self._trains = False
        self._report = self._gathered(measurement, seq)
        return outcome

    def _gathered(self, measurement: StepMeasurement, seq: int) -> StepReport:
        """The report of all ranks' roles. seq: elements of a row."""
        roles = gather_objects(measurement.role(self.program.comms.rank))
        plan, kind = self.program.plan, "CPU" if self.program.device.type == "cpu" else "GPU"
        return StepReport(
            source="measured",
            model={"name": plan.blueprint.name},
            layout=str(self.program.layout),
            workload=replace(plan.workload, seq=seq).to_json(),
            cluster=f"{len(roles)}x{kind}",
            roles=merge_roles(dict(enumerate(roles))),
        )

    @overload
    def report(self) -> StepReport: ...

    @overload
    def report(self, predicted: StepReport) -> ReportComparison: ...

    def report(self, predicted: StepReport | None = None) -> StepReport | ReportComparison:
        """Ledger, bytes by class and transport times of the last measured step; its comparison with `predicted`, what
        `estimate` gives for the traced module, where that is given. Raises `UserError` without a measured step."""
        if self._report is None:
            raise UserError("no step was measured: call train_step(..., measure=True) first")
        return self._report if predicted is None else compare(predicted, self._report)

    def save(self, folder: Path | str) -> Path:
        """Write weights, moments, persistent buffers and step to `folder`/step-N, under the module's own names, for any
        layout. All ranks call it together. Returns the checkpoint's folder."""
        folder, program = Path(folder), self.program
        position = program.position
        if folder not in self._savers:
            about = {"module": program.plan.blueprint.name, "layout": str(program.layout)}
            self._savers[folder] = Saver(
                program, folder, seed=0, about=about, keep=0, later=False, timeout=TIMEOUT,
                others=partial(written, program),
            )  # fmt: skip
        self._savers[folder].save(position)
        return folder / f"step-{position.step}"

    def load(self, folder: Path | str) -> int:
        """Set weights, moments, buffers and step from a checkpoint of any layout, or from a folder's newest one. All
        ranks call it together. Returns the steps that were done. Raises `UserError` when it is of another module, or
        damaged."""
        self.program.steps = restore_module(self.program, find(Path(folder))).step
        return self.program.steps

    def close(self) -> None:
        """Remove this rank's file of offloaded state, which else goes with the module. No step can follow."""
        self.program.close()

    @property
    def blueprint(self) -> Blueprint:
        """Its parts and parameters."""
        return self.program.plan.blueprint
