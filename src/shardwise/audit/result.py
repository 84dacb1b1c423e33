"""What an audit says of a program: one object for the screen, for --json and for an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.audit.comparing import RecordedRow, compare_traffic
from shardwise.audit.differences import Difference
from shardwise.audit.job import AuditedJob
from shardwise.audit.planned import beyond
from shardwise.audit.reading import RankRecording
from shardwise.audit.understanding import Understood, steady_calls, understand
from shardwise.audit.waits import LateRank, late_ranks
from shardwise.codec import Json
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.report.step_report import Bytes
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time

UNSEEN = ("calls inside replayed CUDA graphs", "NVSHMEM and symmetric memory", "libraries that call NCCL themselves")
"""What the recorder cannot see."""
_STALE = (
    "the optimizer has {} parameters as they were before they were sharded, whole, and updates none of the model's: "
    "make it after fully_shard"
)
_FAILED_LATE = (
    ", and every rank came to its end: the exit code is the launcher's, or of a process that was aborted while Python "
    "shut down"
)
_LATE = 0.05
"""Share of the time from which a late rank is shown."""
_MUCH = 2.0
"""Times the mean of the others from which it is."""


@dataclass(frozen=True)
class Audit(Json):
    """A program that was recorded."""

    command: str
    code: int
    """Exit code of the program."""
    seconds: float
    ranks: int
    recorded: int
    """Ranks of which there is a recording: those of this host."""
    steps: int
    """Optimizer steps."""
    calls: int
    """Of all ranks."""
    model: str | None
    """Class of the largest module, where an optimizer step was seen."""
    hung: bool
    ended: bool
    """Whether every recorded rank came to the end of its program without an error."""
    understood: Understood
    difference: Difference | None
    traffic: tuple[RecordedRow, ...]
    bytes: Bytes | None
    """The most of every class on any rank; None without an optimizer step. `total` is of the device's allocator, or
    of the process's."""
    planned: Bytes | None
    """State that the layout needs; None where the model is not known."""
    peak: int | None
    late: tuple[LateRank, ...]
    sent: int
    """Payload bytes of one steady step, of the rank that has the most."""
    unseen: tuple[str, ...]
    mistakes: tuple[str, ...] = ()
    """Of the program, beside its calls."""
    beyond: tuple[str, ...] = ()
    """Classes of state that take more than the layout needs."""
    failures: tuple[str, ...] = ()
    """Expectations and budgets that do not hold."""
    advice: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The program's, else 1 for a difference, a wrong row or what was expected and is not so; 1 for a hang."""
        wrong = self.difference is not None or bool(self.failures or self.mistakes)
        wrong = wrong or any(row.wrong for row in self.traffic)
        return int(wrong) if self.hung else self.code or int(wrong)

    @property
    def cause(self) -> str:
        """The worst that there is, in a sentence."""
        if self.difference is not None:
            return f"{'hang: ' if self.hung else ''}{self.difference.text} (step {self.difference.step})"
        wrong = [*self.mistakes, *(said for row, said in self.rows if row.wrong)]
        if self.failures:  # rows are compared with the expected layout, which is another one
            first = self.failures[0].startswith("layout")
            wrong = [*self.failures, *wrong] if first else [*wrong, *self.failures]
        if wrong or not self.code:
            return wrong[0] if wrong else "calls of all ranks meet"
        return f"calls of all ranks meet{_FAILED_LATE if self.ended else ' as far as they were made'}"

    @property
    def rows(self) -> list[tuple[RecordedRow, str]]:
        """Rows that have a note, in words."""
        results = []
        for row in self.traffic:
            if row.note:
                place = ", ".join(filter(None, (row.what, row.phase, row.where)))
                results.append((row, f"{'wrong: ' if row.wrong else ''}{place}: {row.note}"))
        return results

    json_keys = "* cause exit_code"


def audit_of(job: AuditedJob, command: str, expect: Layout | None = None, model: ModelConfig | None = None) -> Audit:
    """The audit of a program that has ended. expect: the layout that it is compared with, else the recorded one. model:
    the program's, where no recording has one."""
    recordings = job.recordings
    understood = understand(recordings)
    held, peak = _held(recordings)
    traffic, planned = compare_traffic(recordings, understood, expect, model)
    known, _ = _held([one for one in recordings if one.model is not None][:1])
    more = beyond(known, planned.bytes, len(planned.trained)) if known and planned else []
    sent = [sum(max(c.inputs, c.outputs) for c in steady_calls(one)) for one in recordings]
    stale = max((one.stale for one in recordings), default=0)
    mistakes = [_STALE.format(stale)] if stale else []
    lost = sum(one.lost for one in recordings)
    unseen = (*UNSEEN, *([f"{lost} things that the recorder failed to note"] if lost else []))
    # Ranks for which others wait much longer than for the rest.
    ranks = late_ranks(recordings)
    waited = sum(one.seconds for one in ranks)
    late = [one for one in ranks if one.seconds * (len(ranks) - 1) > _MUCH * (waited - one.seconds)]
    return Audit(
        command, job.code, job.seconds, understood.world, len(recordings),
        max((len(one.steps) for one in recordings), default=0), sum(len(one.calls) for one in recordings),
        next((one.model[0] for one in recordings if one.model), None), job.hung,
        all(one.exit is not None and one.error is None for one in recordings), understood, job.difference,
        tuple(traffic), held, planned.bytes if planned else None, peak,
        tuple(one for one in late if one.share > _LATE), max(sent, default=0),
        mistakes=tuple(mistakes), beyond=tuple(more), unseen=unseen,
    )  # fmt: skip


