"""A recording as a run on disk (`report.run_directory`), which the studio's Runs view opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.audit.axes import DATA
from shardwise.audit.reading import RankRecording
from shardwise.audit.result import Audit
from shardwise.audit.understanding import steady_step
from shardwise.audit.waits import call_spans
from shardwise.report.rank_timelines import RankTimeline, RankTimelines
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, Role, StepReport

_UNPLANNED = "Saved tensors and other bytes are the recorded ones: only state is predicted of a layout alone."


def keep_run(audit: Audit, recordings: Sequence[RankRecording], folder: Path) -> None:
    """Complete the run in a recording's folder: steps, both reports, the timelines of a steady and of the last step.

    Raises `UserError` when it cannot be written.
    """
    ended = "ended by the audit" if audit.hung else "failed" if audit.code else "finished"
    layout, model = str((recordings and audit.understood.layout) or ""), {"name": audit.model or ""}
    config = {"layout": layout, "model": model, "steps": audit.steps}
    with RunDirectory.open(folder) as run:
        cause = audit.cause if recordings else "nothing was recorded"
        run.update(config=config, ranks=audit.ranks, status=f"{ended}: {cause}")
        for one in recordings[:1]:
            times = [one.begin, *(step.time for step in one.steps)]
            for begin, step in zip(times, one.steps, strict=False):
                run.append({"step": step.step, "loss": None, "seconds": step.time - begin, "time": step.time})
            last = len(one.steps) - (not (audit.hung or audit.code))
            for number in dict.fromkeys((steady_step(one), max(0, last))):
                timelines = _timelines(recordings, number, audit.understood.axes_of)
                run.write_timelines(timelines, last=number != steady_step(one))
        if audit.bytes and audit.traffic:
            state = ("parameters", "gradients", "optimizer")
            due = {name: getattr(audit.planned or audit.bytes, name) for name in state}
            sides = {"measured": (audit.bytes, tuple(said for _, said in audit.rows))}
            sides["predicted"] = replace(audit.bytes, **due), (_UNPLANNED,)
            for source, (held, notes) in sides.items():
                role = Role("all", tuple(one.rank for one in recordings), held, _ledger(audit, source == "predicted"))
                StepReport(source, model, layout, {}, "", (role,), notes=notes).write(run.report(source))  # type: ignore[arg-type]


def _ledger(audit: Audit, due: bool) -> tuple[LedgerRow, ...]:
    """The calls of each kind in a step as one row, with the elements of all."""
    rows = []
    for row in audit.traffic:
        elements, phase = row.due if due else row.elements, row.phase or "optimizer"
        if elements and row.dtype in DTYPE_BYTES:
            rows.append(LedgerRow(phase, row.op, row.axis or DATA, row.what, row.dtype, elements, 1))  # type: ignore[arg-type]
    return tuple(rows)


def _timelines(recordings: Sequence[RankRecording], step: int, axes: Mapping[tuple[int, ...], str]) -> RankTimelines:
    """The calls of a step since its first one; one that has not ended lasts until the step's last moment."""
    made = {one.rank: [call for call in one.calls if call.step == step] for one in recordings}
    moments = [at for some in made.values() for call in some for at in (call.begin, call.end) if at is not None]
    first, end = min(moments, default=0.0), max(moments, default=0.0)
    ranks = []
    for rank, some in made.items():
        known = (replace(call, end=call.end or end, comm=axes.get(call.group, call.comm)) for call in some)
        named = (replace(span, name=f"{span.name} {span.args['where']}".strip()) for span in call_spans(known))
        ranks.append(RankTimeline(rank, 0, 0, tuple(span.later(-round(first * 1e9)) for span in named)))
    return RankTimelines(step + 1, len(made), tuple(ranks))
