"""Workers and servers: who read which weights and who waited for whom, in a run or in virtual time."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise import validation
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.keys import CHOICES
from shardwise.layout.recorded_run import recorded_run
from shardwise.layout.sync import names_of
from shardwise.layout.virtual_run import virtual_run
from shardwise.report.run_directory import RunDirectory
from shardwise.report.units import format_count, format_share, format_time
from shardwise.schedule.outer_rounds import OuterRound, record_of_rounds
from shardwise.schedule.stragglers import SlowRank, Stragglers
from shardwise.schedule.traffic import WorkerTraffic
from shardwise.schedule.update_record import STRAGGLER, UpdateRecord
from shardwise.studio.columns import Columns, How, Table, View, command_line, exact
from shardwise.studio.data.runs import listed, run_of
from shardwise.studio.query import Query

KINDS = ("fresh", "stale", "dropped", "idle", "update")
"""Kinds of events, by number."""
_FRESH, _STALE, _DROPPED, _IDLE, _UPDATE = range(5)
INCAST = Path(validation.__file__).with_name("incast.json")
MOST_WAITS = 12
"""Pairs of workers that are drawn: the ones with the longest waits."""


def gradients_table(record: UpdateRecord, worker: str) -> Table:
    """Every listed gradient: what it read, when, and what became of it."""
    columns: Columns = {
        worker: ("", lambda one: one.worker),
        "step": ("", lambda one: one.step),
        "version read": ("", lambda one: one.read),
        "updates behind": ("", lambda one: one.staleness),
        "began": ("seconds", lambda one: one.started),
        "pushed": ("seconds", lambda one: one.arrived),
        "answered": ("seconds", lambda one: None if math.isnan(one.answered) else one.answered),
        "waited for": ("", lambda one: one.waited_for),
        "in update": ("", lambda one: "dropped" if one.update is None else one.update + 1),
    }
    title = "Every gradient"
    if record.left_out:
        title = f"The first {len(record.gradients):,} gradients; {record.left_out:,} later ones are counted alone"
    return Table.of(title, record.gradients, columns)


def staleness_table(record: UpdateRecord) -> Table:
    """Gradients by the updates between the weights that they read and their own update."""
    rows, total = sorted(record.staleness.items()), sum(record.staleness.values())
    columns = {"updates behind": [behind for behind, _ in rows], "gradients": [count for _, count in rows]}
    return Table("Staleness", columns | {"share": [count / total for _, count in rows]}, {"share": "share"})


def workers_table(record: UpdateRecord, worker: str) -> Table:
    """A row per worker."""
    units = {worker: "", "gradients": "", "dropped": "", "computing": "seconds", "waiting": "seconds"}
    units |= {"share of waiting": "share", "a gradient": "seconds", "over the median": ""}
    rows = [
        (
            number, tally.gradients, tally.dropped, tally.computing, tally.waiting, tally.waiting_share,
            tally.computing / tally.gradients if tally.gradients else 0.0, slowness,
        )
        for number, (tally, slowness) in enumerate(zip(record.workers, record.slowness(), strict=True))
    ]  # fmt: skip
    return Table.of_rows("Each of them over the whole run", units, rows)


def waits_table(record: UpdateRecord, worker: str) -> Table:
    """Seconds that one worker waited for another one's gradient, the longest first."""
    waits = [
        (number, other, seconds, seconds / tally.waiting)
        for number, tally in enumerate(record.workers)
        for other, seconds in tally.waited_for.items()
        if seconds
    ]
    waits.sort(key=lambda row: (-row[2], row[:2]))
    units = {worker: "", "waited for": "", "time": "seconds", "of its waiting": "share"}
    return Table.of_rows("Who waits for whom", units, waits)


def compared_table(records: Mapping[str, UpdateRecord]) -> Table:
    """A row per way to agree. records: layout -> its record over as many steps."""
    columns: Columns = {
        "layout": ("", lambda item: item[0]),
        "takes": ("seconds", lambda item: item[1].seconds),
        "waiting": ("share", lambda item: item[1].waiting_share),
        "updates behind, mean": ("", lambda item: item[1].mean_staleness),
        "at most": ("", lambda item: max(item[1].staleness, default=0)),
        "gradients dropped": ("", lambda item: item[1].dropped),
    }
    return Table.of("Ways to agree", list(records.items()), columns)