def _held(recordings: Sequence[RankRecording]) -> tuple[Bytes | None, int | None]:
    """(the most of every class on a rank, the most of all); None without measured steps."""
    marks = [mark.bytes for one in recordings for mark in one.steps if mark.bytes]
    if not marks:
        return None, None
    classes = {name: max(mark[name] for mark in marks) for name in marks[0]}
    peak, total = classes.pop("peak"), classes.pop("total")
    return Bytes(**classes, other=max(0, total - Bytes(**classes).total)), peak


def failures_of(audit: Audit, expect: Layout | None, most: dict[str, int]) -> tuple[str, ...]:
    """What does not hold of an expected layout and of budgets in bytes ("memory", "bytes")."""
    results = []
    if expect is not None and audit.understood.layout != expect:
        results.append(f"layout: expected {expect}, recorded {audit.understood.layout or 'none that is known'}")
    elif expect is not None:
        results += [f"beyond the plan: {text}" for text in audit.beyond]
    values = {"memory": audit.bytes.total if audit.bytes else None, "bytes": audit.sent}
    for name, limit in most.items():
        value = values[name]
        if value is None:
            results.append(f"{name}: not measured, since no optimizer step was seen")
        elif value > limit:
            results.append(f"{name}: {format_bytes(value)}, over the budget of {format_bytes(limit)}")
    return tuple(results)


def audit_lines(audit: Audit) -> Iterator[Renderable]:
    """One screen."""
    model = f" of {audit.model}" if audit.model else ""
    of = f"{audit.recorded} of {audit.ranks}" if audit.recorded < audit.ranks else f"{audit.ranks}"
    end = "ended by the audit" if audit.hung else f"exit code {audit.code}"
    if audit.recorded:
        yield audit.cause
    yield f"{of} ranks, {audit.steps} steps{model}, {format_time(audit.seconds)}, {end}"
    if not audit.recorded:
        yield "nothing was recorded: the program never called torch.distributed.init_process_group"
        return
    if audit.difference is not None and audit.difference.waiting:
        yield from (*audit.difference.waiting_lines(8), "")
    known = audit.understood
    yield f"layout: {known.layout if known.layout else 'not known'} ({known.confidence})"
    yield from (f"  {reason}" for reason in known.reasons)
    if audit.traffic:
        yield ""
        yield _traffic(audit)
        yield from (said for _, said in audit.rows)
    if audit.bytes is not None:
        names = ("parameters", "gradients", "optimizer", "saved", "other")
        parts = [(name, getattr(audit.bytes, name)) for name in names]
        yield "\nmemory: " + ", ".join(f"{name} {format_bytes(value)}" for name, value in parts if value)
        yield f"  at most {format_bytes(audit.peak or 0)} on a rank"
        yield from (f"  beyond the plan: {text}" for text in audit.beyond)
    for one in audit.late:
        lost, share = format_time(one.seconds), format_share(one.share)
        yield f"late: others waited {lost} ({share}) for rank {one.rank}, most at {one.where}"
    yield from (f"over: {text}" for text in audit.failures)
    yield from (f"advice: {text}" for text in audit.advice)
    yield f"not seen: {', '.join(audit.unseen)}"


def _traffic(audit: Audit) -> FittedTable:
    columns = (
        Column("what", left=True), Column("where", left=True), Column("call", left=True), Column("axis", left=True),
        Column("type", left=True), Column("calls"), Column("elements"), Column("due"),
    )  # fmt: skip
    table = FittedTable(columns, title="calls of one step of a rank")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    for row in audit.traffic:
        due = "" if row.due is None else "equal" if row.due == row.elements else format_count(row.due)
        where = row.phase or row.where
        dtype, elements = short.get(row.dtype, row.dtype), format_count(row.elements)
        table.add_row(row.what, where, row.op, row.axis, dtype, str(row.calls), elements, due)
    return table
