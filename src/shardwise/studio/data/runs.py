"""Runs: a run on disk beside its prediction, and what came since a cursor, so that the page can follow it."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.report.compare import PEAK_TOLERANCE, ReportComparison, compare
from shardwise.report.exposure import exposures
from shardwise.report.palette import BYTE_CLASSES
from shardwise.report.rank_timelines import RankTimelines
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_memory import CLASSES, StepMemory, read_memory
from shardwise.report.step_report import StepReport
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.report.verdict import verdict_of
from shardwise.studio.columns import How, Table, View, command_line
from shardwise.studio.data import timelines
from shardwise.studio.data.run_time import HOW_TIMED, Base, step_figures, time_figures, waterfall
from shardwise.studio.query import Query

EXPERT_COLUMNS = dict.fromkeys(("step", "imbalance", "dropped", "balance_loss"), "")
"""Columns of the steps with experts, as events have them, with their units."""
MOST_LOADS = 1 << 18
"""Numbers of tokens up to which the loads of every step are sent; of a longer run, those of every n-th step."""

Event = Mapping[str, Any]
REPORTS = ("predicted", "measured", "timelines", "timelines-last", "memory")
"""Files of reports, whose coming the page waits for."""
PLAN = "its plan"
"""Choice of what a step is compared with, beside the other runs."""
SHOWN = 10
"""Tensors that are drawn."""
HOW_PEAK = [
    "Every storage is followed from the operation that made it to its end, which makes the step slow.",
    "saved: what backward needs; parameters and optimizer state are there all the time.",
    "rank 0's step as PyTorch's memory viewer opens it: reports/memory.pickle, for pytorch.org/memory_viz.",
]
"""How the memory of a step is measured."""


def with_experts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Step and load of the training steps of a model with experts: those with the layers and experts of the last."""
    steps = [
        {"step": event["step"], **event["experts"]}
        for event in events
        if "step" in event and isinstance(event.get("experts"), dict) and event["experts"].get("tokens")
    ]
    return [step for step in steps if _shape(step) == _shape(steps[-1])]


def _shape(step: Event) -> dict[str, int]:
    return {layer: len(tokens) for layer, tokens in step["tokens"].items()}


