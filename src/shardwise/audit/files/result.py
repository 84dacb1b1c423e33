"""What files that others recorded tell about a job: who differs, who is late, what is exposed, where time goes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.audit.axes import Axis, axes
from shardwise.audit.calls import MESSAGES
from shardwise.audit.differences import Difference, first_difference, unfinished
from shardwise.audit.files.reading import read_files
from shardwise.audit.files.recording import Recording
from shardwise.audit.waits import Timelines, call_spans, clock_offsets, matched
from shardwise.audit.waterfall import Bar, Waterfall, bars, waterfall
from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.report.step_parts import Call as MatchedCall
from shardwise.report.step_parts import LateArrivals, late_ranks, waits
from shardwise.report.step_report import StepReport
from shardwise.report.table import Column, FittedTable, headed
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_ranks, format_things, format_time

SHOWN = 8
"""Rows of a table that may have one for each rank or collective."""


@dataclass(frozen=True)
class FileRead(Json):
    """One rank's recording that was read. unknown: questions that it cannot answer."""

    path: str
    kind: str
    rank: int
    calls: int
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class FilesAudit(Json):
    """The result for all files. Lists of calls are not in it."""

    files: tuple[FileRead, ...]
    refused: tuple[str, ...]
    missing: tuple[int, ...]
    """Ranks of the job without a file."""
    desync: Difference | None
    axes: tuple[Axis, ...]
    late: tuple[LateArrivals, ...]
    waiting: Mapping[int, float]
    """Rank -> seconds that it waited for others in all collectives."""
    waterfalls: tuple[Waterfall, ...]
    bars: tuple[Bar, ...]
    notes: tuple[str, ...]

    def tables(self) -> Iterator[Renderable]:
        """Texts and tables for a terminal."""
        yield self.conclusion
        yield from self.desync.waiting_lines(SHOWN) if self.desync else ()
        yield ""
        yield from self._file_lines()
        if self.axes:
            yield from ("", _axes_table(self.axes))
        if self.late:
            yield from ("", _late_table(self.late))
        if self.bars:
            yield from ("", self._bars_table())
        yield from (f"\n{note}" for note in self.notes)

    @property
    def conclusion(self) -> str:
        """The first line: the rank that differs, else the one that is late, else what is exposed."""
        if self.desync:
            return self.desync.text
        if self.late and self.late[0].late:
            row = self.late[0]
            line = f" at {row.where}" if row.where else ""
            times = f" in {row.calls} calls" if row.calls > 1 else ""
            return f"rank {row.rank} is late at {_kind(row)}{line}: by {format_time(row.late)}{times}"
        if self.bars:
            most = max(self.bars, key=lambda bar: bar.measured)
            return f"most of a step is {most.group}: {format_time(most.measured)}"
        ranks = tuple(sorted({file.rank for file in self.files}))
        calls = f"{sum(file.calls for file in self.files)} calls of {format_ranks(ranks)}"
        compared = len(ranks) > 1 and any(file.kind == "Flight Recorder" for file in self.files)
        return f"{calls}; none differs from the others" if compared else calls

    def _file_lines(self) -> Iterator[str]:
        kinds: dict[str, list[FileRead]] = {}
        for file in self.files:
            kinds.setdefault(file.kind, []).append(file)
        for kind, files in kinds.items():
            unknown = dict.fromkeys(what for file in files for what in file.unknown)
            yield f"{kind}: {format_ranks(tuple(file.rank for file in files))}, {sum(f.calls for f in files)} calls"
            if unknown:
                yield f"  does not tell {'; '.join(unknown)}"
        if self.missing:
            yield f"no file of {format_ranks(self.missing)}"
        for line in self.refused[:SHOWN]:
            yield f"not read: {line}"
        if len(self.refused) > SHOWN:
            yield f"and {len(self.refused) - SHOWN} more (--json has all)"

    def _bars_table(self) -> FittedTable:
        planned = any(bar.planned is not None for bar in self.bars)
        middle = [Column("planned", "seconds")] if planned else []
        columns = [Column("step", left=True), *middle, Column("measured", "seconds"), Column("share", "share", drop=1)]
        table = FittedTable([*columns, Column("cause", left=True, wraps=True)])
        step = sum(bar.measured for bar in self.bars)
        for bar in self.bars:
            plan = [bar.planned] if planned else []
            alone = bar.parts[0][2] if len(bar.parts) == 1 else ""
            table.add_row(bar.group, *plan, bar.measured, bar.measured / step, alone)
            for _, seconds, cause in bar.parts[:SHOWN] if len(bar.parts) > 1 else ():
                table.add_row("", *[None] * planned, seconds, seconds / step, cause)
            if rest := bar.parts[SHOWN:]:
                seconds = sum(part[1] for part in rest)
                table.add_row("", *[None] * planned, seconds, seconds / step, f"others ({len(rest)})")
        plan = [sum(bar.planned or 0.0 for bar in self.bars)] if planned else []
        ranks = tuple(sorted({one.rank for one in self.waterfalls}))
        steps = len({one.step for one in self.waterfalls})
        mean = "mean of " if len(self.waterfalls) > 1 else ""
        table.add_row("in all", *plan, step, 1.0, f"{mean}{format_things(steps, 'step')}, {format_ranks(ranks)}")
        return table


