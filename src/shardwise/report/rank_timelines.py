"""The timelines of all ranks of one step on one clock: a run's reports/timelines.json, in columns.

Ranks on one host share its monotonic clock. Hosts do not share any: the moments at which the first rank of each host
left the barrier before the step count as the same one, which is off by no more than that barrier took to tell its last
rank.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from shardwise.errors import UserError, os_errors
from shardwise.report.exposure import TimeSpan, spans
from shardwise.report.files import write_whole
from shardwise.report.step_report import Bytes, Role

VERSION = 1

MOST_EVENTS = 100_000
"""Events of all ranks together up to which they are kept: about 3 MB."""


class Recorded(NamedTuple):
    """Recording of one rank in a step. host: a word that only this host has. start: nanoseconds of its monotonic
    clock when the step began. events: as `Role.timeline` holds them."""

    host: str
    start: int
    events: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RankTimeline:
    """One rank's step. host: which one, counted from 0. start: nanoseconds by which it began after the first rank of
    its host; the spans count from there."""

    rank: int
    host: int
    start: int
    spans: tuple[TimeSpan, ...]


@dataclass(frozen=True)
class RankTimelines:
    """One step of a run. step: its number; world: how many ranks took part in it, of which those with a timeline are
    here, ascending."""

    step: int
    world: int
    ranks: tuple[RankTimeline, ...]

    @property
    def hosts(self) -> int:
        return len({one.host for one in self.ranks})

    @property
    def on_one_clock(self) -> dict[int, tuple[TimeSpan, ...]]:
        """Rank -> its spans, in nanoseconds since the first rank began."""
        return {one.rank: tuple(span.later(one.start) for span in one.spans) for one in self.ranks}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary: names once each, times in whole nanoseconds."""
        names: dict[str, int] = {}
        streams: dict[str, int] = {}
        args: dict[str, int] = {}
        timelines = [
            {
                "rank": one.rank,
                "host": one.host,
                "start_ns": one.start,
                "name": [names.setdefault(span.name, len(names)) for span in one.spans],
                "stream": [streams.setdefault(span.stream, len(streams)) for span in one.spans],
                "from_ns": [span.start for span in one.spans],
                "to_ns": [span.stop for span in one.spans],
                "args": [args.setdefault(json.dumps(span.args), len(args)) for span in one.spans],
            }
            for one in self.ranks
        ]
        about = {"schema_version": VERSION, "step": self.step, "world": self.world}
        named = {"names": list(names), "streams": list(streams), "args": [json.loads(text) for text in args]}
        return about | named | {"timelines": timelines}

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all. Raises `UserError` when the file cannot be written."""
        write_whole(path, json.dumps(self.to_json(), separators=(",", ":")) + "\n", "timelines")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` has written. Raises `UserError` naming the file when it is missing or damaged."""
        with os_errors(f"read timelines {path}", damaged=f"{path} is damaged: it holds no timelines"):
            data = json.loads(path.read_bytes())
            if (version := data["schema_version"]) != VERSION:
                raise UserError(f"{path}: timelines of schema version {version!r}, not {VERSION}")
            names, streams = data["names"], data["streams"]
            args = data.get("args", [{}])  # absent from older files
            ranks = tuple(_rank(one, names, streams, args) for one in data["timelines"])
            return cls(int(data["step"]), int(data["world"]), ranks)


def _rank(data: Mapping[str, Any], names: list[str], streams: list[str], args: list[dict[str, Any]]) -> RankTimeline:
    about = data.get("args", [0] * len(data["name"]))
    columns = zip(data["name"], data["stream"], data["from_ns"], data["to_ns"], about, strict=True)
    results = tuple(
        TimeSpan(str(names[n]), str(streams[s]), int(a), int(b), dict(args[about])) for n, s, a, b, about in columns
    )
    return RankTimeline(int(data["rank"]), int(data["host"]), int(data["start_ns"]), results)


def aligned(recorded: Mapping[int, Recorded], step: int, world: int) -> RankTimelines:
    """Put the ranks of a step on one clock, as the module says. recorded: rank -> what it recorded; world: how many
    ranks there are. Raises `UserError` for a damaged event."""
    hosts = {name: i for i, name in enumerate(dict.fromkeys(recorded[rank].host for rank in sorted(recorded)))}
    first = {name: min(one.start for one in recorded.values() if one.host == name) for name in hosts}
    ranks = []
    for rank, one in sorted(recorded.items()):
        timeline = spans(Role(f"rank {rank}", (rank,), Bytes(), (), timeline=one.events))
        ranks.append(RankTimeline(rank, hosts[one.host], one.start - first[one.host], timeline))
    return RankTimelines(step, world, tuple(ranks))


def kept(counts: Mapping[int, int], first: Collection[int], most: int = MOST_EVENTS) -> set[int]:
    """The ranks whose timelines are kept: those of `first`, and as many of the others, the lowest first, as bring the
    events of all to no more than `most`. counts: rank -> its events."""
    chosen, room = set(first), most - sum(counts[rank] for rank in first)
    for rank in sorted(counts.keys() - chosen):
        room -= counts[rank]
        if room < 0:
            break
        chosen.add(rank)
    return chosen
