"""Counters and histograms, and how Prometheus reads them: the text format 0.0.4."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds."""
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Histogram: counts of values up to each bound. bounds: upper ones, rising."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def rows(self, name: str) -> Iterator[str]:
        """The lines of Prometheus: buckets add up."""
        seen = 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{bound}"}} {seen}'
        yield f"{name}_sum {self.total!r}"
        yield f"{name}_count {seen}"


class Metrics:
    """Counters of a server. Touched by the event loop's thread only."""

    def __init__(self) -> None:
        self.requests: dict[Labels, int] = defaultdict(int)
        """(path, status) -> answered requests of HTTP."""
        self.finished: dict[Labels, int] = defaultdict(int)
        """(reason) -> sequences."""
        self.prompt_tokens = self.reused_tokens = self.generated_tokens = 0
        self.first_token, self.per_token = Histogram(FIRST_TOKEN), Histogram(PER_TOKEN)

    def text(self, gauges: Mapping[str, tuple[str, Mapping[Labels, float]]]) -> str:
        """Everything as Prometheus reads it. gauges: name -> (what it is, value by labels), of this moment."""
        lines: list[str] = []
        lines += _family("requests_total", "counter", "answered HTTP requests", self.requests)
        lines += _family("sequences_finished_total", "counter", "sequences that are over", self.finished)
        for name, what, value in (
            ("prompt_tokens_total", "tokens of prompts, again for each choice", self.prompt_tokens),
            ("reused_prompt_tokens_total", "tokens of prompts found in the cache", self.reused_tokens),
            ("generated_tokens_total", "tokens of answers", self.generated_tokens),
        ):
            lines += _family(name, "counter", what, {(): value})
        for name, (what, values) in gauges.items():
            lines += _family(name, "gauge", what, values)
        for name, what, histogram in (
            ("time_to_first_token_seconds", "from a request's arrival to its first token", self.first_token),
            ("time_per_token_seconds", "between a sequence's tokens", self.per_token),
        ):
            lines += [*_head(name, "histogram", what), *histogram.rows(f"shardwise_{name}")]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP shardwise_{name} {what}", f"# TYPE shardwise_{name} {kind}"]


def _family(name: str, kind: str, what: str, values: Mapping[Labels, float]) -> list[str]:
    return [*_head(name, kind, what), *(f"shardwise_{name}{_labels(key)} {value}" for key, value in values.items())]


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
