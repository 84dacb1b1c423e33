"""Tokens, the story: a title and a few sentences for each chapter, with the state's numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.planner.strategies import Asked, Generated
from shardwise.predict.memory.capacity import capacity_of
from shardwise.predict.time.strategy_training import TrainStepTime
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.studio.data.tokens_layer import LayerStep
from shardwise.studio.data.tokens_metrics import communication, serving_fit, step_words, strategy_name, training_fit

TITLES = (
    "One prompt, two strategies",
    "Where the weights are",
    "A product, cut in two",
    "One layer on one clock",
    "Through all layers",
    "The whole answer",
    "Training flips it",
    "What ZeRO is for",
    "Who uses which",
    "Your own model",
)
CODES = (
    ("pp", "{n} groups of layers, one after the other"),
    ("tp", "{n} slices of every matrix"),
    ("dp", "{n} copies of the model"),
)
"""Degrees of a layout in words."""


class Side(NamedTuple):
    """One strategy: its letter, its prediction, the steps inside a layer, and a training step."""

    letter: str
    one: Generated
    steps: Sequence[LayerStep]
    trained: TrainStepTime

    @property
    def layout(self) -> Layout:
        return self.one.layout


def chapters(model: ModelConfig, cluster: Cluster, sides: Sequence[Side], request: Asked) -> list[dict[str, Any]]:
    """Title and sentences of each chapter."""
    texts = (
        [
            "A prompt comes in, and an answer is written token by token. Each token goes through all of the model's "
            f"{model.layers} layers.",
            *(_named(side) for side in sides),
        ],
        [_weights(model, cluster, sides[0].layout), *(_holds(side) for side in sides)],
        [
            "Tensor parallelism cuts the first matrix by column and the second by row: then one sum is all that has to "
            "be sent.",
        ],
        [
            f"A token is a vector of {model.hidden:,} numbers. To go through a layer it must meet all of its matrices, "
            "wherever they are.",
            *(_inside(side) for side in sides),
        ],
        [
            f"{model.layers} layers follow each other: none can begin before the one before it is done.",
            *(
                f"{side.letter}, {side.layout}: {format_time(side.one.middle.seconds)} for {step_words(request)}, "
                f"{format_share(communication(side.one))} of it communication."
                for side in sides
            ),
        ],
        [
            "Every further token takes all of that again: weights that moved for one token do not stay for the next.",
            *(
                f"{side.letter}, {side.layout}: {side.one.tokens_per_second(request.batch):,.3g} tokens a second, and "
                f"every device sends {format_bytes(float(side.one.round.volume.total))} for each step."
                for side in sides
            ),
        ],
        [
            "A gather takes as long for one token as for many. The more tokens a pass has, the more arithmetic is "
            "there for the same gather.",
            f"A training step has {sides[0].trained.seq:,} tokens a device at once, and a backward pass beside which "
            "the next layer is gathered.",
            *(_training(side) for side in sides),
        ],
        [
            "Training keeps 16 bytes for each weight: 2 of the weight, 2 of its gradient, and 12 of the optimizer. "
            "Under plain data parallelism every device has all of them.",
            "ZeRO shares them out over the devices, stage by stage.",
        ],
        [
            "Servers keep the weights where they are. Trainers share them out, where memory is what is short.",
        ],
        [
            "Change the model, the devices or a strategy: every number and drawing above follows.",
            "“How computed” beside each drawing has the formula with its numbers and the command that prints them.",
        ],
    )
    return [{"title": title, "sentences": text} for title, text in zip(TITLES, texts, strict=True)]


def _named(side: Side) -> str:
    degrees = [words.format(n=n) for key, words in CODES if (n := getattr(side.layout, key)) > 1]
    shared = ["each copy's weights shared out over all of them (zero=3)"] * (side.layout.stage == 3)
    meaning = ", ".join(degrees + shared) or "one device"
    words = f"{side.letter}: {strategy_name(side.layout)}, written {side.layout}: {meaning}."
    fit = serving_fit(side.one)
    return f"{words} It {fit}." if fit else words


def _weights(model: ModelConfig, cluster: Cluster, layout: Layout) -> str:
    nbytes, room = count(model) * DTYPE_BYTES[layout.dtype], capacity_of(cluster)
    needs = f"{model.name} has {format_count(count(model))} weights, {format_bytes(nbytes)} in {layout.precision}"
    if not room:
        return f"{needs}."
    fits = f"one device has {format_bytes(room)}"
    return f"{needs}; {fits}{', so that each can only keep a part' if nbytes > room else ' and could hold them all'}."


def _holds(side: Side) -> str:
    layout, start = side.layout, f"{side.letter}, {side.layout}"
    layer, fit = format_bytes(side.steps[0].memory), serving_fit(side.one)
    if fit.startswith("does not"):
        return f"{start} {fit}. Nothing can be computed."
    if layout.stage == 3:
        part = f"each device has 1/{layout.shard_ranks} of the numbers in a row, {layer} of a layer"
        return f"{start}: {part}. It must gather the rest before it can compute."
    if layout.pp > 1:
        return f"{start}: each stage has whole layers, and only one stage at a time works on a token."
    if layout.tp > 1:
        return f"{start}: each device has a slice of every matrix, {layer} of a layer. It can compute at once."
    return f"{start}: every device has all of the model, {layer} of a layer."


def _inside(side: Side) -> str:
    """Computation and traffic of a layer; a message leaves a stage, not a layer."""
    computes = sum(step.seconds for step in side.steps if step.act in ("multiply", "one"))
    seconds = {act: next((step.seconds for step in side.steps if step.act == act), 0.0) for act in ("gather", "sum")}
    whole = sum(step.seconds for step in side.steps)
    words = f"{side.letter}, {side.layout}, computes {format_time(computes)} in a layer"
    if gather := seconds["gather"]:
        words += f", and stands still for {format_time(gather)} while its weights come"
    if one := seconds["sum"]:
        words += f", and spends {format_time(one)} on adding up partial results, twice"
    return f"{words}: {format_time(whole)} in all." if max(seconds.values()) else f"{words} and moves nothing."


def _training(side: Side) -> str:
    step = side.trained
    fit = training_fit(step)
    words = f"{side.letter}, {step.layout}"
    words += f" {fit}" if fit else ""
    words += f"{'; ' if fit else ': '}moving data is {format_share(step.share)} of the step, not "
    words += f"{format_share(communication(side.one))} as for a token."
    if not step.gather:
        return words
    hides = "hides behind" if step.gather <= step.arithmetic else "is longer than"
    return (
        f"{words} A layer's gather of {format_time(step.gather)} {hides} the {format_time(step.arithmetic)} that "
        "the layer before computes."
    )
