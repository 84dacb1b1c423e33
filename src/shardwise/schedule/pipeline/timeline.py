"""A simulated step as a `StepReport`, whose timelines traces and pages draw like those of real runs."""

from collections.abc import Iterator
from typing import Any

from shardwise.report.exposure import COMMUNICATION, COMPUTE, WAITING
from shardwise.report.step_report import Bytes, Role, StepReport
from shardwise.schedule.pipeline.action import COMPUTE as COMPUTATIONS
from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.simulate import Simulated

_COLLECTIVES = {
    "UNSHARD": ("all_gather_into", "shard"),
    "REDUCE_GRAD": ("reduce", "dp"),
    "SUM_TIED": ("all_reduce", "pp"),
    "SHARE_LOSS": ("broadcast", "pp"),
}


def report(simulated: Simulated) -> StepReport:
    """One role for each rank, with its timeline; bytes and ledgers are not the schedule's to know, and empty.

    Streams: "compute"; "communication", each message from its posting to its completion; "waiting", where a rank stands
    still before a computation.
    """
    schedule = simulated.schedule
    roles = tuple(
        Role(f"rank {rank}", (rank,), Bytes(), (), timeline=tuple(_events(simulated, rank)))
        for rank in range(schedule.ranks)
    )
    layout = f"pp={schedule.ranks},schedule={schedule.name}"
    layout += f",virtual={schedule.virtual}" if schedule.virtual > 1 else ""
    notes = ("a simulated schedule: timelines only, no bytes and no ledger",)
    workload = {"micro_batches": schedule.micro}
    return StepReport("predicted", {}, layout, workload, "", roles, float(simulated.makespan), notes=notes)


def _events(simulated: Simulated, rank: int) -> Iterator[dict[str, Any]]:
    free = 0.0
    for action, (start, end) in zip(simulated.schedule.actions[rank], simulated.spans[rank], strict=True):
        if action.kind in COMPUTATIONS:
            if start > free:
                yield _event(f"for {action}", WAITING, free, start, {})
            yield _event(str(action), COMPUTE, start, end, {})
            free = end
        elif action.kind != "RESHARD" and end > start:
            yield _event(str(action), COMMUNICATION, start, end, _args(action))


def _args(action: Action) -> dict[str, Any]:
    op, axes = _COLLECTIVES.get(action.kind, (action.kind[:4].lower(), "pp"))
    return {"op": op, "axes": axes} | ({"peer": action.peer} if action.peer >= 0 else {})


def _event(name: str, stream: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    event = {"name": name, "stream": stream, "start_s": float(start), "duration_s": float(end - start)}
    return event | ({"args": args} if args else {})
