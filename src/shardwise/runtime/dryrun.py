"""A step without devices: the very runtime on fake tensors and a fake process group, at any world size.

What it returns is not predicted but observed: the ledger that the program wrote, the storages that it made. Nothing is
computed and nothing is sent, so a step of 16,384 ranks takes seconds on a laptop. Activations are those of the eager
CPU path, whatever device the cluster has.

Nothing is observed twice. Ranks at one place of the pipeline share all shapes; places that do the same with as many
layers differ in names alone; and of a long step, a shorter one with the same steady state is run (`UnitPlan.short`),
whose period is counted as often as it comes. Roles are observed side by side, on as many cores as there are.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, check_runnable
from shardwise.layout.step import role_of
from shardwise.layout.unit import Backend
from shardwise.layout.units import UnitPlan, unit_plan, usual_backend
from shardwise.model import ModelConfig
from shardwise.report.step_report import Bytes, Role, StepReport

if TYPE_CHECKING:
    from shardwise.runtime.transport.comms import Comms

MOST_PROCESSES = 8
"""Concurrent processes; each imports torch."""


def dry_run(
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    cluster: Cluster | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> StepReport:
    """Observe one step of each role of ranks. progress: gets a line at the start and after each kind of ranks.

    Raises `LayoutError` for what the runtime cannot run, `UserError` when a process fails.
    """
    check_runnable(layout, model, workload, cluster.devices if cluster else None)
    if layout.algorithm != "auto":
        raise UserError(f"a dry run moves no data, so algorithm={layout.algorithm} cannot run in it: leave it out")
    if layout.uses_disk:
        raise UserError("a dry run has no disk, so offload=nvme cannot run in it: choose offload=cpu")
    mesh, eager = Mesh.of(layout, model), replace(layout, compile="off")
    ranks = [mesh.rank(pp=place) for place in range(layout.pp)]
    plans = [unit_plan(model, eager, workload, rank=rank, backend=usual_backend(cluster)) for rank in ranks]
    progress(f"a step of {_micro_batches(plans[0])} on one rank of each kind")
    firsts: dict[str, int] = {}
    """Kind of work of a rank -> the first place of the pipeline where ranks do it."""
    like = [firsts.setdefault(kind_of_work(plan), place) for place, plan in enumerate(plans)]
    seen: dict[int, Role] = {}
    for place, role in zip(
        firsts.values(), _observe_all([(plans[at], ranks[at]) for at in firsts.values()]), strict=True
    ):
        seen[place] = role
        progress(f"{len(seen)} of {len(firsts)} kinds of ranks observed")
    roles = []
    for place, plan in zip(like, plans, strict=True):
        role = _renamed(seen[place], plans[place], plan)
        roles.append(replace(role, role=role_of(plan), ranks=mesh.stage(plan.pp_rank)))
    return StepReport(
        source="dry-run",
        model=model.to_json(),
        layout=str(layout),
        workload=workload.to_json(),
        cluster=str(cluster) if cluster else f"{layout.ranks}xCPU",
        roles=tuple(roles),
        notes=_notes(layout),
    )


def _micro_batches(plan: UnitPlan) -> str:
    count, whole = _run(plan).micro_batches, plan.micro_batches
    return f"{count} micro-batch{'es' * (count > 1)}" + f", which stand for {whole:,}," * (count < whole)


def kind_of_work(plan: UnitPlan) -> str:
    """A rank's parts and actions, without the names of layers, stages and peers: where these are equal, so are bytes
    and ledger."""
    if plan.layout.pp == 1:
        return ""
    own = {stage: index for index, stage in enumerate(plan.stages)}
    parts = [[part.partition(".")[0] for part in stage] for stage in plan.stages.values()]
    actions = [
        (action.kind, action.peer < plan.pp_rank, own.get(part.stage), part.micro)
        for action in _run(plan).pipeline.actions
        for part in action.leaves()
    ]
    return repr((parts, actions))


def _renamed(role: Role, plan: UnitPlan, other: UnitPlan) -> Role:
    """The role of `plan`'s rank with the names of `other`'s, which does the same."""
    names = dict(zip(plan.parts, other.parts, strict=True))
    for mine, theirs in zip(plan.stages, other.stages, strict=True):
        names |= {f"stage {mine + by}": f"stage {theirs + by}" for by in (-1, 0, 1)}
    rows = (replace(row, unit=names.get(row.unit, row.unit)) for row in role.ledger)
    return replace(role, ledger=tuple(sorted(rows)))


def _notes(layout: Layout) -> tuple[str, ...]:
    notes = ("activations and the rest of the peak are those of the eager CPU path",)
    if layout.compile == "off":
        return notes
    return *notes, f"compile={layout.compile}: nothing is computed here, and the blocks ran without being compiled"


def _observe_all(asked: Sequence[tuple[UnitPlan, int]]) -> Iterator[Role]:
    """The roles of (plan, rank), in order, from as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    count = min(len(asked), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    processes, pipes = [], []
    try:
        for index in range(count):
            # A pool has semaphores, which outlive a killed process.
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_observe_each, args=(theirs, asked[index::count]), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield from (_receive(pipes[index % count]) for index in range(len(asked)))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection) -> Role:
    try:
        answer = pipe.recv()
    except EOFError:
        raise UserError("the dry run failed: one of its processes was killed") from None
    if isinstance(answer, Role):
        return answer
    raise UserError(f"the dry run failed: {answer}")


