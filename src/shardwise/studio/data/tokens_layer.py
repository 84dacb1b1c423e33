"""Tokens, layer by layer: what each device does inside one, and how a token goes through all of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.layout.serving import plan_of, sequences_of
from shardwise.model import ModelConfig
from shardwise.predict.time.decode_ops import (
    ATTENTION,
    FEED_FORWARD,
    GATHER,
    HOST,
    MESSAGE,
    MOVING,
    SUM,
    WAIT,
    DecodeOp,
)
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.studio.columns import How, Table
from shardwise.studio.data.collectives import MOST_RANKS
from shardwise.studio.data.timelines import DrawnTimeline, Event

STEPS = 6
"""Steps of the walk through a layer."""
EXPOSED = "gather that is not hidden"

KINDS = ("a", "a-moving", "b", "b-moving", "rest")
"""Kinds of events: the strategies' hues, computing and moving, and what is neither."""
FRAMES = 60
"""Steps in which one layer is played, equally long."""


def kind_of(side: int, what: str) -> int:
    """Kind of event of a strategy's piece. side: 0 or 1."""
    return 4 if what in (HOST, WAIT) else 2 * side + (what in MOVING)


class LayerStep(NamedTuple):
    """Work of each device at one step of a layer."""

    act: str
    """A word for the drawing."""
    words: str
    seconds: float = 0.0
    collective: tuple[str, int, int] | None = None
    """(name, ranks, bytes) of what moves."""
    memory: float = 0.0
    """Bytes of this layer's and the next one's weights that are then on a device which has the layer."""
    ahead: float = 0.0
    """Share of the next layer that has been gathered by then."""


