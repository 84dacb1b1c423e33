"""A token's way through the layers: what is computed and what is moved, and when.

`timing` says what a token takes in all; here the same seconds are laid out one after the other.
"""

from typing import NamedTuple

from shardwise.layout.pipeline import stages
from shardwise.layout.serving import plan_of
from shardwise.predict.time.generation import DecodeStrategy
from shardwise.predict.time.serving import PassSeconds

ATTENTION, SUM, EXCHANGE, FEED_FORWARD, GATHER, MESSAGE, HEAD, HOST, WAIT = (
    "attention", "sum", "exchange", "feed-forward", "gather", "message", "output head", "host",
    "waiting for other groups",
)  # fmt: skip
MOVING = (SUM, EXCHANGE, GATHER, MESSAGE)
"""Operations that move data; WAIT does nothing; all others compute."""

Block = tuple[tuple[str, float], ...]
"""(what, seconds) of one block, one after the other."""


class DecodeOp(NamedTuple):
    """One operation or transfer of a token's forward pass. stage: the pipeline stage that does it (0 without a
    pipeline). part: of the model, or "" for what belongs to none. what: one of this module's names. start, seconds: in
    seconds."""

    stage: int
    part: str
    what: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


def way(strategy: DecodeStrategy, sequences: int, context: float) -> list[DecodeOp]:
    """The pieces of `strategy.token(sequences, context)`, in order; the last one ends after its seconds. A gather may
    go on beside the arithmetic of the part before; other pieces follow each other."""
    through, group = strategy.decoding(sequences, context)
    block, parts = _block(strategy, through, group), strategy.token(sequences, context).parts
    if strategy.layout.stage == 3:
        return _gathering(strategy, block, float(through.head), parts["host"])
    found, now, layer = [], 0.0, 0
    counts = stages(strategy.model, strategy.layout).layers
    for stage, count in enumerate(counts):
        todo = [(f"blocks.{layer + i}", what, seconds) for i in range(count) for what, seconds in block]
        layer += count
        if stage == len(counts) - 1:
            todo.append(("head", HEAD, float(through.head)))
        todo.append(("", HOST, float(through.host) / len(counts)))
        if len(counts) > 1:
            todo.append(("", MESSAGE, strategy.hop(group)))
        for part, what, seconds in todo:
            found.append(DecodeOp(stage, part, what, now, seconds))
            now += seconds
    return [piece for piece in [*found, DecodeOp(0, "", WAIT, now, parts.get("bubble", 0.0))] if piece.seconds]


def _block(strategy: DecodeStrategy, through: PassSeconds, group: int) -> Block:
    """Seconds of a block by operation, in order. Each part counts one half of the memory-bound kernels."""
    projections, feed_forward = map(float, strategy.served.decode_products(group))
    exchange = float(through.block.get("experts", 0.0))
    attention, memory, sums = (float(through.block[name]) for name in ("attention", "memory", "tensor"))
    return (
        (ATTENTION, projections + attention + memory / 2),
        (SUM, sums / 2),
        (EXCHANGE, exchange / 2),
        (FEED_FORWARD, feed_forward + memory / 2),
        (EXCHANGE, exchange / 2),
        (SUM, sums / 2),
    )


def _gathering(strategy: DecodeStrategy, block: Block, head: float, host: float) -> list[DecodeOp]:
    """Part by part: what of its gather is not hidden, then its arithmetic, which the next part's gather slows."""
    plan, slowed = plan_of(strategy.model, strategy.layout), strategy.pricing.constants.value("contention")
    gathers = strategy.gathers(sum(seconds for _, seconds in block))
    found, now, before = [], 0.0, 0.0
    for part, gather, coming in zip(plan.parts, gathers, [*gathers[1:], None], strict=True):
        todo = {"block": block, "head": ((HEAD, head),)}.get(plan.blueprint.kind(part), ())
        if gather.seconds:
            found.append(DecodeOp(0, part, GATHER, before if gather.hidden else now, gather.seconds))
        before = now = now + gather.exposed
        whole = sum(seconds for _, seconds in todo)
        longer = 1 + slowed * coming.hidden / whole if coming and whole else 1.0
        for what, seconds in todo:
            found.append(DecodeOp(0, part, what, now, seconds * longer))
            now += seconds * longer
    return [piece for piece in [*found, DecodeOp(0, "", HOST, now, host)] if piece.seconds]
