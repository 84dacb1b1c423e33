"""What a recorded step shows: one line in words, and each cause that costs a tenth of the step or more.

Causes come from the recording alone: what ran when on which rank, and the run's validations and saves between steps.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from textwrap import fill
from typing import Any

from shardwise.codec import Json
from shardwise.report.exposure import COMMUNICATION, COMPUTE, DATA, TimeSpan, length, overlap, union
from shardwise.report.rank_timelines import RankTimelines
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_parts import PARTS, RankParts, Recording, StepParts, core_wait, step_parts
from shardwise.report.step_report import StepReport
from shardwise.report.units import format_bytes, format_ranks, format_share, format_time
from shardwise.report.waiting import WIDTH

LEAST = 0.1
"""Share of a step from which a cause is named."""
SMALL, MANY = 64 << 10, 64
"""Bytes of a collective up to which it is small, and number of a step's from which they are many."""
SHORT, MICRO_BATCHES = 3e-3, 8
"""Seconds of a pass through a part of the model up to which it is short, and micro-batches from which that counts."""
SAME_RANKS = ("tp", "kv", "cp")
"""Axes of collectives inside blocks, behind which there is nothing to compute."""
HOST_BOUND = "host-bound"
FOLLOWS = ("slow rank", "slow link", "no overlap", "many small collectives")
"""Causes that may follow from a lack of cores."""
VALIDATION, SAVING = BETWEEN = ("validation", "saving")
"""Streams of a run between its steps."""


@dataclass(frozen=True)
class Finding(Json):
    """One cause. seconds: what it costs the step. ranks: that cause it; () for all."""

    cause: str
    seconds: float
    words: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict(Json):
    """A step, and what costs it time, the most first. As JSON times are in seconds."""

    json_keys = "step=number seconds line cause findings ranks collectives=parts.arrivals"

    parts: StepParts
    findings: tuple[Finding, ...]
    number: int | None = None
    """The step's."""

    @property
    def seconds(self) -> float:
        return self.parts.step / 1e9

    def brief(self) -> dict[str, Any]:
        """As JSON, without the tables of ranks and collectives."""
        return {key: value for key, value in self.to_json().items() if key not in ("ranks", "collectives")}

    @property
    def cause(self) -> str | None:
        return self.findings[0].cause if self.findings else None

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Times of each rank."""
        return [one.seconds() for one in self.parts.ranks]

    @property
    def line(self) -> str:
        """The step's time and its first cause, with another one that costs more; or where the time went."""
        if self.findings:
            first = self.findings[0]
            more = max(self.findings, key=lambda finding: finding.seconds)
            also = f". Also {more.words}" if more.seconds > first.seconds else ""
            return f"{format_time(self.seconds)}; {first.words}{also}"
        means = {words: self.parts.mean(part) for part, words in PARTS.items()}
        largest = sorted(means, key=lambda words: -means[words])[:3]
        shares = ", ".join(f"{words} {format_share(means[words] / self.seconds)}" for words in largest if means[words])
        return f"{format_time(self.seconds)}: {shares}; no cause stands out"

    def text(self, run: str = "") -> str:
        """The line with the step's number, at most 80 columns wide. run: a name before it."""
        names = [run] if run else []
        names += [] if self.number is None else [f"step {self.number}"]
        return fill(": ".join([*names, self.line]), WIDTH, subsequent_indent="  ")


def verdict(recording: Recording, between: Sequence[TimeSpan] = (), rows: Mapping[int, int] | None = None) -> Verdict:
    """Judge a step.

    recording: rank -> spans on one clock. between: spans of the run, as of `run_spans`. rows: rank -> rows that its
    experts received in a step.
    """
    recording = {rank: spans for rank, spans in recording.items() if spans}
    parts = step_parts(recording)
    if not parts.step:
        return Verdict(parts, ())
    every = [
        *_slow_rank(recording, parts, rows or {}),
        *_transfers(recording, parts),
        *_micro_batches(recording, parts),
        *_recomputation(recording),
        *_machine(parts),
        *_between(between, parts.step / 1e9),
    ]
    named = [finding for finding in every if finding.seconds >= LEAST * parts.step / 1e9]
    # The costliest first. But a lack of cores comes after what the program does anywhere; of a crowded host it comes
    # before slow transfers and slow ranks, which may follow from it.
    crowded = parts.mean("core") >= parts.step / 2e9
    place = {HOST_BOUND: 1} | (dict.fromkeys(FOLLOWS, 2) if crowded else {})
    return Verdict(parts, tuple(sorted(named, key=lambda finding: (place.get(finding.cause, 0), -finding.seconds))))


