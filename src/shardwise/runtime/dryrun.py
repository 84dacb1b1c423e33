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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload
from shardwise.layout.legality import check_ranks
from shardwise.layout.modules import check_described, check_module_layout, check_run
from shardwise.layout.optimizers import check_own
from shardwise.layout.step import role_of
from shardwise.layout.units import UnitPlan, unit_plan, usual_backend
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.report.step_report import Bytes, Role, StepReport

if TYPE_CHECKING:
    from shardwise.runtime.module.dry_step import ModuleSource
    from shardwise.runtime.pipeline.program import StepProgram

MOST_PROCESSES = 8
"""Concurrent processes; each imports torch."""


def dry_run(
    model: Model,
    layout: Layout,
    workload: Workload,
    cluster: Cluster | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> StepReport:
    """Observe one step of each role of ranks. progress: gets a line at the start and after each kind of ranks.

    model: a configuration, also of a class of transformers; or a traced module, whose code is run again.
    Raises `LayoutError` for what the runtime cannot run, `UserError` when a process fails.
    """
    about = {"name": model.name} if model.trace else model.to_json()
    eager = replace(layout, compile="off")
    model, source = _subject(model, layout, eager, workload, cluster.devices if cluster else None)
    if layout.algorithm != "auto":
        raise UserError(f"a dry run moves no data, so algorithm={layout.algorithm} cannot run in it: leave it out")
    if layout.uses_disk:
        raise UserError("a dry run has no disk, so offload=nvme cannot run in it: choose offload=cpu")
    mesh = Mesh.of(layout, model)
    ranks = [mesh.rank(pp=place) for place in range(layout.pp)]
    plans = [unit_plan(model, eager, workload, rank=rank, backend=usual_backend(cluster)) for rank in ranks]
    progress(f"a step of {_micro_batches(plans[0])} on one rank of each kind")
    firsts: dict[str, int] = {}
    """Kind of work of a rank -> the first place of the pipeline where ranks do it."""
    # Blocks of a user's module may differ in what they compute alone.
    kinds = [kind_of_work(plan) if source is None else str(place) for place, plan in enumerate(plans)]
    like = [firsts.setdefault(kind, place) for place, kind in enumerate(kinds)]
    seen: dict[int, Role] = {}
    for place, role in zip(
        firsts.values(), _observe_all([(plans[at], ranks[at]) for at in firsts.values()], source), strict=True
    ):
        seen[place] = role
        progress(f"{len(seen)} of {len(firsts)} kinds of ranks observed")
    roles = []
    for place, plan in zip(like, plans, strict=True):
        role = _renamed(seen[place], plans[place], plan)
        roles.append(replace(role, role=role_of(plan), ranks=mesh.stage(plan.pp_rank)))
    return StepReport(
        source="dry-run",
        model=about,
        layout=str(layout),
        workload=workload.to_json(),
        cluster=str(cluster) if cluster else f"{layout.ranks}xCPU",
        roles=tuple(roles),
        notes=_notes(layout),
    )


def _subject(
    model: Model, layout: Layout, eager: Layout, workload: Workload, devices: int | None
) -> tuple[Model, ModuleSource | None]:
    """What is planned, and how it is built, where it is no decoder here. Raises as `dry_run`."""
    if isinstance(model, ModelConfig):
        check_run(layout, model, workload, None if model.counted else devices)
        if model.counted is None:
            return model, None
        check_ranks(layout, devices or layout.ranks)
        from shardwise.runtime.module.class_model import ClassModel
        from shardwise.runtime.module.dry_step import ModuleSource

        return ModuleSource.of_class(ClassModel.of(model), eager, workload)
    check_ranks(layout, devices or layout.ranks)
    check_module_layout(layout)
    check_own(workload.optimizer)
    check_described(model, layout, workload.micro_batches(layout))
    from shardwise.runtime.module.dry_step import ModuleSource

    return model, ModuleSource.of_trace(model.trace, eager, workload)


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


def _observe_all(asked: Sequence[tuple[UnitPlan, int]], source: ModuleSource | None = None) -> Iterator[Role]:
    """The roles of (plan, rank), in order, from as many processes as there are cores. source: of a module's code."""
    context = multiprocessing.get_context("spawn")
    count = min(len(asked), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    processes, pipes = [], []
    try:
        for index in range(count):
            # A pool has semaphores, which outlive a killed process.
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_observe_each, args=(theirs, asked[index::count], source), daemon=True)
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


def _observe_each(pipe: Connection, asked: Sequence[tuple[UnitPlan, int]], source: ModuleSource | None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One mode for all: the decoder keeps scalars that every block reads.
    fake, parent = FakeTensorMode(allow_non_fake_inputs=source is not None), multiprocessing.parent_process()
    for plan, rank in asked:
        if parent is not None and not parent.is_alive():
            return
        try:
            pipe.send(_observe(plan, rank, fake) if source is None else _observe_module(plan, rank, fake, source))
        except (BrokenPipeError, KeyboardInterrupt):
            return
        except SystemExit as error:
            pipe.send(f"the code of the module ends with exit code {error.code}")
        except Exception as error:
            pipe.send((str(error).splitlines() or [type(error).__name__])[0])


def _observe(plan: UnitPlan, rank: int, fake: Any) -> Role:
    import torch

    from shardwise.runtime.fake_group import fake_comms, fake_ranks
    from shardwise.runtime.job.config import OptimizerConfig
    from shardwise.runtime.job.setup import blank_batch
    from shardwise.runtime.pipeline.step import TrainProgram

    short = _run(plan)
    with fake_ranks(plan.layout.ranks, rank), fake:
        comms = fake_comms(plan, rank)
        program = TrainProgram(
            short, comms, OptimizerConfig(), lambda parameter, index: index.double(), torch.device("cpu")
        )
        batches = [blank_batch(short) for _ in range(short.micro_batches)]
        return _observed(plan, rank, program, "forward", batches, lambda: program.step(batches, 1e-3))


def _observe_module(plan: UnitPlan, rank: int, fake: Any, source: ModuleSource) -> Role:
    from shardwise.runtime.fake_group import fake_comms, fake_ranks
    from shardwise.runtime.module.dry_step import DryModule
    from shardwise.runtime.module.inputs import usual_masks
    from shardwise.runtime.module.trace import readable

    made = DryModule(source, fake)
    plan = made.planned(plan, rank)
    with (
        readable(made.module, "a dry run has no values"),
        fake_ranks(plan.layout.ranks, rank),
        usual_masks(made.example),
        fake,
    ):
        program, batches = made.program(_run(plan), fake_comms(plan, rank))
        return _observed(plan, rank, program, "run_stage", batches, lambda: made.step(program, batches))


def _observed(
    plan: UnitPlan, rank: int, program: StepProgram, forward: str, batches: list[Any], step: Callable[[], object]
) -> Role:
    """The role of one step, lengthened to the plan's. forward: the program's method that begins a forward pass."""
    from shardwise.runtime.measure.memory import StepMeasurement
    from shardwise.runtime.module.inputs import opened, tensors_in

    begin = getattr(program, forward)
    written: list[dict[Any, int]] = []
    """What of the ledger is there whenever a forward pass begins."""

    def noted(*args: Any) -> Any:
        written.append({key: timing.count for key, timing in program.comms.timings.items()})
        return begin(*args)

    setattr(program, forward, noted)
    with StepMeasurement(program) as measurement:
        step()
    role = replace(measurement.role(rank), transport=())
    return _lengthened(role, plan, len(batches), written, measurement.followed(tensors_in(opened(batches[0])[0])))


def _run(plan: UnitPlan) -> UnitPlan:
    """The plan of the step that is run: the short one, unless a rank holds more the more micro-batches there are."""
    return plan if plan.pipeline.steady and plan.pipeline.steady.grows else plan.short


def _lengthened(role: Role, plan: UnitPlan, count: int, forwards: list[dict[Any, int]], inputs: int) -> Role:
    """The role in the whole step, from the one of `count` micro-batches that was run. forwards: what of the ledger was
    there at each forward pass; inputs: bytes of one micro-batch's."""
    left_out = plan.micro_batches - count
    if not left_out:
        return role
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
