"""Composition of a step from the shares that ran: where ranks meet, the order of a pipeline, the sums of waits; and the
comparison of their ledgers with the predicted ones."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from shardwise.emulate.share_job import Share, ShareStep
from shardwise.layout import Mesh
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.dryrun import kind_of_work
from shardwise.schedule.pipeline.action import COMPUTE
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times

StageTimes = tuple[float, float, float]
"""Seconds of a stage's forward pass, of its input's gradient and of its weights' for one micro-batch."""


@dataclass(frozen=True)
class WaitSum:
    """Waits of one share for one kind of collective in a step."""

    op: str
    axes: str
    calls: int
    predicted: float
    """Seconds that the collectives last, hidden or not."""
    waited: float
    """Seconds for which the share stood still."""


def meeting(steps: Sequence[ShareStep]) -> float:
    """Seconds of a step whose shares ran at once: at each collective those of a group meet, and the slowest counts.

    Without the same collectives on all, the longest share's.
    """
    if len({tuple((wait.op, wait.axes) for wait in step.waits) for step in steps}) > 1:
        return max(step.seconds for step in steps)
    clocks, last = [0.0] * len(steps), [0.0] * len(steps)
    for waits in zip(*(step.waits for step in steps), strict=True):
        arrived: dict[tuple[int, ...], float] = defaultdict(float)
        for i, wait in enumerate(waits):
            clocks[i] += wait.start - last[i]
            last[i] = wait.stop
            arrived[wait.ranks] = max(arrived[wait.ranks], clocks[i])
        clocks = [arrived[wait.ranks] + wait.stop - wait.start for wait in waits]
    return max(clock + step.seconds - end for clock, step, end in zip(clocks, steps, last, strict=True))


def pipelined(
    places: Sequence[UnitPlan], mesh: Mesh, shares: Mapping[int, Share], repeat: int, message: tuple[float, float],
    overlap: bool,
) -> float:  # fmt: skip
    """Seconds of a pipeline's step, simulated from what each kind of rank took for its computations.

    places: plan of a rank at each place. message, overlap: as for `simulated`.
    """
    ran = {kind_of_work(plan): plan for plan in reversed(places) if mesh.rank(pp=plan.pp_rank) in shares}
    times: dict[int, StageTimes] = {}
    for plan in places:
        same = ran[kind_of_work(plan)]
        mine = stage_times(same, shares[mesh.rank(pp=same.pp_rank)].steps[repeat])
        times |= dict(zip(plan.stages, mine.values(), strict=True))
    steps = [share.steps[repeat] for share in shares.values()]
    before, after = max(step.began for step in steps), max(step.seconds - step.spans[-1][1] for step in steps)
    schedule = places[0].pipeline.schedule
    assert schedule is not None
    return before + simulated(schedule, times, message, overlap).makespan + after


def simulated(
    schedule: PipelineSchedule, times: Mapping[int, StageTimes], message: tuple[float, float], overlap: bool
) -> Simulated:
    """A schedule in time. message: seconds of a message between stages, and of the tied table's. overlap: messages
    continue beside computations."""
    forward, back, weight = zip(*(times[stage] for stage in range(schedule.stages)), strict=True)
    return simulate(schedule, Times(forward, back, weight, hop=message[0], overlap=overlap, tied=message[1]))


def stage_times(plan: UnitPlan, step: ShareStep) -> dict[int, StageTimes]:
    """Times of each stage of a rank: means over its micro-batches. Where both gradients are computed at once, they
    count as the inputs'."""
    computations = [part for action in plan.pipeline.actions if action.kind in COMPUTE for part in action.leaves()]
    took: dict[tuple[int, str], list[float]] = defaultdict(list)
    for part, (start, end) in zip(computations, step.spans, strict=True):
        took[part.stage, part.kind].append(end - start)
    means = {key: fmean(seconds) for key, seconds in took.items()}
    return {
        stage: (
            means[stage, "F"],
            means.get((stage, "I"), means.get((stage, "B"), 0.0)),
            means.get((stage, "W"), 0.0) if (stage, "I") in means else 0.0,
        )
        for stage in plan.stages
    }


def parts_of(share: Share) -> dict[str, float]:
    """Seconds of arithmetic by part of the step, the median over its steps."""
    names = sorted({name for step in share.steps for name in step.parts})
    return {name: median(step.parts.get(name, 0.0) for step in share.steps) for name in names}


def waits_of(share: Share) -> tuple[WaitSum, ...]:
    """Waits of the share by operation and axes, the median over its steps."""
    kinds = sorted({(wait.op, wait.axes) for step in share.steps for wait in step.waits})
    sums = []
    for op, axes in kinds:
        mine = [[wait for wait in step.waits if (wait.op, wait.axes) == (op, axes)] for step in share.steps]
        sums.append(
            WaitSum(
                op, axes, round(median(map(len, mine))), median(sum(w.predicted for w in waits) for waits in mine),
                median(sum(w.stop - w.start for w in waits) for waits in mine),
            )
        )  # fmt: skip
    return tuple(sorted(sums, key=lambda wait: -wait.waited))


def differences(shares: Iterable[Share], ledgers: Mapping[int, Sequence[LedgerRow]], routed: bool) -> tuple[str, ...]:
    """Rows of the recorded ledgers that differ from the predicted ones. routed: rows of tokens on their way to experts
    differ from step to step, and count without their elements."""

    def rows(ledger: Sequence[LedgerRow]) -> dict[LedgerRow, int]:
        counts: dict[LedgerRow, int] = defaultdict(int)
        for row in ledger:
            bare = replace(row, elements=0, count=0) if routed and row.op == "all_to_all" else replace(row, count=0)
            counts[bare] += row.count
        return counts

    wrong = set()
    for share in shares:
        seen, expected = rows([LedgerRow(*row) for row in share.ledger]), rows(ledgers[share.rank])
        for row in seen.keys() | expected.keys():
            if seen.get(row, 0) != expected.get(row, 0):
                words = f"{row.phase} {row.op} over {row.axes} for {row.unit}, {row.elements} elements"
                wrong.add(f"rank {share.rank}: {words}: {seen.get(row, 0)} recorded, {expected.get(row, 0)} predicted")
    return tuple(sorted(wrong))