def verdict_of(run: RunDirectory, timelines: RankTimelines | None = None) -> Verdict | None:
    """Judge a step that a run has recorded on all ranks, the first one where none is given; None where there is none.
    Raises `UserError` for damaged files."""
    timelines = timelines or next(iter(run.timelines().values()), None)
    if timelines is None:
        return None
    rows: dict[int, int] = {}
    if run.report("measured").is_file():
        roles = StepReport.read(run.report("measured")).roles
        for role in roles:
            pairs = [pair for part in (role.routed or {}).values() for pair in part]
            rows |= dict.fromkeys(role.ranks if pairs else (), sum(received for _, received in pairs))
    between = run_spans([event for _, event in run.events()])
    return replace(verdict(timelines.on_one_clock, between, rows), number=timelines.step)


def run_spans(events: Sequence[Mapping[str, Any]]) -> list[TimeSpan]:
    """A run's events as spans in streams "step", "validation" and "saving", from its first step to its last."""
    keys = {"seconds": "step", "validation_s": VALIDATION, "saving_s": SAVING}
    spans = []
    for event in events:
        for key, stream in keys.items():
            seconds, ended = event.get(key), event.get("time")
            if isinstance(seconds, (int, float)) and isinstance(ended, (int, float)):
                stop = round(ended * 1e9)
                name = f"{stream} {event.get('step', '')}"
                spans.append(TimeSpan(name, stream, stop - round(seconds * 1e9), stop, {}))
    steps = [i for i, span in enumerate(spans) if span.stream not in BETWEEN]
    return spans[steps[0] : steps[-1] + 1] if steps else []


# -- a rank that computes longer


def _slow_rank(recording: Recording, parts: StepParts, rows: Mapping[int, int]) -> Iterator[Finding]:
    """The rank that computes longest beside the others: slow, with more of the model, or with more rows of experts.

    Ranks are compared by their time on a core. What one has more, it waits for a core longer, too: as long as all ranks
    do on average.
    """
    if len(parts.ranks) < 2:
        return
    slow = max(parts.ranks, key=lambda one: one.computing)
    others = [one for one in parts.ranks if one is not slow]
    excess = slow.computing - round(median(one.computing for one in others))
    computing, core = (sum(one.of(part) for one in parts.ranks) for part in ("computing", "core"))
    longer = excess * (computing + core) / max(1, computing)
    work = {rank: _work(timeline) for rank, timeline in recording.items()}
    same, names = _longer(work[slow.rank], [work[one.rank] for one in others])
    lost = _lost(slow.rank, others)
    mean = fmean(rows.values()) if rows else 0.0
    cause, words = "slow rank", f"rank {slow.rank} computed {_time(longer)} longer"
    if mean and rows.get(slow.rank, 0) >= 1.25 * mean:
        cause = "imbalance of experts"
        words = f"{cause}: rank {slow.rank} received {rows[slow.rank] / mean:.1f} times the mean of rows and computed "
        words += f"{_time(longer)} longer"
    elif same < excess / 2:
        mine = sum(count for _, count in work[slow.rank].values())
        usual = round(median(sum(count for _, count in work[one.rank].values()) for one in others))
        cause, words = "uneven stages", f"uneven stages: {words}, {mine} parts against {usual}"
    else:
        mark = " (injected)" if slow.injected - median(one.injected for one in others) > excess / 2 else ""
        words += f" than the others{mark}, most of it in {names}"
        late = _late(recording, slow.rank)
        if late >= excess / 2 and not re.match(_PARTS_OF_MODEL, names):
            lost = _lost_at_once(slow.rank, parts)
            longer, words = late, f"rank {slow.rank} began {_time(late)} late{mark}"
    yield Finding(cause, longer / 1e9, words + lost, (slow.rank,))