def _axes_table(rows: Sequence[Axis]) -> FittedTable:
    table = FittedTable([
        Column("axis", left=True, wraps=True, least=14), Column("groups", drop=1),
        Column("calls per rank", left=True, wraps=True, least=18), Column("bytes", "bytes"),
        *([Column("suggests", left=True, wraps=True, least=18)] if any(axis.guess for axis in rows) else []),
    ])  # fmt: skip
    for axis in rows:
        calls = ", ".join(f"{count:.3g} {op}" for op, count in axis.calls.items())
        apart = {0: ", uneven", 1: " next to each other"}.get(axis.stride, f", {axis.stride} apart")
        name = f"{axis.size} ranks{apart}" if axis.size else "group unknown"
        cells = name, axis.groups, calls, sum(axis.nbytes.values()), axis.guess
        table.add_row(*cells[: len(table.columns)])
    return table


def _kind(row: LateArrivals) -> str:
    return f"{row.op} of {format_bytes(row.nbytes)}" if row.nbytes else row.op


def _late_table(rows: Sequence[LateArrivals]) -> FittedTable:
    lines = ["line"] if any(row.where for row in rows) else []
    table = headed(["last to come", "to", *lines], ["calls", "late by", "longest wait"])
    for row in rows[:SHOWN]:
        where = [Path(row.where).name] if lines else []
        numbers = str(row.calls), format_time(row.late), format_time(row.waited)
        table.add_row(f"rank {row.rank}", _kind(row), *where, *numbers)
    return table


def audit_files(paths: Sequence[Path], plan: StepReport | None = None) -> FilesAudit:
    """Read files and folders, and answer what they can. plan: a prediction with its time.

    Raises `UserError` for files that cannot be read, and a plan without times.
    """
    if plan is not None and not (plan.timing and plan.timing.get("parts")):
        raise UserError("the plan has no time: predict it with shardwise estimate ... --cluster CLUSTER --json")
    parts = plan.timing["parts"] if plan is not None and plan.timing else None
    recordings, refused = read_files(paths)
    kinds: dict[str, dict[int, Recording]] = {}
    for one in recordings:
        kinds.setdefault(one.kind, {})[one.rank] = one
    dumped = kinds.get("Flight Recorder", {})
    dumps = list(dumped.values())
    desync = first_difference(dumps) or unfinished(dumps)
    timed = next((kinds[kind] for kind in ("Kineto", "Flight Recorder") if kind in kinds), {})
    if timed is kinds.get("Kineto"):
        timed = {rank: _with_dump(one, dumped[rank]) if rank in dumped else one for rank, one in timed.items()}
    timed, notes = _grouped(timed)
    lines, later = _on_one_clock(timed, notes)
    came = matched({rank: lines[rank] for rank in later})
    if _together(came) < 0.5:
        came = []
        notes = ["calls of the ranks do not match in time, such as of traces of other steps: no waits are shown"]
    came = [call for call in came if len(call) == len(next(iter(call.values())).args["ranks"])]
    walls = tuple(_waterfalls(timed, lines, later, came))
    # The calls of one kind of file: of the one that has most groups, then bytes.
    lists = [[call for one in by_rank.values() for call in one.calls] for by_rank in kinds.values()]
    lists.append([call for one in timed.values() for call in one.calls])
    counted = max(lists, key=lambda made: (sum(bool(c.group) for c in made), sum(bool(c.inputs) for c in made)))
    files = tuple(FileRead(one.path, one.kind, one.rank, len(one.calls), one.unknown) for one in recordings)
    ranks, worlds = {one.rank for one in recordings}, [one.world for one in recordings if one.world]
    members = {rank for one in recordings for call in one.calls for rank in call.group}
    waited = [waits(call) for call in came]
    waiting = {rank: sum(one.get(rank, 0) for one in waited) / 1e9 for rank in timed}
    missing = tuple(sorted((set(range(max(worlds, default=0))) | members) - ranks))
    return FilesAudit(
        files, tuple(refused), missing, desync, tuple(axes(counted)), tuple(late_ranks(came)), waiting, walls,
        bars(walls, parts), tuple(notes),
    )  # fmt: skip