def rounds_table(rounds: Sequence[OuterRound]) -> Table:
    """A row per round of rank 0's replica."""
    columns: Columns = {
        "round": ("", lambda one: one.number),
        "steps": ("", lambda one: one.steps),
        "last step": ("", lambda one: one.last_step),
        "time": ("seconds", lambda one: one.ended - one.started),
        "loss of all replicas": ("", lambda one: None if math.isnan(one.loss) else one.loss),
    }
    return Table.of("Rounds of rank 0's replica", rounds, columns)


def incast_table() -> Table:
    """A row per number of workers that push to one server, or reduce over a ring of the same hosts: measured step, and
    its prediction from that day (benchmarks/incast.py)."""
    columns: Columns = {
        "workers": ("", lambda row: row["workers"]),
        "over": ("", lambda row: row["how"]),
        "measured step": ("seconds", lambda row: row["step_s"]),
        "fastest": ("seconds", lambda row: min(row["seconds"])),
        "slowest": ("seconds", lambda row: max(row["seconds"])),
        "predicted": ("seconds", lambda row: row["predicted_s"]),
    }
    return Table.of("Steps by the number of workers", _incast()["results"], columns)


def incast_how() -> How:
    """How the steps were measured, and why one port takes longer."""
    run = _incast()
    steps = [
        f"{run['command']}, {run['date'][:10]}: hosts of shardwise lab, one for each worker and one for the server, "
        f"with links of {run['mbit']:g} Mb/s; {format_count(run['parameters'])} parameters in bf16; medians.",
        "The server's port receives the gradients of all workers and sends the weights to each of them, so a step "
        "grows with their number. On a ring each port carries 2 (N - 1) / N times the gradients.",
    ]
    return How(steps, source="docs/servers.md#time")


def _incast() -> dict[str, Any]:
    run: dict[str, Any] = json.loads(INCAST.read_text())
    return run


def traffic_table(traffic: Sequence[WorkerTraffic]) -> Table:
    """Messages of the whole run by worker, server and direction."""
    units = {"worker": "", "server": "", "operation": "", "messages": "", "bytes": "bytes"}
    return Table.of_rows("Messages of the run", units, traffic)


def drawn(record: UpdateRecord) -> dict[str, Any]:
    """Events: a row per worker with its gradients and its waits, and a last row with the updates.

    `label` is the version read, or made; `gradient` the row of the gradient's table, -1 for an update.
    """
    rows: list[tuple[int, float, float, int, int, int]] = []
    last: dict[int, float] = {}
    for place, one in enumerate(record.gradients):
        kind = _DROPPED if one.staleness is None else _STALE if one.staleness else _FRESH
        rows.append((one.worker, one.started, one.arrived - one.started, kind, one.read, place))
        if one.waited_for is not None and one.answered > one.arrived:
            rows.append((one.worker, one.arrived, one.answered - one.arrived, _IDLE, one.read, place))
        if one.update is not None:
            last[one.update] = max(one.arrived, last.get(one.update, 0.0))
    updates = [(record.first + i, at) for i, at in enumerate(record.updated) if record.first + i in last]
    rows += [
        (len(record.workers), last[version], max(0.0, at - last[version]), _UPDATE, version + 1, -1)
        for version, at in updates
    ]
    types = {"rank": "u2", "start": "f8", "seconds": "f8", "kind": "u1", "label": "i4", "gradient": "i4"}
    columns = list(zip(*rows, strict=True)) or [()] * len(types)
    return {name: np.array(values, dtype) for (name, dtype), values in zip(types.items(), columns, strict=True)}


def worker_bars(record: UpdateRecord, worker: str) -> list[dict[str, Any]]:
    """A bar per worker: computing and waiting."""
    return [
        {
            "label": f"{worker} {number}",
            "detail": f"{slowness:.2f} of median" + (", slow" if slowness >= STRAGGLER else ""),
            "total": tally.computing + tally.waiting,
            "parts": [["computing", tally.computing], ["idle", tally.waiting]],
        }
        for number, (tally, slowness) in enumerate(zip(record.workers, record.slowness(), strict=True))
    ]


def stragglers(record: UpdateRecord) -> list[int]:
    """Workers whose gradients take longer than those of the others."""
    return [worker for worker, slowness in enumerate(record.slowness()) if slowness >= STRAGGLER]