_PARTS_OF_MODEL = "forward|backward|recompute|optimizer|end of backward"

Work = dict[str, tuple[int, int]]
"""Kind of part, such as "forward blocks" -> (nanoseconds on a core, parts of this kind)."""


def _work(timeline: Sequence[TimeSpan]) -> Work:
    kinds: defaultdict[str, list[TimeSpan]] = defaultdict(list)
    for span in timeline:
        if span.stream == COMPUTE:
            kinds[re.sub(r"\.\d+|\d+", "", span.name)].append(span)
    return {
        kind: (sum(s.stop - s.start for s in spans) - core_wait(iter(spans)), len({s.name for s in spans}))
        for kind, spans in kinds.items()
    }


def _longer(mine: Work, others: Sequence[Work]) -> tuple[int, str]:
    """(nanoseconds by which parts that others have, too, took longer here; the kind that has most of it)."""
    longer = {}
    for kind, (time, count) in mine.items():
        usual = [other[kind][0] / other[kind][1] for other in others if kind in other]
        if usual:
            longer[kind] = round(time - count * median(usual))
    return sum(longer.values()), max(longer, key=lambda kind: longer[kind], default="")


def _late(recording: Recording, rank: int) -> int:
    """Nanoseconds by which a rank came later to its first collective than the others to theirs."""
    first = {
        other: min((span.start for span in timeline if span.stream == COMMUNICATION), default=0)
        for other, timeline in recording.items()
    }
    begun = {other: min(span.start for span in timeline) for other, timeline in recording.items() if timeline}
    before = {other: first[other] - begun[other] for other in begun}
    return max(0, before[rank] - round(median(time for other, time in before.items() if other != rank)))


def _lost(rank: int, others: Sequence[RankParts]) -> str:
    waited = {one.rank: one.others.get(rank, 0) for one in others if one.others.get(rank)}
    if not waited:
        return ""
    return f"; {format_ranks(tuple(sorted(waited)))} lost {_time(fmean(waited.values()))} there"


def _lost_at_once(rank: int, parts: StepParts) -> str:
    """The collective at which others lost most by this rank."""
    calls = [call for call in parts.arrivals if call.last == rank and call.lost]
    if not calls:
        return ""
    most = max(calls, key=lambda call: call.lost)
    others = tuple(other for other in most.ranks if other != rank)
    return f"; {format_ranks(others)} lost {_time(most.lost / len(others))} there"


# -- communication


def _transfers(recording: Recording, parts: StepParts) -> Iterator[Finding]:
    """Transfers that nothing hides: of many small collectives, of those that computation could have hidden, or of a
    slow link."""
    exposed: defaultdict[tuple[str, str], float] = defaultdict(float)
    for one in parts.ranks:
        for kind, time in one.transfers.items():
            exposed[kind] += time / 1e9 / len(parts.ranks)
    total = sum(exposed.values())
    busiest = max(recording, key=lambda rank: sum(span.stream == COMMUNICATION for span in recording[rank]))
    calls = [span for span in recording[busiest] if span.stream == COMMUNICATION]
    small = [span for span in calls if 0 < _bytes(span) <= SMALL]
    if not calls:
        return
    if len(small) >= MANY and sum(_time_of(small)) >= sum(_time_of(calls)) / 2:
        size = format_bytes(round(fmean(map(_bytes, small))))
        words = f"many small collectives: {len(small)} of {size} on average, {format_time(total)} that nothing hid"
        yield Finding("many small collectives", total, words)
        return
    movable = {
        kind: time
        for kind, time in exposed.items()
        if not set(kind[1].split("_")) & set(SAME_RANKS) and kind[0] not in ("send", "recv", "all_to_all")
    }
    apart = [span for span in calls if span.kind in movable and span.args.get("algorithm") != "shared"]
    could, computing = sum(movable.values()), parts.mean("computing")
    compute, under_way = (
        union((span.start, span.stop) for span in spans)
        for spans in ((span for span in recording[busiest] if span.stream == COMPUTE), apart)
    )
    if apart and not overlap(compute, under_way) and could >= LEAST * parts.step / 1e9:
        ops = " and ".join(dict.fromkeys(op for (op, _), time in movable.items() if time >= could / 4))
        words = f"no overlap: {format_time(could)} of {ops} while nothing was computed, none behind computation"
        yield Finding("no overlap", min(could, computing), words)
        total -= min(could, computing)
    op, axes = max(exposed, key=lambda kind: exposed[kind], default=calls[0].kind)
    moved = sum(_bytes(span) for span in calls if span.kind == (op, axes))
    took = length(union((span.start, span.stop) for span in calls if span.kind == (op, axes))) / 1e9
    rate = f", {format_bytes(moved)} at {format_bytes(round(moved / took))}/s" if moved and took else ""
    over = f" over {axes}" if axes else ""
    words = f"slow link: {format_time(sum(exposed.values()))} of transfers that nothing hid, most in {op}{over}{rate}"
    yield Finding("slow link", total, words)