def steps(model: ModelConfig, layout: Layout, pieces: Sequence[DecodeOp], sequences: int) -> list[LayerStep]:
    """The `STEPS` steps of a layer in the middle of a token's way, with so many sequences on all ranks together."""
    taken = _of_one_layer(model, pieces)
    added = _sum(model, layout, taken[SUM], -(-sequences_of(layout, sequences) // layout.pp))
    if layout.stage == 3:
        return _gathering(model, layout, taken, added)
    held = plan_of(model, layout).by_name["blocks.0"].numel * DTYPE_BYTES[layout.dtype]
    return [step._replace(memory=held) for step in _standing(model, layout, taken, added)]


def _standing(model: ModelConfig, layout: Layout, taken: dict[str, float], added: LayerStep) -> list[LayerStep]:
    if layout.pp > 1:
        return _staged(model, layout, taken, added)
    if layout.tp > 1:
        return [
            LayerStep(
                "hold", f"Each device holds a slice of every matrix, whole heads of attention: 1/{layout.tp} in all."
            ),
            LayerStep("hold", "Nothing has to come: every device has the token's vector already."),
            LayerStep(
                "multiply",
                "Every device multiplies with its own slices, and attends with its own heads.",
                taken[ATTENTION],
            ),
            added,
            LayerStep(
                "multiply", "Every device multiplies with its own slice of the feed-forward.", taken[FEED_FORWARD]
            ),
            added._replace(words=f"{added.words} Weights have not moved at all."),
        ]
    return [
        LayerStep("hold", "One device holds all of the layer."),
        LayerStep("hold", "Nothing has to come."),
        LayerStep("multiply", "It computes alone.", taken[ATTENTION]),
        LayerStep("hold", "Nothing to sum."),
        LayerStep("multiply", "It computes alone.", taken[FEED_FORWARD]),
        LayerStep("hold", "Nothing to sum."),
    ]


def _of_one_layer(model: ModelConfig, pieces: Sequence[DecodeOp]) -> dict[str, float]:
    middle = f"blocks.{model.layers // 2}"
    results = {
        what: next((p.seconds for p in pieces if p.part == middle and p.what == what), 0.0)
        for what in (ATTENTION, SUM, FEED_FORWARD, GATHER)
    }
    begins, ends = _layer_span(model, pieces)
    results[EXPOSED] = ends - begins - sum(p.seconds for p in pieces if p.part == middle and p.what != GATHER)
    return results | {MESSAGE: next((p.seconds for p in pieces if p.what == MESSAGE), 0.0)}


def _layer_span(model: ModelConfig, pieces: Sequence[DecodeOp]) -> tuple[float, float]:
    """From when the layer before the middle one is done until the middle one is."""
    middle = model.layers // 2
    before = [p.end for p in pieces if p.part == f"blocks.{middle - 1}"]
    own = [p for p in pieces if p.part == f"blocks.{middle}"]
    return max(before, default=min(p.start for p in own)), max(p.end for p in own)


def _sum(model: ModelConfig, layout: Layout, seconds: float, sequences: int) -> LayerStep:
    if layout.tp == 1:
        return LayerStep("multiply", "Nothing to sum.")
    vector = model.hidden * DTYPE_BYTES[layout.dtype]
    words = f"The {layout.tp} partial results are added up on all: {format_bytes(vector)} a token, an all-reduce."
    return LayerStep("sum", words, seconds, ("all-reduce", layout.tp, vector * sequences))


def _gathering(model: ModelConfig, layout: Layout, taken: dict[str, float], added: LayerStep) -> list[LayerStep]:
    unit, width, ranks = plan_of(model, layout).by_name["blocks.0"], DTYPE_BYTES[layout.dtype], layout.shard_ranks
    whole, part = (format_bytes(n * width) for n in (unit.numel, unit.shard_numel))
    slices = "layer" if layout.tp == 1 else "slice of the layer"
    steps = [
        LayerStep("hold", f"Each device holds 1/{ranks} of the {slices}, cut like a tape across its matrices: {part}."),
        LayerStep(
            "gather",
            f"All gather the whole {slices}: each receives what it lacks of {whole}, in {format_time(taken[GATHER])}; "
            "what of that the layer before did not hide is counted here.",
            taken[EXPOSED],
            ("all-gather", ranks, unit.padded * width),
        ),
        LayerStep(
            "multiply", "Every device multiplies with what it gathered, for its own tokens alone.", taken[ATTENTION]
        ),
        added._replace(words=f"{added.words} Meanwhile the next layer is being gathered."),
        LayerStep("multiply", "The whole feed-forward, too.", taken[FEED_FORWARD]),
        LayerStep(
            "free",
            f"The {whole} are freed again: only the own 1/{ranks} stays."
            + (f" Before that, once more: {added.words}" if layout.tp > 1 else ""),
            added.seconds,
        ),
    ]
    return _with_memory(steps, taken[GATHER], unit.shard_numel * width, unit.numel * width)


def _with_memory(steps: list[LayerStep], gather: float, part: float, whole: float) -> list[LayerStep]:
    """Bytes of a device's own part, of this layer once it is gathered, and of what of the next one comes meanwhile: its
    gather, of so many seconds, begins when this layer's arithmetic does."""
    passed, result = 0.0, []
    for number, step in enumerate(steps):
        passed += step.seconds if number > 1 else 0.0
        ahead = min(1.0, passed / gather) if gather else 1.0 * (number > 1)
        there = 0 < number < STEPS - 1
        result.append(step._replace(memory=part + there * whole + ahead * whole, ahead=ahead))
    return result


def _staged(model: ModelConfig, layout: Layout, taken: dict[str, float], added: LayerStep) -> list[LayerStep]:
    blocks = plan_of(model, layout).of_kind("block")
    vector = model.hidden * DTYPE_BYTES[layout.dtype]
    alone = "One device alone multiplies" if layout.tp == 1 else f"The stage's {layout.tp} devices alone multiply"
    slices = f", its {layout.tp} devices a slice of every matrix" if layout.tp > 1 else ""
    between = LayerStep("one", "Nothing to sum: it has all there is of the layer.") if layout.tp == 1 else added
    return [
        LayerStep("hold", f"Each stage holds whole layers: the first one {len(blocks)} of {model.layers}{slices}."),
        LayerStep("wait", "The first stage has the token; the others wait, unless other sequences keep them busy."),
        LayerStep(
            "one", f"{alone} with {'the whole matrices' if layout.tp == 1 else 'their slices'}.", taken[ATTENTION]
        ),
        between,
        LayerStep("one", f"The {'whole ' if layout.tp == 1 else ''}feed-forward, too.", taken[FEED_FORWARD]),
        LayerStep(
            "send",
            f"After {len(blocks)} layers it sends a vector of {format_bytes(vector)} on in "
            f"{format_time(taken[MESSAGE])}, and waits.",
            added.seconds,
        ),
    ]


def link(step: LayerStep, cluster: Cluster) -> str:
    """The state of the Collectives view that shows what moves at a step chunk by chunk; empty where nothing does."""
    if step.act not in ("gather", "sum") or not step.collective or step.collective[1] > MOST_RANKS:
        return ""
    collective, ranks, nbytes = step.collective
    return "collectives?" + urlencode(
        {"collective": collective, "ranks": ranks, "bytes": nbytes, "cluster": str(cluster)}
    )


LayerSide = tuple[Layout, list[LayerStep], int, float]
"""(strategy, its steps, layers, seconds of a token)"""


def layer_table(sides: Sequence[LayerSide]) -> Table:
    """Every step under each strategy with its seconds."""
    rows: list[tuple[Any, ...]] = []
    for layout, told, layers, token in sides:
        so_far = 0.0
        for number, step in enumerate(told):
            so_far += step.seconds
            rows.append((str(layout), number, *step[:2], step.seconds, so_far, step.memory, step.ahead))
        rest = token - layers * so_far
        rows.append((str(layout), STEPS, "all layers", f"{layers} layers like this one", layers * so_far, *[None] * 3))
        rows.append((str(layout), STEPS + 1, "rest", "embedding, head, messages and the host", rest, token, None, None))
    units = dict.fromkeys(("strategy", "step", "what", "in words"), "")
    units |= {"takes": "seconds", "so far": "seconds", "weights there": "bytes", "of the next layer": "share"}
    return Table.of_rows("One layer, step by step", units, rows)


def how_layer(sides: Sequence[LayerSide], command: str) -> How:
    """Explanation of the steps' seconds."""
    lines = ["One block of one pass: kernels from the engine profile's tables, collectives from the cluster's prices."]
    for layout, told, layers, token in sides:
        sums = " + ".join(f"{step.act} {format_time(step.seconds)}" for step in told if step.seconds)
        one = sum(step.seconds for step in told)
        lines.append(
            f"{layout}: {sums} = {format_time(one)}, {layers} times {format_time(layers * one)}, and with embedding, "
            f"head, messages and the host {format_time(token)}, a token's time"
        )
    lines.append("Memory-bound kernels (norms, rotation, activation) are counted one half with each part.")
    lines.append("Weights there: of this layer and the next one, the buffers of what is gathered among them.")
    lines.append("A gather overlaps the arithmetic of the layer before: it costs what is not hidden.")
    return How(lines, command, "docs/generation.md")


# -- through all layers


def through_table(model: ModelConfig, layouts: Sequence[Layout], ways: Sequence[Sequence[DecodeOp]]) -> Table:
    """When each strategy is done with each layer, and how much of that it has computed and moved."""
    columns: dict[str, list[Any]] = {"layer": list(range(1, model.layers + 1))}
    units: dict[str, str] = {}
    for side, pieces in zip("AB", ways, strict=False):
        of = {f"blocks.{i}": [p for p in pieces if p.part == f"blocks.{i}"] for i in range(model.layers)}
        columns |= {
            f"{side} computes": [sum(p.seconds for p in result if p.what not in MOVING) for result in of.values()],
            f"{side} moves": [sum(p.seconds for p in result if p.what in MOVING) for result in of.values()],
            f"{side} is done after": [max(p.end for p in result) for result in of.values()],
        }
        units |= dict.fromkeys(list(columns)[-3:], "seconds")
    names = " and ".join(map(str, layouts))
    return Table(f"One token through all layers: {names}", columns, units)


def through_drawn(layouts: Sequence[Layout], ways: Sequence[Sequence[DecodeOp]]) -> dict[str, Any]:
    """The pieces as events: a row for what a strategy computes and one for what it moves, or in a pipeline one for each
    stage. sides: which strategy each row is of."""
    rows: list[str] = []
    sides: list[int] = []
    events: list[Event] = []
    for number, (layout, pieces) in enumerate(zip(layouts, ways, strict=True)):
        lanes: dict[tuple[int, bool], int] = {}
        for lane in sorted({_lane(layout, p) for p in pieces}):
            lanes[lane] = len(rows)
            does = f"stage {lane[0]}" if layout.pp > 1 else "moves" if lane[1] else "computes"
            rows.append(f"{'AB'[number]} {does}")
            sides.append(number)
        for p in pieces:
            name = f"{_layer(p.part)}{p.what}"
            events.append(Event(lanes[_lane(layout, p)], p.start, p.seconds, kind_of(number, p.what), name))
    return DrawnTimeline(rows, events).to_json() | {"sides": sides, "kinds": KINDS}


# -- one layer on one clock


def clock(model: ModelConfig, layouts: Sequence[Layout], ways: Sequence[Sequence[DecodeOp]]) -> dict[str, Any]:
    """One layer of the slowest strategy, and what the other one does in that time: events from 0 to `span` seconds.

    Every clock starts when a layer may begin: with weight gathering once the layer before is done, otherwise with the
    first layer. done: seconds after which each strategy is done with one layer after the other. sentences: one for
    each of `FRAMES` + 1 moments, equally far apart.
    """
    starts = [
        _layer_span(model, way)[0] if layout.stage == 3 else min(p.start for p in way if p.part == "blocks.0")
        for layout, way in zip(layouts, ways, strict=True)
    ]
    span = max(end - begin for begin, end in (_layer_span(model, way) for way in ways))
    rows, events, done = [], [], []
    for number, (way, start) in enumerate(zip(ways, starts, strict=True)):
        shown = [p._replace(start=p.start - start) for p in way if p.end - start > 1e-9 * span]
        computes = min(p.start for p in shown if p.what not in MOVING)
        for piece in shown:
            # What arithmetic beside it slows of a gather is waited for, too.
            ends = max(piece.end, computes) if piece.what == GATHER and piece.start < 0 else piece.end
            begin, end = max(0.0, piece.start), min(span, ends)
            if end > begin and piece.start < span:
                row = 2 * number + (piece.what in MOVING)
                name = f"{_layer(piece.part)}{piece.what}"
                events.append(Event(row, begin, end - begin, kind_of(number, piece.what), name))
        rows += [f"{'AB'[number]} computes", "moves"]
        last = {p.part: p.end for p in shown if p.part.startswith("blocks.") and p.what != GATHER}
        done.append(sorted(end for end in last.values() if end <= span * (1 + 1e-9)))
    sentences = [_on_clock(layouts, events, done, span * i / FRAMES) for i in range(FRAMES + 1)]
    drawn = DrawnTimeline(rows, events).to_json()
    return drawn | {"kinds": KINDS, "span": span, "done": done, "sentences": sentences}


def _on_clock(layouts: Sequence[Layout], events: list[Event], done: list[list[float]], time: float) -> str:
    if not time:
        return "Both clocks start at the same moment, each before a layer."
    words = []
    for number, layout in enumerate(layouts):
        count = sum(end <= time * (1 + 1e-9) for end in done[number])
        said = f"{'AB'[number]}, {layout}, has done {count} layer{'' if count == 1 else 's'}"
        waited = next((e for e in events if e.rank == 2 * number + 1), None)
        if layout.stage == 3 and waited and time < waited.seconds:
            said += f" and waits: {format_share(time / waited.seconds)} of what is left of its gather has come"
        words.append(said)
    return f"After {format_time(time)}: {'; '.join(words)}."


def clock_table(layouts: Sequence[Layout], shown: dict[str, Any]) -> Table:
    """When each layer is done on the one clock."""
    rows = [
        (str(layout), number + 1, end)
        for layout, ends in zip(layouts, shown["done"], strict=True)
        for number, end in enumerate(ends)
    ]
    units = {"strategy": "", "layer": "", "is done after": "seconds"}
    return Table.of_rows(f"Layers in {format_time(shown['span'])}", units, rows)


def _lane(layout: Layout, piece: DecodeOp) -> tuple[int, bool]:
    """(stage, whether it moves data): without a pipeline a gather overlaps arithmetic."""
    return piece.stage, layout.pp == 1 and piece.what in MOVING


def _layer(part: str) -> str:
    if part.startswith("blocks."):
        return f"layer {int(part.split('.')[1]) + 1}: "
    return "" if part in ("", "head") else f"{part}: "


def how_through(layouts: Sequence[Layout], ways: Sequence[Sequence[DecodeOp]], command: str) -> How:
    """Explanation of the pieces' places."""
    lines = ["The token half-way through the answer: its parts one after the other, as each strategy runs them."]
    for layout, pieces in zip(layouts, ways, strict=True):
        taken = format_time(max(piece.end for piece in pieces))
        lines.append(f"{layout}: {len(pieces)} pieces, {taken} in all, which is the token's time")
    lines.append("A gather begins when the layer before begins to compute, where there is a free buffer for it.")
    return How(lines, command, "docs/generation.md")