NONE, ALL = "none", "all"
"""In place of a run's name: a simulation. In place of a worker: no slow one, every one."""
LOCKSTEP = "In lockstep every gradient is computed with the version of its step."


def data(params: Mapping[str, str], runs: Path) -> View:
    """The workers of a run on disk, or with run=none those of a simulation. Raises `UserError` for a run that there is
    not, and for an illegal layout."""
    query = Query(params)
    names = listed(runs)
    run, server = query.text("run", NONE), query.whole("server", 0, 0, 1023)
    layout, steps, seconds, stragglers = _asked(query)
    query.done()
    choices: dict[str, list[Any]] = {"run": [NONE, *names], "sync": list(CHOICES["sync"])}
    choices |= {"slow": [NONE, ALL, *range(layout.dp)], "server": [0]}
    if run != NONE:
        return _view_of_run(query, choices, run_of(runs, names, run), server)
    records = {each: virtual_run(each, steps, seconds, stragglers) for each in _ways(layout, query.state)}
    words = ["--steps", steps, "--gradient", f"{exact(1e3 * seconds)}ms"]
    words += ["--slow", stragglers] if stragglers.slow else []
    commands = {each: command_line("sync", "simulate", each, *words, "--seed", stragglers.seed) for each in records}
    head = [f"Simulated: {layout}, slow: {stragglers}, {steps} steps of {format_time(seconds)} a gradient."]
    tables, more = _figures(layout, records[layout])
    how = _explained(tables, head, commands[layout], _SOURCE)
    tables["compared"] = compared_table({str(each): record for each, record in records.items()})
    how["compared"] = How([*head, *_LINES["compared"]], " && ".join(commands.values()), _SOURCE)
    return View(query.state, choices, tables, how, {**more, "layout": str(layout), "status": "", "servers": 1})


def _ways(layout: Layout, state: Mapping[str, Any]) -> list[Layout]:
    """The layout, and the other ways in which as many workers may agree, with the numbers of the state."""
    dp = layout.dp
    ways = [layout, Layout(dp=dp, sync="ps"), Layout(dp=dp, sync="ssp", staleness=state["staleness"] or 1)]
    ways += [Layout(dp=dp, sync="ps", backup=1)] if dp > 1 else []
    ways += [Layout(dp=dp, sync="async"), Layout(dp=dp, sync="local", every=state["every"])]
    return list(dict.fromkeys(ways))


def _asked(query: Query) -> tuple[Layout, int, float, Stragglers]:
    """The layout, steps, seconds of a gradient and slow ranks of a simulation."""
    sync = query.word("sync", "ssp", CHOICES["sync"])
    workers = query.whole("workers", 4, 1, 32)
    own = {"ssp": "staleness", "ps": "backup", "local": "every"}
    numbers = {
        "staleness": query.whole("staleness", 2, 0, 32),
        "backup": query.whole("backup", 0, 0, 31),
        "every": query.whole("every", 4, 1, 64),
    }
    steps, milliseconds = query.whole("steps", 24, 1, 400), query.number("gradient", 100.0, 0.001, 1e6)
    slow = query.text("slow", "0")
    factor, probability = query.number("factor", 3.0, 1.0, 100.0), query.number("probability", 0.25, 0.01, 1.0)
    seed = query.whole("seed", 0, 0, 1 << 31)
    if slow not in (NONE, ALL) and not slow.isdecimal():
        raise UserError(f"slow={slow}: give {NONE}, {ALL}, or the number of a worker")
    used: dict[str, Any] = {own[sync]: numbers[own[sync]]} if sync in own else {}
    layout = Layout(dp=workers, sync=sync, **used)
    ranks = () if slow == NONE or factor == 1 else (SlowRank(None if slow == ALL else int(slow), factor, probability),)
    return layout, steps, milliseconds / 1e3, Stragglers(ranks, seed)


