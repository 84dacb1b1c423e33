"""Tokens, why training is different: the same gather beside the arithmetic of many tokens, what a step needs, and what
ZeRO is for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog
from shardwise.model.parameters import count
from shardwise.planner.strategies import Generated, Ratio
from shardwise.predict.memory.capacity import capacity_of
from shardwise.predict.memory.states import largest_model, training_states
from shardwise.predict.time.decode_ops import MOVING, DecodeOp
from shardwise.predict.time.generation import DecodeStrategy
from shardwise.predict.time.strategy_training import REDUCE, TrainStepTime, passes, trained
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.studio.columns import Columns, Table
from shardwise.studio.data.timelines import DrawnTimeline, Event
from shardwise.studio.data.tokens_layer import KINDS, kind_of
from shardwise.studio.data.tokens_metrics import training_fit

LAYERS = 3
"""Layers of the slowest pass that are drawn."""
FRAMES = 30
"""Steps in which they are played."""
PASSES = ("a token", "forward", "backward")
TIMES = (1, 2, 4, 8, 16, 32, 64)
"""Devices in training over those that generate."""
PASS_TOKENS = tuple(1 << power for power in range(17))
"""Tokens of one pass that the slider has: 1 to 65,536."""

_COMPUTING = ("weights", "matmul", "attention", "memory", "gradients", "optimizer")
_MOVING = ("tensor", "data", "pipeline", "experts")
_WAITING = ("bubble", "host")


# -- a training step that fits


def device_counts(cluster: Cluster) -> list[int]:
    """Devices to train on: those of the cluster, and multiples of them where the network between nodes is known."""
    return [cluster.devices * n for n in (TIMES if cluster.inter.bandwidth else TIMES[:1])]


def training_steps(
    model: ModelConfig, layouts: Sequence[Layout], cluster: Cluster, devices: int, seq: int
) -> list[TrainStepTime]:
    """The strategies in a training step on so many devices: as many more copies, weights shared out where they are.
    Activations are recomputed where nothing else fits."""
    steps = [_step(model, layout, cluster, devices, seq, "none") for layout in layouts]
    if any(step.state == "does not fit" for step in steps):
        fuller = [_step(model, layout, cluster, devices, seq, "full") for layout in layouts]
        if any(step.state != "does not fit" for step in fuller) or not any(
            step.state != "does not fit" for step in steps
        ):
            return fuller
    return steps


@lru_cache(maxsize=64)
def _step(
    model: ModelConfig, layout: Layout, cluster: Cluster, devices: int, seq: int, recompute: str
) -> TrainStepTime:
    times = devices // cluster.devices
    spread = replace(layout, dp=layout.dp * times, recompute=recompute)
    return trained(model, spread, seq, replace(cluster, nodes=cluster.nodes * times))


def usual_devices(model: ModelConfig, layouts: Sequence[Layout], cluster: Cluster, seq: int) -> int:
    """The fewest devices on which a training step of one of the strategies fits; the cluster's where none does."""
    room, counts = capacity_of(cluster) or 0, device_counts(cluster)
    for devices in counts if room else []:
        for layout in layouts:
            shared = devices if layout.stage == 3 else layout.tp * layout.pp
            if training_states(count(model), 3, shared).total > room:
                continue
            if any(step.state == "fits" for step in training_steps(model, [layout], cluster, devices, seq)):
                return devices
    return counts[0]


def training_command(model_words: Sequence[object], step: TrainStepTime) -> list[object]:
    """Words of `estimate` with the step's numbers."""
    sizes = ("--seq", step.seq, "--batch", step.layout.ranks)
    return ["estimate", *model_words, "--layout", step.layout, "--cluster", step.cluster, *sizes]


def trained_table(steps: Sequence[TrainStepTime]) -> Table:
    """Time of a training step and of one block in it under each strategy, and whether it fits."""
    columns: Columns = {
        "strategy": ("", lambda one: str(one.layout)),
        "memory": ("", training_fit),
        "step": ("seconds", lambda one: one.seconds),
        "moving data": ("seconds", lambda one: one.moving),
        "of the step": ("share", lambda one: one.share),
        "waiting": ("seconds", lambda one: one.waiting),
        "one block computes": ("seconds", lambda one: one.arithmetic),
        "and backward": ("seconds", lambda one: one.block.backward + one.block.sums[1]),
        "its gather takes": ("seconds", lambda one: one.gather),
        "its reduction takes": ("seconds", lambda one: one.block.reduce),
        "micro-batches": ("", lambda one: one.micro_batches),
    }
    return Table.of(f"The same strategies in a training step of {steps[0].seq:,} tokens a device", steps, columns)


