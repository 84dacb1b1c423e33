"""What a rank runs for a test: train a case under a layout, and say how far it is from the reference."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.reference import STEPS, Case, Outcome, global_batch, make_batch, values
from shardwise.layout import Grid, Layout, unit_plan
from shardwise.layout.units import Backend
from shardwise.report import Role
from shardwise.runtime.engine import FlatUnit, local_values
from shardwise.runtime.measure import Measurement
from shardwise.runtime.optimizer import learning_rate
from shardwise.runtime.setup import make_comms, stream_view
from shardwise.runtime.step import Program


@dataclass
class RankOutcome:
    """grad_errors, final_errors: parameter -> squared distance to the reference over the rank's interval.

    pieces: (parameter, global box, interval) -> hash of its bytes, by which replicas are compared. seconds: the fastest
    step that was not measured.
    """

    losses: list[float]
    norms: list[float]
    grad_errors: dict[str, float]
    final_errors: dict[str, float]
    pieces: dict[tuple, str]
    role: Role
    backend: Backend
    seconds: float = float("inf")


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
            box = (placed.name, placed.dim, placed.start, placed.stop, a - start, b - start)
            pieces[box] = hashlib.sha1(data).hexdigest()
    return pieces


def build(case: Case, layout: Layout, rank: int, overlap: bool = True, transport: str = "shared") -> Program:
    """The program of `rank`, with the initial weights that the reference has."""
    torch.set_float32_matmul_precision("highest")
    comms = make_comms(layout, case.model, rank, timeout=120.0, overlap=overlap, transport=transport)
    plan = unit_plan(case.model, layout, case.workload, rank=rank, backend=comms.backend)
    return Program(plan, comms, case.optimizer, values, torch.device("cpu"))


def train(rank: int, payload: tuple[Case, Layout, Outcome, bool, str]) -> RankOutcome:
    """Train `STEPS` steps; the last one is measured."""
    case, layout, reference, overlap, transport = payload
    program = build(case, layout, rank, overlap, transport)
    outcome = RankOutcome([], [], {}, {}, {}, None, program.plan.backend)  # type: ignore[arg-type]
    plain_step = program.optimizer.step

    def keep_gradients(lr: float) -> float:
        if not outcome.losses:
            for flat in program.engine.units.values():
                outcome.grad_errors |= _errors(flat, flat.grads_interval, reference.first_grads)
        return plain_step(lr)

    program.optimizer.step = keep_gradients  # type: ignore[method-assign]
    for step in range(STEPS):
        lr = learning_rate(case.optimizer, step, STEPS)
        batches = micro_batches(case, layout, rank, step)
        if step == STEPS - 1:
            with Measurement(program) as measurement:
                loss, norm, _ = program.step(batches, lr)
            outcome.role = measurement.role(rank)
        else:
            started = time.perf_counter()
            loss, norm, _ = program.step(batches, lr)
            outcome.seconds = min(outcome.seconds, time.perf_counter() - started)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    for state in program.optimizer.states:
        outcome.final_errors |= _errors(state.flat, state.master, reference.final)
        outcome.pieces |= _pieces(state.flat, state.master)
    dist.barrier()
    return outcome


def micro_batches(case: Case, layout: Layout, rank: int, step: int) -> list[tuple[Any, torch.Tensor]]:
    """This rank's share of a step: sequence i of the global batch goes to data rank i // (batch / dp)."""
    data = Grid.of(layout, case.model).coordinates(rank)["dp"]
    every = global_batch(case, step)
    share = case.workload.batch // layout.dp
    result = []
    for start in range(data * share, (data + 1) * share, layout.micro):
        rows = {name: tensor[start : start + layout.micro].clone() for name, tensor in every.items()}
        batch = make_batch(case, rows, step)
        result.append(
            (stream_view(batch, layout, Grid.of(layout, case.model).coordinates(rank)["tp"]), rows["targets"])
        )
    return result