def _bytes(span: TimeSpan) -> int:
    return int(span.args.get("bytes", 0))


def _time_of(spans: Iterable[TimeSpan]) -> list[int]:
    return [span.stop - span.start for span in spans]


# -- what is computed, and on what


def _micro_batches(recording: Recording, parts: StepParts) -> Iterator[Finding]:
    """Passes so short that their overhead is most of them."""
    for timeline in recording.values():
        loaded = next((span.args for span in timeline if span.stream == DATA and span.args), {})
        count, tokens = int(loaded.get("micro_batches", 0)), int(loaded.get("tokens", 0))
        passes = [span for span in timeline if span.stream == COMPUTE and re.match("forward|backward", span.name)]
        names = {span.name for span in passes}
        if count < MICRO_BATCHES or not names:
            continue
        took = (sum(_time_of(passes)) - core_wait(iter(passes))) / 1e9
        if took / len(names) / count <= SHORT:
            words = (
                f"tiny micro-batches: {count} of {tokens // count} tokens; a pass through a part of the model takes "
            )
            words += f"{format_time(took / len(names) / count)}, {format_share(took / parts.step * 1e9)} of the step"
            yield Finding("tiny micro-batches", took * (1 - 1 / count), words)
            return


def _recomputation(recording: Recording) -> Iterator[Finding]:
    again = [
        sum(_time_of(span for span in timeline if span.stream == COMPUTE and span.name.startswith("recompute")))
        for timeline in recording.values()
    ]
    if time := fmean(again) / 1e9:
        yield Finding("recomputation", time, f"recomputation: {format_time(time)} of forward passes were made twice")


def _machine(parts: StepParts) -> Iterator[Finding]:
    """Waiting for cores, for the disk, and for text."""
    core = parts.mean("core")
    words = f"{HOST_BOUND}: ranks were ready to compute and had no core for {format_time(core)}"
    yield Finding(HOST_BOUND, core, words)
    for cause, part, what in (
        ("slow disk", "disk", "for offloaded state on disk"),
        ("slow data", "data", "for the step's text"),
    ):
        most = max(parts.ranks, key=lambda one: one.of(part))
        time = most.of(part) / 1e9
        yield Finding(cause, time, f"{cause}: rank {most.rank} waited {format_time(time)} {what}", (most.rank,))


# -- the run


def _between(spans: Sequence[TimeSpan], step: float) -> Iterator[Finding]:
    """Validations and saves between steps, per step of the run."""
    steps = sum(span.stream not in BETWEEN for span in spans)
    for stream, cause in ((VALIDATION, "validation"), (SAVING, "slow disk")):
        there = [span for span in spans if span.stream == stream]
        if there and steps:
            mean = fmean(_time_of(there)) / 1e9
            words = f"{cause}: {stream} between steps took {format_time(mean)}, as long as {mean / step:.1f} steps"
            words += f"; {len(there)} in {steps} steps"
            yield Finding(cause, mean * len(there) / steps, words)


def _time(nanoseconds: float) -> str:
    return format_time(nanoseconds / 1e9)
