"""Jobs of the emulation and their results: `measure` starts the ranks and returns a `EmulationResult`. Imports no
torch."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from shardwise.runtime.job.rank import RankJob
from shardwise.runtime.measure.job import whole
from shardwise.schedule.pipeline import PipelineSchedule
from shardwise.schedule.pipeline.memory import MicroBatchMemory
from shardwise.schedule.pipeline.show import from_text, to_text
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times

WORD = 8
"""Messages are of whole 64-bit numbers, the first of which says what message it is."""
_TIMEOUT = 60.0


@dataclass(frozen=True)
class EmulationCase:
    """A schedule to run. times: what its computations wait for. held: the bytes of a stage's micro-batch, whole ones,
    of which `rebuilt` does not count."""

    schedule: PipelineSchedule
    times: Times
    held: MicroBatchMemory

    @classmethod
    def shared(
        cls,
        schedule: PipelineSchedule,
        forward: float,
        input: float,
        weight: float,
        saved: int = 0,
        weight_share: float = 1,
    ) -> Self:
        """From a *rank's* seconds and saved bytes for one micro-batch, of which a stage has its part, as
        `Times.shared` and `MicroBatchMemory.shared` cut them. weight_share: what part of the saved bytes W needs."""
        parts = MicroBatchMemory.shared(schedule, saved, weight_share * saved)
        kept, needed = (tuple(map(round, item)) for item in (parts.saved, parts.weight))
        held = MicroBatchMemory(kept, needed, (0,) * schedule.stages)
        return cls(schedule, Times.shared(schedule, forward, input, weight), held)

    def to_json(self) -> dict[str, Any]:
        times = {name: getattr(self.times, name) for name in ("forward", "input", "weight")}
        return {"schedule": to_text(self.schedule), "times": times, "held": asdict(self.held)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        seconds, sizes = ({name: tuple(values) for name, values in data[key].items()} for key in ("times", "held"))
        times = Times(seconds["forward"], seconds["input"], seconds["weight"])
        return cls(from_text(data["schedule"]), times, MicroBatchMemory(**sizes))


@dataclass(frozen=True)
class EmulationJob(RankJob):
    """Settings of the ranks' job file. nbytes: of a message. steps: of each case, after one that is not counted.
    transport: one of `runtime.TRANSPORTS`."""

    cases: tuple[EmulationCase, ...]
    nbytes: int
    steps: int
    transport: str


@dataclass(frozen=True)
class MeasuredCase:
    """Measurements of one case. steps: each with the spans that were measured, in the form of a simulated one. held,
    buffers: the most bytes saved for backward, and receives posted and not yet used up, by rank."""

    case: EmulationCase
    steps: tuple[Simulated, ...]
    held: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def median(self) -> Simulated:
        middle = statistics.median_low(step.makespan for step in self.steps)
        return next(step for step in self.steps if step.makespan == middle)

    def simulated(self, hop: float, overlap: bool) -> Simulated:
        """Expected seconds if a message takes `hop` seconds; the exchange of a tied table is one, too.

        overlap: messages travel while ranks go on, as over gloo. Through shared memory they are copied by the ranks.
        """
        return simulate(self.case.schedule, replace(self.case.times.with_hop(hop, overlap=overlap), tied=hop))


@dataclass(frozen=True)
class EmulationResult:
    """Measurements of all cases. transport: what carried messages, "shared" or "gloo". hop: seconds of a message to the
    next rank, from handing it over until a rank that stands still for it has it; 0 for one rank. cases: in the order
    given."""

    transport: str
    hop: float
    cases: tuple[MeasuredCase, ...]


def one_by_one(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule as it is executed here: the parts of an overlapped F&B as two actions that follow each other."""
    lists = (tuple(leaf for action in local for leaf in action.leaves()) for local in schedule.actions)
    return replace(schedule, actions=tuple(lists))


def measure(cases: Sequence[EmulationCase], nbytes: int, steps: int, transport: str = "auto") -> EmulationResult:
    """Run every case on as many processes as it has ranks, all of them by turns in one set of processes.

    cases: of equally many ranks. nbytes: of a message, a multiple of `WORD`. Raises `UserError` where memory cannot be
    shared but must, `RunFailed` when a rank dies, and `KeyboardInterrupt`.
    """
    (ranks,) = {case.schedule.ranks for case in cases}
    longest = max(simulate(case.schedule, case.times).makespan for case in cases)

    def job(out: str) -> dict[str, Any]:
        return EmulationJob(tuple(cases), nbytes, steps, transport, timeout=_TIMEOUT + 2 * longest, out=out).to_json()

    return result_of(cases, whole("shardwise.emulate.rank", job, ranks))


def result_of(cases: Sequence[EmulationCase], result: dict[str, Any]) -> EmulationResult:
    """Files written by the ranks of a job with these cases."""
    measured = (_measured(case, outcome) for case, outcome in zip(cases, result["cases"], strict=True))
    return EmulationResult(result["transport"], result["hop"], tuple(measured))


def _measured(case: EmulationCase, steps: list[list[dict[str, Any]]]) -> MeasuredCase:
    """steps: step -> rank -> what it reports."""
    executed = one_by_one(case.schedule)
    results = []
    for step in steps:
        start = min(rank["start"] for rank in step)
        spans = (tuple((begin - start, end - start) for begin, end in rank["spans"]) for rank in step)
        results.append(Simulated(executed, case.times, tuple(spans)))
    most = {key: tuple(max(item) for item in zip(*([rank[key] for rank in step] for step in steps), strict=True))
            for key in ("held", "buffers")}  # fmt: skip
    return MeasuredCase(case, tuple(results), most["held"], most["buffers"])