def shares_table(ones: Sequence[Generated], steps: Sequence[TrainStepTime]) -> Table:
    """Shares of a token's and a training step's time."""
    times = [(str(one.layout), PASSES[0], one.middle.parts, one.middle.seconds) for one in ones]
    times += [(str(step.layout), "a training step", step.parts, step.seconds) for step in steps]
    rows = []
    for layout, of, parts, whole in times:
        sums = (sum(float(parts.get(name, 0.0)) for name in names) for names in (_COMPUTING, _MOVING, _WAITING))
        rows.append((layout, of, *(part / whole for part in sums), whole))
    units = {"strategy": "", "of": ""} | dict.fromkeys(("computes", "moves data", "waits"), "share")
    return Table.of_rows("Shares of the time of a token and of a training step", units | {"takes": "seconds"}, rows)


def drawn(layers: int, steps: Sequence[TrainStepTime], ways: Sequence[Sequence[DecodeOp]]) -> dict[str, Any]:
    """Rows of what each strategy computes and moves for a token, forward and backward, for as long as `LAYERS` layers
    take in the slowest; and a sentence for each of `FRAMES` steps. ways: of a token, by strategy."""
    results = [(way, *passes(step.block, layers)) for step, way in zip(steps, ways, strict=True)]
    span = max(_end_of(one, min(LAYERS, layers)) for item in results for one in item)
    rows: list[str] = []
    events: list[Event] = []
    for side, item in enumerate(results):
        for name, pieces in zip(PASSES, item, strict=True):
            for moves in (False, True):
                events += list(_events(pieces, side, len(rows), moves, span))
                rows.append("moves" if moves else f"{'AB'[side]}, {name}")
    sentences = [_sentence(results, span * frame / FRAMES, layers) for frame in range(FRAMES + 1)]
    return DrawnTimeline(rows, events).to_json() | {"kinds": KINDS, "span": span, "sentences": sentences}


def _end_of(pieces: Sequence[DecodeOp], layers: int) -> float:
    parts = list(dict.fromkeys(piece.part for piece in pieces if piece.part.startswith("blocks.")))[:layers]
    return max(piece.end for piece in pieces if piece.part in parts and piece.what != REDUCE)


def _events(pieces: Sequence[DecodeOp], side: int, row: int, moves: bool, span: float) -> Iterator[Event]:
    moving = (*MOVING, REDUCE)
    for piece in pieces:
        if (piece.what in moving) == moves and piece.start < span and piece.part:
            kind = kind_of(side, MOVING[0] if moves else piece.what)
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


def how_trained(step: TrainStepTime) -> str:
    """A strategy's gather beside its arithmetic, in a sentence."""
    block = step.block
    if not step.gather:
        return f"{step.layout}: {format_time(step.moving)} of {format_time(step.seconds)} move data; no gathers"
    hides = "hides" if step.gather <= step.arithmetic else "does not hide"
    return (
        f"{step.layout}: a block computes {format_time(step.arithmetic)} forward and {format_time(block.backward)} "
        f"backward, its gather takes {format_time(step.gather)}: it {hides} behind the block before; its gradients' "
        f"reduce-scatter takes {format_time(block.reduce)}"
    )


def how_drawn(steps: Sequence[TrainStepTime]) -> list[str]:
    """Explanation of the drawing's pieces."""
    slowed = steps[0].block.slowed
    return [
        *(how_trained(step) for step in steps),
        *(f"{step.layout} {training_fit(step)}, as {step.engine} runs it." for step in steps if training_fit(step)),
        f"A transfer slows the arithmetic beside it by {format_share(slowed)} of its own seconds; what does not fit "
        "beside it comes after it. Halves of a layer and their sums are drawn equally long.",
        "One micro-batch, without embedding, head, optimizer, adding up gradients, the host's rest and, in a "
        "pipeline, messages: these are in the step's seconds, not in the drawing.",
    ]