_SOURCE = (
    "Ho et al. 2013 (SSP); Chen et al. 2016 (backup workers); schedule/staleness.py decides here and in the servers"
)
_LINES: dict[str, list[str]] = {
    "gradients": [
        "The number in a bar is the version that the gradient read: the updates in its weights.",
        "A gradient lasts from when its worker began it to its arrival at the server; a wait from there to the answer, "
        "which the gradient of another worker lets the server give.",
    ],
    "staleness": [
        "Staleness: updates between the weights that a gradient read and its own update; dropped ones left out."
    ],
    "workers": [
        "Share of waiting = waiting / (waiting + computing). Over the median: its mean gradient over the median's."
    ],
    "waits": ["A wait counts for the worker whose gradient arrived last before the answer."],
    "compared": [
        "The same slow steps, as far as each way to agree comes to them; until as many steps of text are done."
    ],
    "rounds": [
        "Times and steps of rank 0's replica (events.jsonl); the loss is the mean over the tokens of all replicas."
    ],
    "traffic": ["The push and pull rows of a step's ledger, as often as the record has gradients of the worker."],
}


def _figures(layout: Layout, record: UpdateRecord) -> tuple[dict[str, Table], dict[str, Any]]:
    worker, meeting = names_of(layout)
    tables = {"gradients": gradients_table(record, worker), "workers": workers_table(record, worker)}
    waits = waits_table(record, worker)
    if waits.columns["time"]:
        tables["waits"] = waits
    if not layout.local_sgd:
        tables["incast"] = incast_table()
    stale = bool(set(record.staleness) - {0})
    if stale:
        tables["staleness"] = staleness_table(record)
    more = {
        "kinds": KINDS, "events": drawn(record), "count": len(record.workers),
        "names": [worker, meeting], "bars": worker_bars(record, worker), "drawn_waits": MOST_WAITS,
        "summary": {**record.summary(), "seconds": record.seconds}, "stragglers": stragglers(record),
        "sentence": _sentence(layout, record, stale),
    }  # fmt: skip
    return tables, more


def _sentence(layout: Layout, record: UpdateRecord, stale: bool) -> str:
    worker, _ = names_of(layout)
    slow = ", ".join(map(str, stragglers(record)))
    waits = f"{format_share(record.waiting_share)} of the {worker}s' time is waiting"
    text = f"{waits}; slow: {worker} {slow}." if slow else f"{waits}."
    if layout.local_sgd:
        return f"Between two outer steps no replica waits, and none reads what another has learned. {text}"
    if record.dropped:
        text += (
            f" {record.dropped:,} of {record.pushed:,} gradients came after the update of their step, and are dropped."
        )
    if stale:
        return f"A gradient's weights are {record.mean_staleness:.2f} updates behind on average. {text}"
    return f"{LOCKSTEP} {text}"


def _view_of_run(query: Query, choices: dict[str, list[Any]], here: RunDirectory, server: int) -> View:
    recorded = recorded_run(here)
    command = command_line("sync", "show", here.path)
    records = recorded.records or ((record_of_rounds(recorded.rounds),) if recorded.rounds else ())
    more: dict[str, Any] = {"layout": str(recorded.layout), "servers": len(recorded.records)}
    choices["server"] = list(range(max(1, more["servers"])))
    more |= {"status": str(here.run.get("status", ""))}
    if not records:
        return View(query.state, choices, {}, {}, more | {"sentence": _nothing(recorded.layout)})
    if server >= len(records):
        raise UserError(f"server={server}: this run has {len(records)}, from 0 on")
    tables, drawn = _figures(recorded.layout, records[server])
    if recorded.rounds:
        tables["rounds"] = rounds_table(recorded.rounds)
        # Only rank 0's replica writes events: nothing is known of the others' times, or of waiting.
        del tables["workers"], drawn["bars"], drawn["summary"]["waiting_share"]
        drawn["sentence"] = "Rounds of rank 0's replica; each ends with an outer step of all replicas."
    if recorded.traffic:
        tables["traffic"] = traffic_table(recorded.traffic)
    head = [f"Measured by server {server} in seconds since this start of the run." if recorded.records else "Measured."]
    how = _explained(tables, head, command)
    return View(query.state, choices, tables, how, more | drawn)


def _explained(tables: Mapping[str, Table], head: list[str], command: str, source: str = "") -> dict[str, How]:
    """How each table came about. Incast is a measurement of its own, whatever is shown beside it."""
    how = {name: How([*head, *_LINES.get(name, ())], command, source) for name in tables}
    return how | {name: incast_how() for name in how if name == "incast"}


def _nothing(layout: Layout) -> str:
    if layout.served:
        return "No update is recorded yet: servers hand over their records at validations, checkpoints and the end."
    if layout.local_sgd:
        return "No round has begun yet."
    return LOCKSTEP
