"""A step without devices: the very runtime on fake tensors and a fake process group, at any world size.

What it returns is not predicted but observed: the ledger that the program wrote, the storages that it made. Nothing is
computed and nothing is sent, so a step of 16,384 ranks takes seconds on a laptop. Activations are those of the eager
CPU path, whatever device the cluster has.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Grid, Layout, Workload, check_runnable
from shardwise.layout.units import UnitPlan, unit_plan, usual_backend
from shardwise.model import ModelConfig
from shardwise.report.step_report import Role, StepReport


def dry_run(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster | None = None) -> StepReport:
    """Observe one step of one rank for each place in the pipeline, whose shapes the others there share; each in a
    process of its own.

    Raises `LayoutError` for what the runtime cannot run, `UserError` when the process fails.
    """
    check_runnable(layout, model, workload, cluster.devices if cluster else None)
    grid, eager = Grid.of(layout, model), replace(layout, compile="off")
    roles = []
    for place in range(layout.pp):
        first = grid.rank(pp=place, dp=0, cp=0, tp=0)
        plan = unit_plan(model, eager, workload, rank=first, backend=usual_backend(cluster))
        seen = _in_process(_observe, plan, first)
        roles.append(Role(plan.role, tuple(sorted(grid.group("dp_cp_tp", first))), seen.bytes, seen.ledger))
    return StepReport(
        source="dry-run",
        model=model.to_json(),
        layout=str(layout),
        workload=workload.to_json(),
        cluster=str(cluster) if cluster else f"{layout.ranks}xCPU",
        roles=tuple(roles),
        notes=_notes(layout),
    )


def _notes(layout: Layout) -> tuple[str, ...]:
    notes = ("activations and the rest of the peak are those of the eager CPU path",)
    if layout.compile == "off":
        return notes
    return *notes, f"compile={layout.compile}: nothing is computed here, and the blocks ran without being compiled"


def _in_process(function: Callable[[UnitPlan, int], Role], plan: UnitPlan, rank: int) -> Role:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        try:
            return pool.apply(function, (plan, rank))
        except RuntimeError as error:
            raise UserError(f"the dry run failed: {str(error).splitlines()[0]}") from error


def _observe(plan: UnitPlan, rank: int) -> Role:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.runtime.config import OptimizerConfig
    from shardwise.runtime.measure import Measurement
    from shardwise.runtime.setup import make_comms
    from shardwise.runtime.step import Program

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("fake", rank=rank, world_size=plan.layout.ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    comms = make_comms(plan.layout, plan.model, rank, timeout=60.0)
    comms.backend = plan.backend
    comms.read = lambda scalar: 1.0  # type: ignore[method-assign]  # fake tensors hold no numbers
    with FakeTensorMode():
        program = Program(plan, comms, OptimizerConfig(), _no_values, torch.device("cpu"))
        with Measurement(program) as measurement:
            program.step([_micro_batch(plan) for _ in range(plan.micro_batches)], 1e-3)
        role = measurement.role(rank)
    dist.destroy_process_group()
    return role


def _no_values(parameter: Any, index: Any) -> Any:
    return index.double()


def _micro_batch(plan: UnitPlan) -> Any:
    import torch

    from shardwise.decoder import Batch
    from shardwise.runtime.setup import stream_view

    def vector() -> torch.Tensor:
        return torch.zeros(plan.layout.micro, plan.workload.seq, dtype=torch.int64)

    positions, index = vector(), vector()
    documents = vector() if plan.workload.isolate_documents else None
    batch = Batch(vector(), positions, index, documents, positions, index, 0)
    return stream_view(batch, plan.layout, plan.tp_rank), vector()