def _with_dump(trace: Recording, dump: Recording) -> Recording:
    """A trace's calls with the groups and lines of a dump in which they are in the same order, the last such place."""

    def kinds(one: Recording) -> list[tuple[str, int]]:
        return [(call.op, call.inputs) for call in one.calls if call.op not in MESSAGES]

    mine, theirs = kinds(trace), kinds(dump)
    places = range(len(theirs) - len(mine), -1, -1)
    at = next((i for i in places if theirs[i : i + len(mine)] == mine), None)
    if not mine or at is None:
        return trace
    known = iter([call for call in dump.calls if call.op not in MESSAGES][at:])
    calls = []
    for call in trace.calls:
        twin = call if call.op in MESSAGES else next(known)
        calls.append(replace(call, group=twin.group or call.group, where=twin.where, phase=twin.phase))
    return replace(trace, calls=tuple(calls))


def _grouped(recordings: dict[int, Recording]) -> tuple[dict[int, Recording], list[str]]:
    """(recordings, notes), where files name no groups with the group of all ranks, if all ranks' calls agree."""
    lists = [one.calls for one in recordings.values()]
    known = len(lists) < 2 or any(call.group or call.peer is not None for calls in lists for call in calls)
    known = known or any(one.world not in (0, len(lists)) or one.groups for one in recordings.values())
    if known or len({tuple((call.op, call.dtype) for call in calls) for calls in lists}) > 1:
        return recordings, []
    members = tuple(sorted(recordings))
    guessed = {
        rank: replace(one, calls=tuple(replace(call, group=members) for call in one.calls))
        for rank, one in recordings.items()
    }
    if _together(matched({rank: call_spans(one.calls) for rank, one in guessed.items()})) <= 0.5:
        return recordings, []
    return guessed, ["groups are not in the files: all ranks make the same calls, so they are taken as one group"]


def _on_one_clock(recordings: Mapping[int, Recording], notes: list[str]) -> tuple[Timelines, dict[int, int]]:
    """(calls of all ranks, by how many nanoseconds each is ahead of its file); a rank of a host without a common
    collective has no number."""
    lines = {rank: call_spans(one.calls) for rank, one in recordings.items()}
    hosts = {rank: one.host for rank, one in recordings.items()}
    if len(recordings) > 1 and len(set(hosts.values())) == 1 and _together(matched(lines)) < 0.5:
        hosts = {rank: str(rank) for rank in hosts}
    if len(set(hosts.values())) < 2:
        return lines, dict.fromkeys(lines, 0)
    offsets = clock_offsets(lines, hosts)
    notes.append("clocks of different hosts are set by the ends of collectives that their ranks left together")
    later = {rank: offsets[host] for rank, host in hosts.items() if host in offsets}
    return {rank: tuple(s.later(later.get(rank, 0)) for s in spans) for rank, spans in lines.items()}, later


def _together(calls: Sequence[MatchedCall]) -> float:
    """Share of collectives that no rank left before the last one came; 1 without any."""
    results = [max(one.start for one in call.values()) <= min(one.stop for one in call.values()) for call in calls]
    return sum(results) / len(results) if results else 1.0


def _waterfalls(
    recordings: Mapping[int, Recording], lines: Timelines, later: Mapping[int, int], calls: Sequence[MatchedCall]
) -> Iterator[Waterfall]:
    for rank, one in recordings.items():
        if one.spans is None:
            continue
        offset = later.get(rank, 0)
        everything = [(span.start - offset, span.stop - offset) for span in lines[rank]]
        everything += [span for spans in one.spans.values() for span in spans]
        whole = (min(span[0] for span in everything), max(span[1] for span in everything)) if everything else None
        for name, window in one.windows or ([("whole trace", whole)] if whole else []):
            if window[1] > window[0]:
                yield waterfall(rank, name, window, one.spans, lines[rank], calls, one.device, offset)