def _observe_each(pipe: Connection, asked: Sequence[tuple[UnitPlan, int]]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One mode for all: the decoder keeps scalars that every block reads.
    fake, parent = FakeTensorMode(), multiprocessing.parent_process()
    for plan, rank in asked:
        if parent is not None and not parent.is_alive():
            return
        try:
            pipe.send(_observe(plan, rank, fake))
        except (BrokenPipeError, KeyboardInterrupt):
            return
        except Exception as error:
            pipe.send((str(error).splitlines() or [type(error).__name__])[0])


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """A process group of so many ranks without peers. Raises `UserError` inside a job."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.runtime.torch_versions import know_fake_collectives

    if dist.is_initialized():
        raise UserError(
            "a process of a job cannot trace: do it before torch.distributed.init_process_group, or in another process"
        )
    know_fake_collectives()
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_comms(plan: UnitPlan, rank: int = 0) -> Comms:
    """The process groups of `rank` inside `fake_ranks`, which send nothing."""
    from shardwise.runtime.job.setup import axes_of
    from shardwise.runtime.transport.comms import Comms

    mesh, connect = Mesh.of(plan.layout, plan.subject), fake_transport(plan.backend)
    comms = Comms(mesh, rank, axes_of(plan.subject), timeout=60.0, backend=plan.backend, connect=connect)
    comms.read = lambda scalar: 1.0  # type: ignore[method-assign]  # fake tensors hold no numbers
    return comms


def _observe(plan: UnitPlan, rank: int, fake: Any) -> Role:
    import torch

    from shardwise.runtime.job.config import OptimizerConfig
    from shardwise.runtime.job.setup import blank_batch
    from shardwise.runtime.measure.memory import StepMeasurement
    from shardwise.runtime.pipeline.step import TrainProgram

    short = _run(plan)
    with fake_ranks(plan.layout.ranks, rank), fake:
        comms = fake_comms(plan, rank)
        program = TrainProgram(
            short, comms, OptimizerConfig(), lambda parameter, index: index.double(), torch.device("cpu")
        )
        batches = [blank_batch(short) for _ in range(short.micro_batches)]
        with StepMeasurement(program) as measurement:
            given = _Given(batches, lambda: {key: timing.count for key, timing in comms.timings.items()})
            program.step(given, 1e-3)
        role = replace(measurement.role(rank), transport=())
        inputs = measurement.followed(_tensors(*batches[0]))
    return _lengthened(role, plan, given, inputs)


def fake_transport(backend: Backend) -> Any:
    """Factory of a group's transport, with the memory that a backend needs but without peers."""
    from shardwise.runtime.transport.process_group import ProcessGroupTransport
    from shardwise.runtime.transport.protocol import DONE

    class Shared(ProcessGroupTransport):
        """Ranks that read each other's memory. A message is handed over as soon as it is sent, which fake collectives
        do not tell."""

        def send(self, tensor: Any, peer: int) -> Any:
            return DONE

        def receive(self, out: Any, peer: int) -> Any:
            return DONE

        def _unsummed(self, own: Any) -> Any:
            return [own] * len(self.ranks)

    kind = Shared if backend == "shared" else ProcessGroupTransport
    return lambda group, ranks: kind(group, ranks, backend)


def _run(plan: UnitPlan) -> UnitPlan:
    """The plan of the step that is run: the short one, unless a rank holds more the more micro-batches there are."""
    return plan if plan.pipeline.steady and plan.pipeline.steady.grows else plan.short


class _Given(list[Any]):
    """Micro-batches that note how much of the ledger is written whenever the program takes one: first to count valid
    tokens, then at every forward pass."""

    def __init__(self, batches: Iterable[Any], written: Callable[[], dict[Any, int]]) -> None:
        super().__init__(batches)
        self._written = written
        self.taken: list[dict[Any, int]] = []

    def __getitem__(self, index: Any) -> Any:
        self.taken.append(self._written())
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def _lengthened(role: Role, plan: UnitPlan, given: _Given, inputs: int) -> Role:
    """The role in the whole step, from the one that was run. inputs: bytes of one micro-batch's."""
    left_out = plan.micro_batches - len(given)
    if not left_out:
        return role
    forwards = given.taken[len(given) :]
    period, start, stop = _period(plan)
    repeats, before, after = left_out // period, forwards[start], forwards[stop]
    rows = []
    for row in role.ledger:
        key = astuple(row)[:-1]
        rows.append(replace(row, count=row.count + repeats * (after.get(key, 0) - before.get(key, 0))))
    classes = {
        field.name: getattr(role.bytes, field.name) for field in fields(Bytes) if field.name not in ("other", "absent")
    }
    return replace(role, bytes=Bytes.of(role.bytes.total + left_out * inputs, **classes), ledger=tuple(rows))


def _period(plan: UnitPlan) -> tuple[int, int, int]:
    """Micro-batches of a period of the steady state, and the forward passes at which one starts and stops."""
    if plan.pipeline.steady is None:
        return 1, 1, 2
    from shardwise.schedule.pipeline.simulate import continuation

    short, longer, period = plan.short, plan.longer, plan.pipeline.period
    places = continuation(short.pipeline.actions, longer.pipeline.actions)
    stop = next(index for index, place in enumerate(places) if place > index)
    start = stop - (len(longer.pipeline.actions) - len(short.pipeline.actions))

    def forwards(index: int) -> int:
        return sum(part.kind == "F" for action in short.pipeline.actions[:index] for part in action.leaves())

    return period, forwards(start), forwards(stop)


def _tensors(inputs: Any, targets: Any) -> Iterator[Any]:
    import torch

    values = (getattr(inputs, field.name) for field in fields(inputs))
    yield from (value for value in (*values, targets) if isinstance(value, torch.Tensor))
