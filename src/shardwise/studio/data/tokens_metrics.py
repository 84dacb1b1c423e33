"""Tokens, the two strategies in numbers: a row for each metric, and the sentence that sums them up."""

from collections.abc import Sequence
from typing import Any

from shardwise.planner.strategies import Asked, Generated
from shardwise.report.units import format_bytes, format_time

MOVING = ("tensor", "data", "pipeline")
"""Parts of a token's time in which it waits for communication."""


def step_words(request: Asked) -> str:
    """Unit of bytes and times: one more token of every sequence."""
    return "a token" if request.batch == 1 else f"a step, one token for each of {request.batch:,} sequences"


def metrics(ones: Sequence[Generated], request: Asked) -> list[dict[str, Any]]:
    """Rows of name, unit and the strategies' values; those of the whole answer are `totals`. Rows with a `short` name
    are the ones that stay in sight beside every chapter."""
    step = "a token" if request.batch == 1 else "a step"
    speeds = [one.tokens_per_second(request.batch) for one in ones]
    trained = [one.trained.seconds for one in ones]
    return [
        _row("Weights of a device", "bytes", [one.fit.held.all_weights for one in ones], short="weights"),
        _row("of them gathered, in buffers", "bytes", [one.fit.held.slots for one in ones], part=True),
        _row(f"A device sends for {step}", "bytes", [float(one.round.volume.total) for one in ones], short="sends"),
        _row("of it for the layers", "bytes", [float(one.round.volume.blocks) for one in ones], part=True),
        _row(f"Time of {step}", "seconds", [one.middle.seconds for one in ones], short="time"),
        _row("of it communication", "share", [communication(one) for one in ones], part=True, short="communication"),
        _row("Tokens/s, all sequences", "count", speeds, short="tokens/s"),
        _row("Prompt until its first token", "seconds", [one.prompt.seconds for one in ones]),
        _row(f"A training step of {request.seq:,} tokens a device", "seconds", trained, short="training"),
        _row("of it moving data, not hidden", "share", [one.trained.share for one in ones], part=True),
    ]


def totals(request: Asked, sent: Sequence[float], taken: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of the whole answer, or of all answers of a batch. sent: bytes of a device; taken: seconds."""
    words = f"the answer, {request.output:,} token{'s' if request.output > 1 else ''}"
    if request.batch > 1:
        words = f"all answers, {request.batch:,} x {request.output:,} tokens"
    return [
        _row(f"A device sends for {words}", "bytes", list(sent)),
        _row(f"Time of {words}", "seconds", list(taken)),
    ]


def _row(name: str, unit: str, values: list[float], part: bool = False, short: str = "") -> dict[str, Any]:
    """part: of the row above. ratio: the second value over the first, where both are there."""
    ratio = values[1] / values[0] if len(values) == 2 and values[0] and values[1] else None
    return {"name": name, "unit": unit, "values": values, "ratio": ratio, "part": part, "short": short}


def communication(one: Generated) -> float:
    """Share of a token's time that is communication, which no arithmetic hides."""
    return sum(float(one.middle.parts.get(name, 0.0)) for name in MOVING) / one.middle.seconds


def headline(ones: Sequence[Generated], request: Asked) -> str:
    """The comparison in one sentence, the strategy that sends more first; "" for one strategy."""
    if len(ones) < 2:
        return ""
    more, less = sorted(ones, key=lambda one: -one.round.volume.total)
    sent = [float(one.round.volume.total) for one in (more, less)]
    times = f"{float(f'{sent[0] / sent[1]:.3g}'):,.10g} times as much, " if sent[1] else ""
    return (
        f"For {step_words(request)}, {more.layout} sends {format_bytes(sent[0])} from every device and {less.layout} "
        f"{format_bytes(sent[1])}: {times}in {format_time(more.middle.seconds)} against "
        f"{format_time(less.middle.seconds)}."
    )
