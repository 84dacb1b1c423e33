"""Tokens, the two strategies in numbers: a row for each metric, and the sentence that sums them up."""

from collections.abc import Sequence
from typing import Any

from shardwise.layout import Layout
from shardwise.planner.strategies import Asked, Generated
from shardwise.predict.time.strategy_training import TrainStepTime
from shardwise.report.units import format_bytes, format_time

MOVING = ("tensor", "data", "pipeline")
"""Parts of a token's time in which it waits for communication."""


def strategy_name(layout: Layout) -> str:
    """Name of a strategy in words, without its layout code."""
    parts = [
        ("pipeline parallelism", layout.pp > 1),
        ("tensor parallelism", layout.tp > 1),
        ("ZeRO-3", layout.stage == 3 and layout.shard_ranks > 1),
        ("data parallelism", layout.dp > 1 and layout.stage < 3),
    ]
    return " with ".join(name for name, there in parts if there) or "one device"


def serving_fit(one: Generated) -> str:
    """Whether weights, cache and workspace of an answer fit a device; empty where its memory is not known."""
    if one.fit.room is None:
        return ""
    return _verdict(one.fit.fits, one.fit.held.total, one.fit.room)


def training_fit(step: TrainStepTime) -> str:
    """Whether a training step fits a device; empty where its memory is not known."""
    if step.room is None:
        return ""
    risk = ", at risk" if step.state == "at risk" else ""
    return _verdict(step.state != "does not fit", step.peak, float(step.room["usable"])) + risk


def _verdict(fits: bool, needs: float, room: float) -> str:
    return f"{'fits' if fits else 'does not fit'}: {format_bytes(needs)} of {format_bytes(room)}"


def step_words(request: Asked) -> str:
    """Unit of bytes and times: one more token of every sequence."""
    return "a token" if request.batch == 1 else f"a step, one token for each of {request.batch:,} sequences"


def metrics(ones: Sequence[Generated], steps: Sequence[TrainStepTime], request: Asked) -> list[dict[str, Any]]:
    """Rows of name, unit and the strategies' values; those of the whole answer are `totals`. steps: in training. Rows
    with a `short` name are the ones that stay in sight beside the controls."""
    step = "a token" if request.batch == 1 else "a step"
    speeds = [one.tokens_per_second(request.batch) for one in ones]
    words = " and ".join(dict.fromkeys(f"{step.layout.ranks}" for step in steps))
    return [
        _row("Memory for the answer", "", [serving_fit(one) for one in ones], short="memory"),
        _row("Weights of a device", "bytes", [one.fit.held.all_weights for one in ones], short="weights", part=True),
        _row("of them gathered, in buffers", "bytes", [one.fit.held.slots for one in ones], part=True),
        _row("Keys and values at the end", "bytes", [one.fit.held.cache for one in ones], part=True),
        _row(f"A device sends for {step}", "bytes", [float(one.round.volume.total) for one in ones], short="sends"),
        _row("of it for the layers", "bytes", [float(one.round.volume.blocks) for one in ones], part=True),
        _row(f"Time of {step}", "seconds", [one.middle.seconds for one in ones], short="time"),
        _row("of it communication", "share", [communication(one) for one in ones], part=True, short="communication"),
        _row("Tokens/s, all sequences", "count", speeds, short="tokens/s"),
        _row("Prompt until its first token", "seconds", [one.prompt.seconds for one in ones]),
        _row(f"A training step on {words} devices", "seconds", [step.seconds for step in steps], short="training"),
        _row("of it moving data, not hidden", "share", [step.share for step in steps], part=True),
        _row("Memory for the training step", "", [training_fit(step) for step in steps], part=True, short="its memory"),
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


def _row(name: str, unit: str, values: list[Any], part: bool = False, short: str = "") -> dict[str, Any]:
    """part: of the row above. ratio: the second value over the first, where both are numbers and there."""
    ratio = values[1] / values[0] if unit and len(values) == 2 and values[0] and values[1] else None
    return {"name": name, "unit": unit, "values": values, "ratio": ratio, "part": part, "short": short}


def communication(one: Generated) -> float:
    """Share of a token's time that is communication, which no arithmetic hides."""
    return sum(float(one.middle.parts.get(name, 0.0)) for name in MOVING) / one.middle.seconds


def headline(ones: Sequence[Generated], request: Asked) -> str:
    """The comparison in two sentences, the strategy that sends more first, and whether each fits."""
    named = [f"{strategy_name(one.layout)} ({one.layout})" for one in ones]
    fits = [verdict for one in ones if (verdict := serving_fit(one))]
    if len(ones) < 2:
        return f"{named[0]} {fits[0]} for the answer." if fits else ""
    more, less = sorted(range(2), key=lambda i: -ones[i].round.volume.total)
    sent = [float(ones[i].round.volume.total) for i in (more, less)]
    times = f"{float(f'{sent[0] / sent[1]:.3g}'):,.10g} times as much, " if sent[1] else ""
    words = (
        f"For {step_words(request)}, {named[more]} sends {format_bytes(sent[0])} from every device and {named[less]} "
        f"{format_bytes(sent[1])}: {times}in {format_time(ones[more].middle.seconds)} against "
        f"{format_time(ones[less].middle.seconds)}."
    )
    bad = [f"{one.layout} {fit}." for one, fit in zip(ones, fits, strict=False) if fit.startswith("does not")]
    return " ".join([words, *(bad or ["Both fit."] * bool(fits))])
