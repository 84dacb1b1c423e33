"""What a rank runs for a test of compile=block: train a case, count compilations, and look where gradients ended up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
import torch

from harness import jobs
from harness.reference import Case, Outcome
from shardwise.layout import Layout
from shardwise.runtime.pipeline.step import TrainProgram


@dataclass
class Compiled:
    """outcome: as `jobs.train` returns it. graphs: how many were compiled, None under inductor itself.

    strays: the rank's parameters whose gradient is not in the engine's memory after training.
    """

    outcome: jobs.RankOutcome
    graphs: int | None
    strays: list[str]


def train(rank: int, payload: tuple[Case, Layout, Outcome, str]) -> Compiled:
    """Train with one of torch's backends: "inductor", or one that traces and differentiates alike but generates no
    code."""
    case, layout, reference, name = payload
    # Before 2.13 what other tests compiled in this process counts, and the ninth form of a function is not compiled.
    torch.compiler.reset()
    graphs = 0
    compile_graph = torch._dynamo.lookup_backend(name)

    def counted(*graph: Any, **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return compile_graph(*graph, **options)

    programs: list[TrainProgram] = []
    build = jobs.build

    def kept(*arguments: Any) -> TrainProgram:
        programs.append(build(*arguments))
        return programs[-1]

    inductor = name == "inductor"
    jobs.build = kept
    try:
        with default_backend(name if inductor else counted):
            outcome = jobs.train(rank, jobs.Training(case, layout, reference))
    finally:
        jobs.build = build
    return Compiled(outcome, None if inductor else graphs, _strays(programs[0]))


@contextmanager
def default_backend(backend: Any) -> Iterator[None]:
    """Compile with this backend where none is named. torch 2.9 has no such setting: each call names it."""
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend(backend)
        try:
            yield
        finally:
            torch.compiler.set_default_backend(None)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", wraps(torch.compile)(partial(torch.compile, backend=backend)))
        yield


def _strays(program: TrainProgram) -> list[str]:
    held = program.engine.storages()
    memory = {t.untyped_storage()._cdata for name in ("gradients", "comm") for t in held[name]}
    here = {placed.name for flat in program.engine.units.values() for placed in flat.unit.placed}
    named = [(n, p) for n, p in program.decoder.named_parameters() if n in here]
    assert named
    return [n for n, p in named if p.grad is None or p.grad.untyped_storage()._cdata not in memory]
