"""Tokens, the story: a title and two or three sentences for each of the six chapters, with the state's numbers."""

from collections.abc import Sequence
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.planner.strategies import Asked, Generated
from shardwise.predict.memory.capacity import capacity_of
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.studio.data.tokens_layer import LayerStep
from shardwise.studio.data.tokens_metrics import communication, step_words

TITLES = (
    "Where the weights are",
    "Inside one layer",
    "Through all layers",
    "The whole answer",
    "Why training is different",
    "Your own model",
)


def chapters(
    model: ModelConfig,
    cluster: Cluster,
    ones: Sequence[Generated],
    layer_steps: Sequence[Sequence[LayerStep]],
    request: Asked,
) -> list[dict[str, Any]]:
    """Title and sentences of each chapter. layer_steps: each strategy's steps inside a layer."""
    sides = [(side, one.layout, one, steps) for side, one, steps in zip("AB", ones, layer_steps, strict=False)]
    texts = (
        [_weights(model, cluster, ones[0].layout), *(_holds(side, at, steps[0]) for side, at, _, steps in sides)],
        [
            f"A token is a vector of {model.hidden:,} numbers. To go through a layer it must meet all of its matrices, "
            "wherever they are.",
            *(_inside(side, at, steps) for side, at, _, steps in sides),
        ],
        [
            f"{model.layers} layers follow each other: none can begin before the one before it is done.",
            *(
                f"{side}, {at}: {format_time(one.middle.seconds)} for {step_words(request)}, "
                f"{format_share(communication(one))} of it communication."
                for side, at, one, _ in sides
            ),
        ],
        [
            "Every further token takes all of that again: weights that moved for one token do not stay for the next.",
            *(
                f"{side}, {at}: {one.tokens_per_second(request.batch):,.3g} tokens a second, and every device sends "
                f"{format_bytes(float(one.round.volume.total))} for each step."
                for side, at, one, _ in sides
            ),
        ],
        [
            f"A training step has {request.seq:,} tokens a device where an answer has one at a time, so that a layer "
            "computes for long.",
            *(_training(side, at, one) for side, at, one, _ in sides),
        ],
        [
            "Change the model, the devices or a strategy: every number and drawing in all chapters follows.",
            "“How computed” beside each drawing has the formula with its numbers and the command that prints them.",
        ],
    )
    return [{"title": title, "sentences": text} for title, text in zip(TITLES, texts, strict=True)]


def _weights(model: ModelConfig, cluster: Cluster, layout: Layout) -> str:
    nbytes, room = count(model) * DTYPE_BYTES[layout.dtype], capacity_of(cluster)
    needs = f"{model.name} has {format_count(count(model))} weights, {format_bytes(nbytes)} in {layout.precision}"
    if not room:
        return f"{needs}."
    fits = f"one device has {format_bytes(room)}"
    return f"{needs}; {fits}{', so that each can only keep a part' if nbytes > room else ' and could hold them all'}."


def _holds(side: str, layout: Layout, first: LayerStep) -> str:
    if layout.stage == 3:
        part = (
            f"each device has 1/{layout.shard_ranks} of the numbers in a row, {format_bytes(first.memory)} of a layer"
        )
        return f"{side}, {layout}: {part}. It must gather the rest before it can compute."
    if layout.pp > 1:
        return f"{side}, {layout}: each stage has whole layers, and only one stage at a time works on a token."
    if layout.tp > 1:
        part = f"each device has a slice of every matrix, {format_bytes(first.memory)} of a layer"
        return f"{side}, {layout}: {part}. It can compute with its slices at once."
    return f"{side}, {layout}: every device has all of the model, {format_bytes(first.memory)} of a layer."


def _inside(side: str, layout: Layout, steps: Sequence[LayerStep]) -> str:
    """Computation and traffic of a layer; a message leaves a stage, not a layer."""
    computes = sum(step.seconds for step in steps if step.act in ("multiply", "one"))
    seconds = {act: next((step.seconds for step in steps if step.act == act), 0.0) for act in ("gather", "sum", "send")}
    words = f"{side}, {layout}, computes {format_time(computes)} in a layer"
    if gather := seconds["gather"]:
        words += f", and spends {format_time(gather)} on gathering its weights"
    if one := seconds["sum"]:
        words += f", and spends {format_time(2 * one)} on adding up partial results, twice"
    if seconds["send"]:
        return f"{words}. A message to the next stage takes {format_time(seconds['send'] - seconds['sum'])}."
    return f"{words}." if max(seconds.values()) else f"{words} and moves nothing."


def _training(side: str, layout: Layout, one: Generated) -> str:
    trained = one.trained
    words = f"{side}, {layout}: moving data is {format_share(trained.share)} of the step, not "
    words += f"{format_share(communication(one))} as for a token."
    if not trained.gather:
        return words
    hides = "hides behind" if trained.gather <= trained.arithmetic else "is longer than"
    return (
        f"{words} A layer's gather of {format_time(trained.gather)} {hides} the {format_time(trained.arithmetic)} that "
        "the layer before computes."
    )
