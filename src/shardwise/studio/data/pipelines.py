"""Pipelines: one schedule beside another one as events in time, with bubbles, peaks and what each rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.report.units import format_share, format_time
from shardwise.schedule.pipeline import PipelineSchedule, build, find, generators
from shardwise.schedule.pipeline.action import COMPUTE, Kind, without_collections
from shardwise.schedule.pipeline.closed_forms import FORMS, PipelineShape
from shardwise.schedule.pipeline.memory import Level, Peak, levels, peak
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.studio.columns import Columns, How, Table, View, command_line, exact
from shardwise.studio.query import Query

KINDS = ("forward", "backward", "input", "weight", "overlap", "message", "collective")
"""Kinds of events, by number."""
MOST_EVENTS, MOST_LISTED = 1_500_000, 100_000
"""Events that are drawn, and actions that are listed, at most."""

MICROS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Micro-batches of the bubble's curve, besides the state's own."""
MOST_SIMULATED = 20_000
"""Actions of a schedule up to which it is on the curve."""

FRAMES = 60
"""Steps in which a step of training is played."""

_MESSAGE, _COLLECTIVE, _FREE = 5, 6, 7
_KIND = {"F": 0, "B": 1, "I": 2, "W": 3, "OVERLAP_F_B": 4, "RESHARD": _FREE} | {
    kind: _MESSAGE if kind.startswith(("SEND", "RECV")) else _COLLECTIVE
    for kind in get_args(Kind)
    if kind not in COMPUTE and kind != "RESHARD"
}
_COLUMNS = {"rank": "u2", "start": "f8", "seconds": "f8", "kind": "u1", "micro": "i4", "stage": "u2"}
"""Columns of the events, with their types."""


def data(params: Mapping[str, str]) -> View:
    """Two schedules of the same model, times and micro-batches. Raises `UserError` for numbers that a schedule is not
    for, and for more events than are drawn."""
    query, names, a, b, ranks, micro, virtual, milliseconds, hop = _asked(params)
    simulated = {"a": _simulated(a, ranks, micro, virtual, **milliseconds, hop=hop)}
    if b != "none":
        simulated["b"] = _simulated(b, ranks, micro, virtual, **milliseconds, hop=hop)
    tables, how = {}, {}
    for side, one in simulated.items():
        tables[side] = _by_rank(one)
        how[side] = _how(one.simulated, milliseconds, hop)
    how["events"] = how["a"]
    tables["events"] = _events_table(simulated["a"].simulated)
    tables["compared"] = _compared(simulated)
    how["compared"] = How(
        [f"{side}: {line}" for side, one in simulated.items() for line in _bubble_lines(one.simulated, milliseconds)],
        " && ".join(dict.fromkeys(_command(one.schedule, milliseconds, hop) for one in simulated.values())),
    )
    more: dict[str, Any] = {side: _drawn(one) for side, one in simulated.items()}
    more |= {"kinds": KINDS, "moments": _moments(simulated, [one["events"] for one in more.values()])}
    return View(query.state, {"a": names, "b": ["none", *names]}, tables, how, more)


def curve(params: Mapping[str, str]) -> View:
    """The bubble of both schedules against the number of micro-batches, everything else as in the state."""
    query, _, a, b, ranks, micro, virtual, milliseconds, hop = _asked(params)
    micros = sorted({*MICROS, micro})
    columns: dict[str, list[Any]] = {"micro-batches": micros}
    for side, name in zip("AB", (a, b), strict=True):
        if name != "none":
            columns[f"{side}, {name}"] = [_bubble(name, ranks, item, virtual, milliseconds, hop) for item in micros]
    shown = Table("Bubble of the total", columns, dict.fromkeys(list(columns)[1:], "share"))
    lines = [
        "Each point is a simulation with that many micro-batches: idle over the total of all ranks.",
        f"Left out: numbers that the schedule cannot have, and those with more than {MOST_SIMULATED:,} actions.",
    ]
    commands = (
        _command_of(name, ranks, micro, _chunks(name, ranks, micro, virtual), milliseconds, hop)
        for name in (a, b)
        if name != "none"
    )
    return View(query.state, {}, {"curve": shown}, {"curve": How(lines, " && ".join(dict.fromkeys(commands)))})


def _bubble(name: str, p: int, m: int, v: int, milliseconds: Mapping[str, float], hop: float) -> float | None:
    """Idle over the total; None for numbers that the schedule is not for, and where there would be too many actions."""
    virtual = _chunks(name, p, m, v)
    if find(name).objection(p, m, virtual) or p * m * virtual * 3 > MOST_SIMULATED:
        return None
    with without_collections():
        schedule = build(name, p, m, virtual)
        forward, inputs, weights = (milliseconds[item] / 1e3 for item in ("F", "I", "W"))
        times = Times.shared(schedule, forward, inputs, weights)
        return simulate(schedule, replace(times, hop=hop / 1e3)).bubble_of_total


