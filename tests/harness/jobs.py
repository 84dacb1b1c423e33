"""What a rank runs for a test: train a case under a layout, and say how far it is from the reference."""

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.reference import Case, Outcome, global_batch, make_batch, values
from harness.staged import StagesAll
from shardwise.layout import Layout, Mesh, unit_plan
from shardwise.layout.axes import DP, REPLICA
from shardwise.layout.experts import RoutedRows
from shardwise.layout.homes import state_file
from shardwise.layout.unit import Backend
from shardwise.report import Role
from shardwise.report.step_report import Bytes, LedgerRow
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.sync.outer_step import Rounds
from shardwise.runtime.zero.flat_unit import FlatUnit, local_values
from shardwise.runtime.zero.optimizer import learning_rate


@dataclass(frozen=True)
class Training:
    """What a rank trains. against: the reference. memory: whether the last step's is measured, which follows every
    storage and costs as much as several steps; its ledger is there in any case. staged: as ranks that share a GPU."""

    case: Case
    layout: Layout
    against: Outcome
    overlap: bool = True
    transport: str = "shared"
    memory: bool = True
    staged: bool = False


@dataclass
class RankOutcome:
    """grad_errors, final_errors: parameter -> squared distance to the reference over the rank's interval. agreed: the
    mean loss of each round, where replicas train apart from each other.

    pieces: (parameter, global box, interval) -> hash of its bytes, by which replicas are compared. seconds: the fastest
    step before the last.
    """

    losses: list[float]
    norms: list[float]
    grad_errors: dict[str, float]
    final_errors: dict[str, float]
    pieces: dict[tuple, str]
    role: Role
    backend: Backend
    routed: RoutedRows | None = None
    """Rows that experts have exchanged in the last step."""
    seconds: float = float("inf")
    agreed: list[float] = field(default_factory=list)
    between: tuple[LedgerRow, ...] = ()
    """Ledger of a step without an outer step, if there is one."""


def _errors(flat: FlatUnit, mine: torch.Tensor, reference: dict[str, torch.Tensor]) -> dict[str, float]:
    errors = {}
    for start, placed in zip(flat.unit.offsets, flat.unit.placed, strict=True):
        a, b = max(start, flat.start), min(start + placed.numel, flat.stop)
        if a < b:
            flatref = reference[placed.name].reshape(-1)
            expected = local_values(placed, a - start, b - start, lambda p, index, r=flatref: r[index], mine.device)
            errors[placed.name] = float((mine[a - flat.start : b - flat.start].double() - expected).square().sum())
    return errors


def _pieces(flat: FlatUnit, mine: torch.Tensor) -> dict[tuple, str]:
    pieces = {}
    for start, placed in zip(flat.unit.offsets, flat.unit.placed, strict=True):
        a, b = max(start, flat.start), min(start + placed.numel, flat.stop)
        if a < b:
            data = mine[a - flat.start : b - flat.start].contiguous().view(torch.uint8).numpy().tobytes()
            box = (placed.name, placed.box, placed.shape, a - start, b - start)
            pieces[box] = hashlib.sha1(data).hexdigest()
    return pieces


def build(
    case: Case, layout: Layout, rank: int, overlap: bool = True, transport: str = "shared", staged: bool = False
) -> TrainProgram:
    torch.set_float32_matmul_precision("highest")
    comms = make_comms(
        layout, case.model, rank,
        timeout=120.0, overlap=overlap, transport=transport, staged=StagesAll if staged else None,
    )  # fmt: skip
    plan = unit_plan(case.model, layout, case.workload, rank=rank, backend=comms.backend)
    folder = Path(tempfile.mkdtemp(prefix="offload-")) if state_file(plan) else None
    return TrainProgram(plan, comms, case.optimizer, values, torch.device("cpu"), folder)


def train(rank: int, asked: Training) -> RankOutcome:
    case, layout, reference = asked.case, asked.layout, asked.against
    program = build(case, layout, rank, asked.overlap, asked.transport, asked.staged)
    outcome = RankOutcome([], [], {}, {}, {}, None, program.plan.backend)  # type: ignore[arg-type]
    plain_step = program.optimizer.step

    def keep_gradients(lr: float) -> float:
        if not outcome.losses:
            for flat in program.engine.trained:
                outcome.grad_errors |= _errors(flat, flat.grads_interval, reference.first_grads)
        return plain_step(lr)

    program.optimizer.step = keep_gradients  # type: ignore[method-assign]
    rounds = Rounds.of(layout, case.steps)
    for step in range(case.steps):
        lr = learning_rate(case.optimizer, step, case.steps)
        batches = micro_batches(case, layout, rank, step)
        if step == case.steps - 1:
            (loss, norm, _), outcome.role = _recorded(program, rank, partial(program.step, batches, lr), asked.memory)
        else:
            started = time.perf_counter()
            agrees = rounds.ends(step)
            if not agrees:
                program.comms.start_recording()
            loss, norm, _ = program.step(batches, lr, agrees)
            program.comms.stop_recording()
            outcome.between = outcome.between if agrees else program.comms.ledger()
            outcome.seconds = min(outcome.seconds, time.perf_counter() - started)
        if program.outer is not None and rounds.ends(step):
            outcome.agreed.append(program.outer.loss)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    for state in program.optimizer.states:
        outcome.final_errors |= _errors(state.flat, state.master, reference.final)
        outcome.pieces |= _pieces(state.flat, state.master)
    for flat in program.engine.units.values():
        if flat.unit.frozen:
            source = program.engine.stored
            held = flat.interval if source is None else source.fetch(flat, program.comms)
            outcome.final_errors |= _errors(flat, held, reference.final)
            outcome.pieces |= _pieces(flat, held)
    outcome.routed = program.expert_loads.routed
    dist.barrier()
    program.close(remove=True)
    program.comms.close()
    return outcome


def _recorded(
    program: TrainProgram, rank: int, step: Callable[[], tuple[float, float, int]], memory: bool
) -> tuple[tuple[float, float, int], Role]:
    """What `step` gives, and the role of this rank in it; without `memory` its bytes are left at zero."""
    if memory:
        with StepMeasurement(program) as measurement:
            result = step()
        return result, measurement.role(rank)
    program.comms.start_recording()
    result = step()
    program.comms.stop_recording()
    return result, Role(f"rank {rank}", (rank,), Bytes(), program.comms.ledger())


def micro_batches(
    case: Case, layout: Layout, rank: int, step: int, place: int | None = None
) -> list[tuple[Any, torch.Tensor]]:
    """This rank's share of a step, or that of a `place`: sequence i of the global batch goes to data rank
    i // (batch / dp)."""
    data = Mesh.of(layout, case.model).index(REPLICA + DP, rank) if place is None else place
    plan = unit_plan(case.model, layout, case.workload, rank=rank)
    every = global_batch(case, step)
    share = case.workload.batch // layout.dp
    result = []
    for start in range(data * share, (data + 1) * share, layout.micro):
        rows = {name: tensor[start : start + layout.micro].clone() for name, tensor in every.items()}
        batch = make_batch(case, rows, step)
        result.append(local_view(batch, rows["targets"], plan))
    return result
