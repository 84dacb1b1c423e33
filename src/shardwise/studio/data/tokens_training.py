"""Tokens, why training is different: the same gather beside a layer's arithmetic for many tokens, and for one."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from shardwise.planner.strategies import Generated
from shardwise.predict.time.decode_ops import MOVING, DecodeOp
from shardwise.predict.time.strategy_training import BACKWARD, REDUCE, passes
from shardwise.report.units import format_share, format_time
from shardwise.studio.columns import Columns, Table
from shardwise.studio.data.timelines import DrawnTimeline, Event

LAYERS = 3
"""Layers of the slowest pass that are drawn."""
FRAMES = 30
"""Steps in which they are played."""
PASSES = ("a token", "forward", "backward")

_COMPUTING = ("weights", "matmul", "attention", "memory", "gradients", "optimizer")
_MOVING = ("tensor", "data", "pipeline", "experts")
_WAITING = ("bubble", "host")


def trained_table(ones: Sequence[Generated]) -> Table:
    """Time of a training step and of one block in it under each strategy."""
    columns: Columns = {
        "strategy": ("", lambda one: str(one.layout)),
        "step": ("seconds", lambda one: one.trained.seconds),
        "moving data": ("seconds", lambda one: one.trained.moving),
        "of the step": ("share", lambda one: one.trained.share),
        "waiting": ("seconds", lambda one: one.trained.waiting),
        "one block computes": ("seconds", lambda one: one.trained.arithmetic),
        "and backward": ("seconds", lambda one: one.trained.block.backward + one.trained.block.sums[1]),
        "its gather takes": ("seconds", lambda one: one.trained.gather),
        "its reduction takes": ("seconds", lambda one: one.trained.block.reduce),
        "micro-batches": ("", lambda one: one.trained.micro_batches),
    }
    return Table.of("The same strategies in a training step of 8,192 tokens a device", ones, columns)


def shares_table(ones: Sequence[Generated]) -> Table:
    """Shares of a token's and a training step's time."""
    rows = []
    for of in ("a token", "a training step"):
        for one in ones:
            parts = one.middle.parts if of == PASSES[0] else one.trained.parts
            whole = one.middle.seconds if of == PASSES[0] else one.trained.seconds
            sums = (sum(float(parts.get(name, 0.0)) for name in names) for names in (_COMPUTING, _MOVING, _WAITING))
            rows.append((str(one.layout), of, *(part / whole for part in sums), whole))
    units = {"strategy": "", "of": ""} | dict.fromkeys(("computes", "moves data", "waits"), "share")
    return Table.of_rows("Shares of the time of a token and of a training step", units | {"takes": "seconds"}, rows)


def drawn(layers: int, ones: Sequence[Generated], ways: Sequence[Sequence[DecodeOp]]) -> dict[str, Any]:
    """Rows of what each strategy computes and moves for a token, forward and backward, for as long as `LAYERS` layers
    take in the slowest; and a sentence for each of `FRAMES` steps. ways: of a token, by strategy."""
    results = [(way, *passes(one.trained.block, layers)) for one, way in zip(ones, ways, strict=True)]
    span = max(_end_of(one, min(LAYERS, layers)) for item in results for one in item)
    rows: list[str] = []
    events: list[Event] = []
    for side, item in zip("AB", results, strict=False):
        for name, pieces in zip(PASSES, item, strict=True):
            for moves in (False, True):
                events += list(_events(pieces, len(rows), moves, span))
                rows.append("moves" if moves else f"{side}, {name}")
    sentences = [_sentence(results, span * frame / FRAMES, layers) for frame in range(FRAMES + 1)]
    return DrawnTimeline(rows, events).to_json() | {"span": span, "sentences": sentences}


def _end_of(pieces: Sequence[DecodeOp], layers: int) -> float:
    parts = list(dict.fromkeys(piece.part for piece in pieces if piece.part.startswith("blocks.")))[:layers]
    return max(piece.end for piece in pieces if piece.part in parts and piece.what != REDUCE)


def _events(pieces: Sequence[DecodeOp], row: int, moves: bool, span: float) -> Iterator[Event]:
    moving = (*MOVING, REDUCE)
    for piece in pieces:
        if (piece.what in moving) == moves and piece.start < span and piece.part:
            kind = 5 if moves else int(piece.what == BACKWARD)
            layer = piece.part.removeprefix("blocks.")
            name = f"layer {int(layer) + 1}: {piece.what}" if layer.isdecimal() else f"{layer}: {piece.what}"
            yield Event(row, piece.start, min(piece.seconds, span - piece.start), kind, name)


def _sentence(ops: Sequence[Sequence[Sequence[DecodeOp]]], time: float, layers: int) -> str:
    if not time:
        return (
            f"Six clocks start: a token, the forward and the backward pass of a training step, through {layers} layers."
        )
    reported = []
    for side, item in zip("AB", ops, strict=False):
        token, forward, backward = (_done(pieces, time) for pieces in item)
        reported.append(f"{side} has done {token} layers for a token, {forward} forward and {backward} backward")
    return f"After {format_time(time)}: {'; '.join(reported)}."


def _done(pieces: Sequence[DecodeOp], time: float) -> int:
    ends: dict[str, float] = {}
    for piece in pieces:
        if piece.part.startswith("blocks.") and piece.what != REDUCE:
            ends[piece.part] = piece.end
    return len(list(takewhile(lambda end: end <= time * (1 + 1e-9), sorted(ends.values()))))


def how_trained(one: Generated) -> str:
    """A strategy's gather beside its arithmetic, in a sentence."""
    trained, block = one.trained, one.trained.block
    if not trained.gather:
        return f"{one.layout}: {format_time(trained.moving)} of {format_time(trained.seconds)} move data; no gathers"
    hides = "hides" if trained.gather <= trained.arithmetic else "does not hide"
    return (
        f"{one.layout}: a block computes {format_time(trained.arithmetic)} forward and {format_time(block.backward)} "
        f"backward, its gather takes {format_time(trained.gather)}: it {hides} behind the block before; its gradients' "
        f"reduce-scatter takes {format_time(block.reduce)}"
    )


def how_drawn(ones: Sequence[Generated]) -> list[str]:
    """Explanation of the drawing's pieces."""
    slowed = ones[0].trained.block.slowed
    return [
        *(how_trained(one) for one in ones),
        f"A transfer slows the arithmetic beside it by {format_share(slowed)} of its own seconds; what does not fit "
        "beside it comes after it. Halves of a layer and their sums are drawn equally long.",
        "One micro-batch, without embedding, head, optimizer and, in a pipeline, messages: these are in the step's "
        "seconds, not in the drawing.",
    ]