# -- from which number of tokens on gathering pays


def flip_table(strategies: Sequence[DecodeStrategy]) -> Table:
    """Seconds of one pass of so many tokens over all devices under each strategy."""
    columns: dict[str, list[Any]] = {"tokens of a pass": list(PASS_TOKENS)}
    columns |= {
        f"{side} takes": [one.one_pass(max(1.0, tokens / one.layout.dp)).seconds for tokens in PASS_TOKENS]
        for side, one in zip("AB", strategies, strict=False)
    }
    return Table("One pass of more and more tokens", columns, dict.fromkeys(list(columns)[1:], "seconds"))


def flip_sentences(model: ModelConfig, ones: Sequence[Generated], table: Table, ratio: Ratio | None) -> list[str]:
    """A sentence for each number of tokens: the FLOPs of one matrix and of the model, and each strategy's seconds."""
    d, ffn, weights = model.hidden, model.ffn, count(model)
    lines = []
    for i, tokens in enumerate(PASS_TOKENS):
        times = [(str(one.layout), table.columns[f"{s} takes"][i]) for s, one in zip("AB", ones, strict=False)]
        said = " and ".join(f"{layout} in {format_time(seconds)}" for layout, seconds in times)
        faster = ""
        if ratio and ratio.faster:
            faster = f" From about {ratio.faster:,} tokens on, {ratio.gathering} is the faster one."
        lines.append(
            f"{tokens:,} token{'' if tokens == 1 else 's'} in one pass: one matrix of {d:,} x {ffn:,} takes 2 x "
            f"{tokens:,} x {d:,} x {ffn:,} = {_flops(2 * tokens * d * ffn)}, all weights together "
            f"{_flops(2 * tokens * weights)}: {said}.{faster}"
        )
    return lines


def _flops(n: float) -> str:
    size, unit = format_count(n)[:-1], format_count(n)[-1:]
    names = {"k": "kFLOP", "M": "MFLOP", "B": "GFLOP", "T": "TFLOP", "P": "PFLOP"}
    return f"{size} {names[unit]}" if unit in names else f"{n:,.0f} FLOP"


# -- what ZeRO is for


def zero_table(model: ModelConfig, cluster: Cluster, devices: int) -> Table:
    """Bytes of the training states on a device at each stage, and whether they fit; activations come on top."""
    room, weights, rows = capacity_of(cluster), count(model), []
    for stage in range(4):
        states = training_states(weights, stage, devices)
        fits = None if room is None else states.total <= room
        rows.append((stage, states.weights, states.gradients, states.optimizer, states.total, fits))
    units = {"stage": ""} | dict.fromkeys(("weights", "gradients", "optimizer state", "in all"), "bytes")
    return Table.of_rows(f"Training states of a device, {devices:,} devices", units | {"fits": ""}, rows)


def zero_sentences(model: ModelConfig, cluster: Cluster, devices: int) -> list[str]:
    """A sentence for each stage: the bytes of a weight written out, and the largest model that then fits."""
    room, weights, lines = capacity_of(cluster), count(model), []
    sizes = sorted(((count(one), name) for name, one in catalog().items() if not one.experts), reverse=True)
    shared = ("nothing is shared out", "optimizer state is shared out", "gradients, too", "weights, too")
    for stage in range(4):
        one, all_of_it = training_states(1.0, stage, devices), training_states(weights, stage, devices).total
        sums = " + ".join(f"{part:.3g}" for part in (one.weights, one.gradients, one.optimizer))
        line = (
            f"Stage {stage}, {shared[stage]}: {sums} = {one.total:.3g} bytes a weight on each of {devices:,} devices, "
            f"{format_bytes(all_of_it)} for {model.name}."
        )
        if room:
            largest = largest_model(room, stage, devices)
            named = next((name for size, name in sizes if size <= largest), "")
            such = f", such as {named}" if named else ""
            line += f" {format_bytes(room)} hold the states of up to {format_count(largest)} weights{such}."
        lines.append(line)
    return lines