def loads(events: Sequence[Event]) -> dict[str, Any] | None:
    """Tokens of each expert of each layer: {steps, layers, experts, counts: [steps x layers x experts]}; None without
    experts. The last step is among them."""
    steps = with_experts(events)
    if not steps:
        return None
    layers = list(steps[-1]["tokens"])
    counts = np.array([[step["tokens"][layer] for layer in layers] for step in steps], dtype=np.int32)
    every = -(-counts.size // MOST_LOADS)
    kept = np.s_[(len(steps) - 1) % every :: every]
    return {
        "steps": [step["step"] for step in steps[kept]],
        "layers": layers,
        "experts": counts.shape[-1],
        "counts": counts[kept].ravel(),
    }


def loads_table(found: Mapping[str, Any]) -> Table:
    """Tokens of each expert at the last step of `loads`."""
    last = found["counts"].reshape(len(found["steps"]), len(found["layers"]), -1)[-1]
    columns: dict[str, Any] = {"expert": list(range(found["experts"]))}
    columns |= {layer: counts.tolist() for layer, counts in zip(found["layers"], last, strict=True)}
    return Table(f"Tokens of each expert, by layer, at step {found['steps'][-1]}", columns)


def how_loads(command: str) -> How:
    """Where the load of experts comes from. command: shows the events."""
    return How(
        [
            "The router's choices of a step, summed over its micro-batches and all ranks, as the training wrote them.",
            "imbalance: tokens of a layer's busiest expert over the mean of its experts; of all layers the largest.",
        ],
        command,
    )


STEP_COLUMNS = {"step": "", "loss": "", "grad_norm": "", "seconds": "seconds", "tokens_per_s": "count", "mfu": "share"}
VALIDATION_COLUMNS = dict.fromkeys(("step", "validation_loss", "unigram_entropy"), "")
"""Columns of the steps and of validation, as events have them, with their units."""

WRITING = ("writing_share", "writing_cpu_s", "step_cpu_s")
"""Cost of this page in result.json: what the run has written for it, as a share of a step's CPU time, and in seconds a
step."""


def listed(runs: Path) -> list[str]:
    """The names of a folder's runs, the latest first."""
    folders = [path for path in runs.iterdir() if (path / "run.json").is_file()] if runs.is_dir() else []
    return [path.name for path in sorted(folders, key=_changed, reverse=True)]


def _changed(path: Path) -> float:
    events = path / "events.jsonl"
    return (events if events.is_file() else path / "run.json").stat().st_mtime


def data(params: Mapping[str, str], runs: Path) -> View:
    """One run: its steps so far, and where it has them its measured step beside the predicted one. Raises `UserError`
    for a step that it has not recorded."""
    query = Query(params)
    names = listed(runs)
    name = query.text("run", _usual(runs, names))
    number, against = query.whole("step", 0, 0, 1 << 40), query.text("against", PLAN)
    query.done()
    if not name:
        none = {"folder": str(runs), "status": "", "cursor": 0}
        return View(query.state, _choices([], name, {}), _event_tables([]), {}, none)
    here = run_of(runs, names, name)
    events, cursor = _events(here, 0)
    run = here.run
    tables = _event_tables(events)
    how = dict.fromkeys(tables, _how_steps(here, run))
    more: dict[str, Any] = {"folder": str(runs), "cursor": cursor, **_about(here, run)}
    if found := loads(events):
        tables["loads"], more["loads"] = loads_table(found), found
        how |= dict.fromkeys(("experts", "loads"), how_loads(_follow(here)))
    files = {name: here.report(name) for name in ("predicted", "measured")}
    reports = {name: StepReport.read(file) for name, file in files.items() if file.is_file()}
    recorded = here.timelines()
    if number and number not in recorded:
        raise UserError(f"step={number}: {name} has recorded {', '.join(map(str, recorded)) or 'no step'}")
    shown = recorded[number] if number else next(iter(recorded.values()), None)
    query.state["step"] = shown.step if shown else 0
    if drawn := _timeline(here, reports.get("measured"), shown):
        timeline, how["timeline"], more["timeline_of"] = drawn
        tables["timeline"], more["timeline"] = timeline.table(), timeline.to_json()
    bars: dict[str, Any] = {}
    if shown is not None:
        base, judged = Base.planned(reports.get("predicted")), verdict_of(here, shown)
        assert judged is not None
        if against != PLAN:
            other = verdict_of(run_of(runs, names, against))
            base = Base.recorded(against, other.parts) if other else None
        timed, of_step = step_figures(judged, shown.on_one_clock)
        if "ranks" in timed:
            timed["waterfall"], more["verdict"] = waterfall(base, judged.parts), judged.brief()
        bars, tables = dict(of_step), tables | timed
        how |= {table: How(HOW_TIMED[table], _compare(here)) for table in timed}
    if here.memory.is_file():
        tables |= memory_step(traces := read_memory(here.memory))
        bars["peak"], more["peaks"] = peak_bars(traces), [peak_words(one) for one in traces]
        how |= dict.fromkeys(("peak", "over"), How(HOW_PEAK, _compare(here)))
    if reports:
        sides = list(reports.values())
        both = compare(sides[0], sides[-1])
        figures = time_figures(sides[-1])
        tables |= {"memory": memory_table(both), "ledger": ledger_table(both), **figures.tables}
        lines = ["Predicted, and measured inside the run; every row of one against the same row of the other."]
        if len(reports) == 1:
            lines = [f"The {next(iter(reports))} report alone: there is no other yet."]
        lines += dict.fromkeys(note for report in sides for note in report.notes)
        how |= {table: How(lines, _compare(here)) for table in ("memory", "ledger")}
        how |= {table: How(HOW_TIMED[table], _compare(here)) for table in figures.tables}
        more |= {"has": list(reports), "bars": bars | figures.bars, "classes": list(BYTE_CLASSES), **_agreement(both)}
    return View(query.state, _choices(names, name, recorded), tables, how, more)


def _choices(names: list[str], name: str, recorded: Mapping[int, RankTimelines]) -> dict[str, list[Any]]:
    return {"run": names, "step": list(recorded) or [0], "against": [PLAN, *(each for each in names if each != name)]}


def _agreement(both: ReportComparison) -> dict[str, Any]:
    """Agreement of two reports: rows of the ledger, classes of bytes, the peak."""
    rows = {"rows": len(both.rows), "equal_rows": sum(row.equal for row in both.rows)}
    same = keyed(both, "equal_ledger equal_classes=exact_classes_equal peak_error differences")
    return same | rows | {"peak_tolerance": PEAK_TOLERANCE}


def events(params: Mapping[str, str], runs: Path) -> dict[str, Any]:
    """A run's events since a cursor, and the folder's runs. Raises `UserError` for a run that is not there."""
    query = Query(params)
    name, after = query.text("run", ""), query.whole("after", 0, 0, 1 << 60)
    query.done()
    names = listed(runs)
    if not name:
        return {"runs": names}
    here = run_of(runs, names, name)
    result, cursor = _events(here, after)
    columns = {name: table.columns for name, table in _event_tables(result).items()}
    return {"runs": names, "cursor": cursor, **columns, "loads": loads(result), **_about(here, here.run)}


def _usual(runs: Path, names: list[str]) -> str:
    """The latest readable run; opening a damaged one by name reports the damage."""
    for name in names:
        with suppress(UserError):
            if RunDirectory.open(runs / name).run:
                return name
    return next(iter(names), "")


def run_of(runs: Path, names: list[str], name: str) -> RunDirectory:
    """A run of the folder. Raises `UserError` for one that it does not list."""
    # Only names that the folder lists: no path leads out of it.
    if name not in names:
        raise UserError(f"{runs} holds no run {name!r}; there are {', '.join(names) or 'none'}")
    return RunDirectory.open(runs / name)


def _about(here: RunDirectory, run: Mapping[str, Any]) -> dict[str, Any]:
    config = run.get("config", {})
    layout = str(config.get("layout", ""))
    return {
        "status": str(run.get("status", "")),
        "ranks": run.get("ranks"),
        "layout": layout,
        "opens": [("Workers and servers", f"sync?{urlencode({'run': here.path.name})}")] if "sync=" in layout else [],
        "model": config.get("model", {}).get("name", ""),
        "workload": config.get("workload", {}),
        "steps_wanted": config.get("steps"),
        "reports": [name for name in REPORTS if here.report(name).is_file()],
        "writing": {name: here.result.get(name) for name in WRITING},
    }


def _events(here: RunDirectory, after: int) -> tuple[list[dict[str, Any]], int]:
    results = []
    for cursor, event in here.events(after):
        results.append(event)
        after = cursor
    return results, after


def _event_tables(run_events: list[dict[str, Any]]) -> dict[str, Table]:
    """Losses of steps and of validation, and loads of experts, by the names of their figures."""

    def table(title: str, units: Mapping[str, str], events: list[dict[str, Any]], needed: set[str]) -> Table:
        rows = ([_figure(event.get(name)) for name in units] for event in events if needed <= event.keys())
        return Table.of_rows(title, units, rows)

    return {
        "steps": table("Every step", STEP_COLUMNS, run_events, {"loss", "step"}),
        "validation": table("Validation", VALIDATION_COLUMNS, run_events, {"validation_loss"}),
        "experts": table("Load of the experts at every step", EXPERT_COLUMNS, with_experts(run_events), {"imbalance"}),
    }


def _figure(value: Any) -> float | None:
    """A number; not the texts that stand for NaN and infinities."""
    return value if isinstance(value, (int, float)) else None


def memory_table(both: ReportComparison) -> Table:
    """Bytes by class of every role, predicted and measured."""
    (a, b), rows = both.labels, both.bytes
    columns: dict[str, list[Any]] = {"ranks": [row.role for row in rows], "class": [row.byte_class for row in rows]}
    columns[a] = [row.a for row in rows]
    units = {a: "bytes"}
    if both.a is not both.b:
        columns[b] = [row.b for row in rows]
        columns["difference"] = [row.relative if row.b else None for row in rows]
        columns["as it should be"] = [row.accepted for row in rows]
        units |= {b: "bytes", "difference": "share"}
    return Table("Bytes by class", columns, units)


def ledger_table(both: ReportComparison) -> Table:
    """Every collective of the step, predicted and measured counts."""
    (a, b), rows = both.labels, both.rows
    columns: dict[str, list[Any]] = {"ranks": [row.role for row in rows]}
    for name in ("phase", "op", "axes", "unit", "dtype", "elements"):
        columns[name] = [getattr(row.key, name) for row in rows]
    columns[a] = [row.count_a for row in rows]
    if both.a is not both.b:
        columns[b] = [row.count_b for row in rows]
        columns["equal"] = [row.equal for row in rows]
    columns["payload"] = [row.key.payload_bytes * row.count_b for row in rows]
    return Table("Ledger: the collectives of one steady step", columns, {"payload": "bytes", "elements": "count"})


def memory_step(traces: Sequence[StepMemory]) -> dict[str, Table]:
    """Tables "over" (the curve of each rank) and "peak" (tensors at the peak)."""
    labels = [BYTE_CLASSES[name].label for name in CLASSES]
    points = [
        (one.rank, at, *(one.bytes[name][i] for name in CLASSES)) for one in traces for i, at in enumerate(one.at)
    ]
    units = {"rank": "", "at": "seconds", **dict.fromkeys(labels, "bytes")}
    tensors = [
        (one.rank, BYTE_CLASSES[row.byte_class].label, row.what, row.count, row.bytes)
        for one in traces
        for row in one.tensors
    ]
    columns = {"rank": "", "class": "", "tensors": "", "count": "count", "bytes": "bytes"}
    over = Table.of_rows("Memory over one step", units, points)
    return {"over": over, "peak": Table.of_rows("The largest tensors at the peak", columns, tensors)}


def peak_bars(traces: Sequence[StepMemory]) -> list[dict[str, Any]]:
    """The largest tensors at the peak of the first rank."""
    bars = []
    for row in traces[0].tensors[:SHOWN]:
        made_by, _, shape = row.what.partition(" ")
        detail = f"{row.count} x {shape}" if row.count > 1 else shape
        parts = [(row.byte_class, row.bytes)]
        bars.append({"label": made_by, "detail": detail, "total": row.bytes, "parts": parts, "words": ""})
    return bars


def peak_words(one: StepMemory) -> str:
    """When a rank's peak was, and how much was there."""
    total = format_bytes(sum(one.peak.values()))
    when = f"{format_time(one.peak_at)} after step {one.step} began, which took {format_time(one.seconds)}"
    return f"rank {one.rank}: {total} in {one.during}, {when}"


def _how_steps(here: RunDirectory, run: Mapping[str, Any]) -> How:
    lines = ["What the training wrote after every step: the loss is summed over tokens and divided by their number."]
    share, writing, step = (here.result.get(name) for name in WRITING)
    if share and writing and step:
        lines.append(
            f"Writing it took {format_time(writing)} of a step's {format_time(step)} of CPU time, "
            f"{format_share(share)}, measured inside the process that writes (result.json: writing_share)."
        )
    return How([*lines, f"status: {run.get('status', 'unknown')}"], _follow(here))


def _follow(here: RunDirectory) -> str:
    return shlex.join(["tail", "-f", str(here.events_path)])


def _timeline(
    here: RunDirectory, measured: StepReport | None, result: RankTimelines | None
) -> tuple[timelines.DrawnTimeline, How, str] | None:
    """(the timeline, how it was measured, what it shows in words): of all ranks, where the run has recorded them; else
    of each role's lowest."""
    if result is None:
        if measured is None:
            return None
        lines = ["Ranks whose ledgers and bytes are equal are drawn once."]
        return timelines.of_report(measured), _how_timeline(here, measured, lines), "One rank of each kind."
    lines = ["Every rank notes when its step began by its host's monotonic clock, which all ranks there share."]
    if result.hosts > 1:
        lines.append(
            "Hosts have no clock in common: the moments at which each one's first rank left the barrier before the "
            "step count as the same one."
        )
    left = result.world - len(result.ranks)
    words = f"Step {result.step} on all {result.world} ranks, on one clock."
    if left:
        words = (
            f"Step {result.step} on {len(result.ranks)} of {result.world} ranks, on one clock; more would be too long."
        )
    return timelines.of_ranks(result), _how_timeline(here, measured, lines), words


def _how_timeline(here: RunDirectory, report: StepReport | None, lines: list[str]) -> How:
    results = ["Measured inside the processes, in one undisturbed step."]
    if report and report.time:
        results = [f"Measured inside the processes; the median step took {format_time(report.time)}."]
    for rank, figures in exposures(report) if report else ():
        exposed = format_share(figures.share(figures.exposed))
        results.append(f"rank {rank}: {exposed} of the step is communication that no computation hides")
    return How([*results, *lines], _compare(here))


def _compare(here: RunDirectory) -> str:
    both = all(here.report(name).is_file() for name in ("predicted", "measured"))
    return command_line("compare", here.path) if both else ""