def _chunks(name: str, p: int, m: int, v: int) -> int:
    """v where the schedule can have that many chunks a rank, else as many as it needs."""
    checkpoint = find(name)
    return checkpoint.virtual if checkpoint.objection(p, m, v) else v


def _asked(
    params: Mapping[str, str],
) -> tuple[Query, list[str], str, str, int, int, int, dict[str, float], float]:
    """A state, understood: the schedules' names, A, B, ranks, micro-batches, chunks, milliseconds, and a message's."""
    query = Query(params)
    names = [g.name for g in generators()]
    a, b = query.word("a", "1f1b", names), query.word("b", "zb-h1", [*names, "none"])
    ranks, micro = query.whole("ranks", 4, 1, 64), query.whole("micro", 8, 1, 8192)
    virtual = query.whole("virtual", 2, 1, 8)
    milliseconds = {name: query.number(name, 10.0, 0.0, 1e5) for name in ("F", "I", "W")}
    hop = query.number("hop", 0.0, 0.0, 1e5)
    query.done()
    if not sum(milliseconds.values()):
        raise UserError("F, I and W are all 0: give one of them some time")
    return query, names, a, b, ranks, micro, virtual, milliseconds, hop


@dataclass(frozen=True)
class _Found:
    """A schedule in time; what its ranks hold one computation after the other (rows of `Level`), and at most."""

    simulated: Simulated
    levels: list[np.ndarray[Any, Any]]
    peaks: list[Peak]

    @property
    def schedule(self) -> PipelineSchedule:
        return self.simulated.schedule


@lru_cache(maxsize=8)
def _simulated(name: str, p: int, m: int, v: int, F: float, I: float, W: float, hop: float) -> _Found:  # noqa: E741
    """The schedule with v chunks a rank where it can have that many, else with as many as it needs; milliseconds."""
    virtual = _chunks(name, p, m, v)
    if p * m * virtual * 8 > MOST_EVENTS:
        raise UserError(f"{p} ranks x {m} micro-batches are too many events to draw: give fewer micro-batches")
    with without_collections():
        schedule = build(name, p, m, virtual)
        times = replace(Times.shared(schedule, F / 1e3, I / 1e3, W / 1e3), hop=hop / 1e3)
        held, most = [], []
        for rank, rank_actions in enumerate(schedule.actions):
            rows = list(levels(schedule, rank))
            held.append(np.array(rows, dtype="f8").reshape(-1, len(Level._fields)))
            most.append(peak(rank_actions, rows))
        return _Found(simulate(schedule, times), held, most)


def _events(one: Simulated, compute_only: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """rank, start, seconds, kind, micro, stage of every event; messages from posting to completion."""
    columns: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in _COLUMNS}
    for rank, (rank_actions, spans) in enumerate(zip(one.schedule.actions, one.spans, strict=True)):
        names, stages, micros, _, parts = zip(*rank_actions, strict=True)
        kinds = np.fromiter(map(_KIND.__getitem__, names), dtype="u1", count=len(rank_actions))
        start, end = np.array(spans).T
        stage, micro = np.array(stages), np.array(micros)
        for i in np.flatnonzero(kinds == _KIND["OVERLAP_F_B"]).tolist():
            stage[i], micro[i] = parts[i][0].stage, parts[i][0].micro
        # What takes no time and is no computation is nothing that happens; neither is freeing parameters.
        kept = kinds < _MESSAGE if compute_only else (kinds < _MESSAGE) | ((end > start) & (kinds < _FREE))
        result = (np.full(len(rank_actions), rank), start, end - start, kinds, micro, stage)
        for column, values in zip(columns.values(), result, strict=True):
            column.append(values[kept])
    return {name: np.concatenate(columns[name]).astype(dtype) for name, dtype in _COLUMNS.items()}


def _drawn(simulated: _Found) -> dict[str, Any]:
    """Events and, rank by rank, what is held for backward over time (in what one micro-batch takes a rank)."""
    one, schedule = simulated.simulated, simulated.schedule
    held = []
    for spans, local in zip(one.spans, simulated.levels, strict=True):
        place, _, _, after, during = local.T
        at = np.concatenate(([0.0], np.array(spans)[place.astype(int)].reshape(-1)))
        held.append({"at": at, "held": np.concatenate(([0.0], np.stack((during, after), axis=1).reshape(-1)))})
    return {
        **keyed(schedule, "name virtual stages ranks"),
        **keyed(find(schedule.name), "summary source"),
        **keyed(one, "makespan bubble bubble_of_total"),
        "formula": FORMS[schedule.name].text,
        "peak": max(peak.held for peak in simulated.peaks),
        "events": _events(one),
        "held": held,
    }


