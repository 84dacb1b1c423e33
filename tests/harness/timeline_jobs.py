"""What ranks run for the tests of timelines: training whose last step but one is recorded, over slow collectives."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.jobs import _pieces, build, micro_batches
from harness.reference import STEPS, Case
from harness.trap_jobs import collectives_by
from shardwise.layout import Layout
from shardwise.report import LedgerRow, TransportRow
from shardwise.report.exposure import TimeSpan, spans
from shardwise.report.step_report import Bytes, Role
from shardwise.runtime.measure.timeline import TimelineRecorder
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.zero.optimizer import learning_rate

RECORDED = STEPS - 2
DELAY = 2e-3
"""Seconds by which each collective completes late."""


@dataclass
class Recorded:
    """One rank's run. ledger, transport, timeline: of the recorded step. left: what recording has left behind."""

    losses: list[float]
    pieces: dict[tuple, str]
    ledger: tuple[LedgerRow, ...]
    transport: tuple[TransportRow, ...]
    timeline: tuple[TimeSpan, ...]
    left: list[str]


def record(rank: int, payload: tuple[Case, Layout, bool]) -> Recorded:
    """Train with or without overlap; the step `RECORDED` is recorded."""
    case, layout, overlap = payload
    program = build(case, layout, rank, overlap, "gloo")
    out = Recorded([], {}, (), (), (), [])
    with collectives_by(_slow):
        for step in range(case.steps):
            batches, lr = micro_batches(case, layout, rank, step), learning_rate(case.optimizer, step, case.steps)
            if step == RECORDED:
                before = _attributes(program)
                with TimelineRecorder(program) as timeline:
                    loss, _, _ = program.step(batches, lr)
                out.left = sorted(_attributes(program) ^ before)
                out.ledger = program.comms.ledger()
                out.transport = timeline.transport(out.ledger)
            else:
                loss, _, _ = program.step(batches, lr)
            out.losses.append(loss)
    # Read only now: a later step must not have come into it.
    out.timeline = spans(Role("", (rank,), Bytes(), (), (), timeline.events()))
    for state in program.optimizer.states:
        out.pieces |= _pieces(state.flat, state.master)
    dist.barrier()
    return out


def fail(rank: int, case: Case) -> list[str]:
    """Record a step that raises; what is left of the recording."""
    layout = Layout(precision=case.precision)
    program = build(case, layout, rank)
    program.step(micro_batches(case, layout, rank, 0), 1e-3)
    before = _attributes(program)
    with suppress(ZeroDivisionError), TimelineRecorder(program):
        program.engine.use_unit = lambda kind, part: 1 // 0  # type: ignore[method-assign]
        program.step(micro_batches(case, layout, rank, 1), 1e-3)
    return sorted(_attributes(program) ^ before)


def _attributes(program: TrainProgram) -> set[str]:
    """What the objects that a timeline watches carry themselves, methods put in front of their own among it."""
    owners = {"engine": program.engine, "optimizer": program.optimizer, "comms": program.comms}
    found = {f"{name}.{attribute}" for name, owner in owners.items() for attribute in vars(owner)}
    return found | {f"timeline: {program.comms.timeline}"}


class _Slow:
    """A collective that completes `DELAY` later than it does."""

    def __init__(self, work: Any) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        threading.Thread(target=self._complete, args=(work,)).start()

    def _complete(self, work: Any) -> None:
        time.sleep(DELAY)
        work.wait()
        self.future.set_result(None)

    def wait(self) -> None:
        self.future.wait()

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def _slow(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work = original(*args, **kwargs)
    return _Slow(work) if kwargs.get("async_op") else work
