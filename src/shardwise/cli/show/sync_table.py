"""Workers of a run or of a simulation on a terminal: staleness, waiting, and messages of the whole run."""

import math
from collections.abc import Iterator, Sequence

from shardwise.layout import Layout
from shardwise.layout.recorded_run import RecordedRun
from shardwise.layout.sync import names_of
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.schedule.outer_rounds import OuterRound
from shardwise.schedule.traffic import WorkerTraffic
from shardwise.schedule.update_record import STRAGGLER, UpdateRecord

_BAR = 30
_MOST_ROWS = 12
"""Rows of the histogram and of rounds; the rest is joined into one, or left out."""
LOCKSTEP = "lockstep: every gradient of a step is computed with the version of that step"


def sync_tables(
    layout: Layout, records: Sequence[UpdateRecord], recorded: RecordedRun | None = None
) -> Iterator[Renderable]:
    """Texts and tables of records, and of what else a run has recorded."""
    rounds = recorded.rounds if recorded else ()
    if layout.sync == "allreduce" and not records:
        yield LOCKSTEP
    elif layout.served and not records:
        yield "no update is recorded: the run has not reached its first validation, checkpoint or end"
    for server, record in enumerate(records):
        yield from server_tables(layout, record, f"server {server}: " if len(records) > 1 else "")
    if rounds:
        yield rounds_table(rounds)
    if recorded and recorded.traffic:
        yield ""
        yield traffic_table(recorded.traffic)


def server_tables(layout: Layout, record: UpdateRecord, before: str = "") -> Iterator[Renderable]:
    """Counts, staleness and workers of one server."""
    worker, meeting = names_of(layout)
    yield f"{before}{headline(layout, record)}"
    if not record.dropped and set(record.staleness) <= {0} and not layout.local_sgd:
        yield LOCKSTEP
    if record.left_out:
        yield f"{record.left_out:,} gradients after the first {len(record.gradients):,} are counted and not listed"
    if set(record.staleness) - {0}:
        yield ""
        yield staleness_table(record)
    yield ""
    yield workers_table(record, worker, meeting)


def headline(layout: Layout, record: UpdateRecord) -> str:
    """Updates, gradients and staleness in one sentence."""
    gradients = "rounds of replicas" if layout.local_sgd else "gradients"
    text = f"{record.updates:,} {names_of(layout)[1] if layout.sync == 'local' else 'update'}s by {record.pushed:,} "
    text += gradients + (f", {record.dropped:,} of them dropped" if record.dropped else "")
    if set(record.staleness) - {0}:
        text += f"; staleness {record.mean_staleness:.2f} on average, {max(record.staleness)} at most"
    return text


def staleness_table(record: UpdateRecord) -> FittedTable:
    """Histogram of the updates between the weights that a gradient read and its own update."""
    columns = (Column("updates behind"), Column("gradients"), Column("share"), Column("", left=True))
    table = FittedTable(columns, title="staleness")
    total, most = sum(record.staleness.values()), max(record.staleness.values())
    rows = sorted(record.staleness.items())
    shown = [(str(behind), count) for behind, count in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        rest = rows[_MOST_ROWS - 1 :]
        shown[-1] = f"{rest[0][0]} or more", sum(count for _, count in rest)
        most = max(most, shown[-1][1])
    for behind, count in shown:
        table.add_row(behind, f"{count:,}", format_share(count / total), "█" * max(1, round(_BAR * count / most)))
    return table


def workers_table(record: UpdateRecord, worker: str, meeting: str) -> FittedTable:
    """A row per worker: its gradients, its times, and for whom it waited longest."""
    names = ("gradients", "dropped", "computes", "waits", "share", "of median")
    columns = (Column(worker), *map(Column, names), Column("most for", left=True, drop=1))
    table = FittedTable(columns, title=f"{worker}s: computing, and waiting for the {meeting}")
    for number, (tally, slowness) in enumerate(zip(record.workers, record.slowness(), strict=True)):
        longest = max(tally.waited_for, key=lambda other: tally.waited_for[other], default=None)
        named = "" if longest is None or not tally.waited_for[longest] else f"{worker} {longest}"
        mark = " slow" if slowness >= STRAGGLER else ""
        table.add_row(
            str(number), f"{tally.gradients:,}", f"{tally.dropped:,}", format_time(tally.computing),
            format_time(tally.waiting), format_share(tally.waiting_share), f"{slowness:.2f}{mark}", named,
        )  # fmt: skip
    return table


def rounds_table(rounds: Sequence[OuterRound]) -> FittedTable:
    """A row per round of rank 0's replica: the last ones of a long run."""
    columns = (Column("round"), Column("steps"), Column("last step"), Column("time"), Column("loss of all replicas"))
    title = "rounds of rank 0's replica; each ends with an outer step"
    if len(rounds) > _MOST_ROWS:
        title += f"; the last {_MOST_ROWS} of {len(rounds):,}"
    table = FittedTable(columns, title=title)
    for one in rounds[-_MOST_ROWS:]:
        loss = "" if math.isnan(one.loss) else f"{one.loss:.4f}"
        row = (str(one.number), str(one.steps), str(one.last_step), format_time(one.ended - one.started), loss)
        table.add_row(*row)
    return table


def traffic_table(traffic: Sequence[WorkerTraffic]) -> FittedTable:
    """Messages of the whole run by worker and server."""
    columns = (
        Column("worker"), Column("server"), Column("pushes"), Column("pushed"), Column("pulls"), Column("pulled"),
    )  # fmt: skip
    table = FittedTable(columns, title="messages of the whole run")
    for push, pull in zip(traffic[::2], traffic[1::2], strict=True):
        sizes = (f"{push.messages:,}", format_bytes(push.nbytes), f"{pull.messages:,}", format_bytes(pull.nbytes))
        table.add_row(str(push.worker), str(push.server), *sizes)
    return table