def _moments(simulated: Mapping[str, _Found], events: list[Mapping[str, np.ndarray[Any, Any]]]) -> list[str]:
    """A sentence for each of `FRAMES` steps through the longer schedule: how many ranks compute then."""
    times = np.linspace(0, max(one.simulated.makespan for one in simulated.values()), FRAMES + 1)
    counted = [_busy(columns, times) for columns in events]
    sentences = []
    for frame, time in enumerate(times.tolist()):
        reported = []
        for one, busy in zip(simulated.values(), counted, strict=True):
            done = frame == FRAMES or time >= one.simulated.makespan
            ranks = f"{busy[frame]} of {one.schedule.ranks} ranks of {one.schedule.name} compute"
            reported.append(f"{one.schedule.name} is done" if done else ranks)
        sentences.append(f"{f'After {format_time(time)}' if frame else 'At the start'}: {', '.join(reported)}.")
    return sentences


def _busy(events: Mapping[str, np.ndarray[Any, Any]], times: np.ndarray[Any, Any]) -> list[int]:
    later = times * (1 + 1e-9)
    begun, ended = (np.sort(item) for item in (events["start"], events["start"] + events["seconds"]))
    return list((np.searchsorted(begun, later, "right") - np.searchsorted(ended, later, "right")).tolist())


def _by_rank(simulated: _Found) -> Table:
    one = simulated.simulated
    units = {"rank": "", **dict.fromkeys(("busy", "idle", "own span", "idle in own span"), "seconds")}
    units |= dict.fromkeys(("most micro-batches held", "activations held", "receives posted"), "")
    ranks = zip(one.busy, one.idle, one.own_span, one.own_idle, simulated.peaks, strict=True)
    rows = [(rank, *times, peak.both, peak.held, peak.buffers) for rank, (*times, peak) in enumerate(ranks)]
    return Table.of_rows(f"{one.schedule.name}, rank by rank", units, rows)


def _events_table(one: Simulated) -> Table:
    if sum(map(len, one.schedule.actions)) > MOST_LISTED:
        return Table("Events (too many for a table: take fewer micro-batches)", {}, {})
    events = _events(one, compute_only=False)
    kind = [KINDS[k] for k in events["kind"].tolist()]
    columns: dict[str, Any] = {"rank": events["rank"], "kind": kind}
    columns |= {"stage": events["stage"], "micro-batch": events["micro"]}
    times = {"start": events["start"], "takes": events["seconds"]}
    return Table(f"Every event of {one.schedule.name}", columns | times, {"start": "seconds", "takes": "seconds"})


def _compared(simulated: Mapping[str, _Found]) -> Table:
    columns: Columns = {
        "schedule": ("", lambda one: one.schedule.name),
        "chunks a rank": ("", lambda one: one.schedule.virtual),
        "step": ("seconds", lambda one: one.simulated.makespan),
        "bubble over ideal": ("share", lambda one: one.simulated.bubble),
        "bubble of the total": ("share", lambda one: one.simulated.bubble_of_total),
        "most held on a rank": ("", lambda one: max(peak.held for peak in one.peaks)),
    }
    return Table.of("Side by side", list(simulated.values()), columns)


def _how(one: Simulated, milliseconds: Mapping[str, float], hop: float) -> How:
    s = one.schedule
    return How(
        [
            *_bubble_lines(one, milliseconds),
            "Every event starts when its rank is free and what it needs has arrived; the order is the schedule's.",
            "Activations: from F until I or B all that F saved; 1 is what a rank saves for one micro-batch.",
        ],
        _command(s, milliseconds, hop),
        find(s.name).source,
    )


def _command(schedule: PipelineSchedule, milliseconds: Mapping[str, float], hop: float) -> str:
    return _command_of(schedule.name, schedule.ranks, schedule.micro, schedule.virtual, milliseconds, hop)


def _command_of(name: str, p: int, m: int, virtual: int, milliseconds: Mapping[str, float], hop: float) -> str:
    times = ",".join(f"{key}={exact(value)}ms" for key, value in milliseconds.items())
    words = ("--ranks", p, "--micro", m, "--virtual", virtual, "--times", times)
    return command_line("pipeline", "simulate", name, *words, "--hop", f"{exact(hop)}ms")


def _bubble_lines(one: Simulated, milliseconds: Mapping[str, float]) -> list[str]:
    s: PipelineSchedule = one.schedule
    form = FORMS[s.name]
    total = sum(one.busy) / s.ranks
    lines = [
        f"{s.name}: step {format_time(one.makespan)}; a rank computes {format_time(total)} on average; idle over ideal "
        f"= {format_time(sum(one.idle))} / {format_time(sum(one.busy))} = {format_share(one.bubble)}"
    ]
    case = PipelineShape(s.ranks, s.micro, s.virtual, *(milliseconds[key] / 1e3 for key in ("F", "I", "W")))
    if s.train and not one.times.hop and form.exact(case):
        lines.append(f"closed form: {form.text} = {format_time(form.bubble(case))} idle on the rank that has most")
    return lines
