"""The space of context parallelism: its kinds with other ways to split, drawn and covered as `space.py` does it."""

import random
from functools import cache
from typing import Any

from harness.pipelines import stage_layers
from harness.reference import BF16_STEPS, STEPS, Case
from harness.space import MODELS, WORLDS, Point, covering, first_with, possible_copies, stratified
from harness.today import EVERY_LAYOUT, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.layout.context import SequenceCut
from shardwise.model import ModelConfig

POOL = 1200
LEAST = 64
EIGHT_RANKS = 12
LONGEST = 6
SAMPLE = 6

CHOICES: dict[str, list[Any]] = {
    "cpkind": ["ring", "ulysses", "allgather"],
    "cp": [2, 2, 3, 4, 8],
    "model": list(MODELS),
    "seq": [12, 13, 16, 17, 24],
    "dp": [1, 1, 2, 3],
    "tp": [1, 1, 2, 3],
    "pp": [1, 2, 2, 3],
    "virtual": [1, 1, 2],
    "schedule": ["naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
    "stages": ["even", "uneven", "ends"],
    "window": ["model's", "model's", "in a chunk", "in two", "long"],
    "zero": [0, 1, 2, 3],
    "shard": [0, 0, 2],
    "hpz": [0, 2],
    "sp": [False, True],
    "recompute": ["none", "none", "selective", "full", "input"],
    "attention": ["sdpa", "sdpa", "math"],
    "micro": [1, 2],
    "accumulate": [1, 2, 3, 4],
    "documents": [False, True],
    "precision": ["fp64"] * 6 + ["fp32", "bf16"],
    "order": ["pp-dp-cp-tp", "pp-tp-cp-dp", "cp-dp-tp-pp"],
    "transport": ["shared", "shared", "gloo"],
}
FIELDS = (
    "cpkind", "cp", "dp", "tp", "pp", "virtual", "schedule", "zero", "shard", "hpz", "sp", "recompute", "attention",
    "micro", "order", "precision",
)  # fmt: skip
UNPIPED = {"virtual": 1, "schedule": "1f1b", "stages": "even"}
"""Values of a layout without a pipeline."""


def _window(kind: str, chunk: int) -> dict[str, int]:
    """Changes of a model: windows shorter than a chunk of tokens, longer than one, and longer than two. None of one
    token: scores then have no gradient, and Adam makes updates of what bf16 rounds."""
    lengths = {"in a chunk": max(2, chunk - 1), "in two": chunk + 1, "long": 2 * chunk + 1}
    return {"window": lengths[kind]} if kind in lengths else {}


def _model(chosen: dict[str, Any], layout: Layout) -> ModelConfig:
    """The model of a draw, with layers for all stages and a window by the length of a chunk."""
    model, chunks = MODELS[chosen["model"]], layout.pp * layout.virtual
    chunk = SequenceCut.of(layout, chosen["seq"]).local // 2
    layers = sum(layout.stages) or (chunks + chunks % 3 if layout.pp > 1 else model.layers)
    return model.replace(layers=layers, **_window(chosen["window"], chunk))


def _draw(generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal, or means the same as a simpler one."""
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    if chosen["pp"] == 1:
        chosen |= UNPIPED
    chosen["hpz"] = possible_copies(chosen, chosen["dp"] * chosen["cp"])
    if chosen["pp"] * chosen["cp"] * chosen["dp"] * chosen["tp"] not in WORLDS:
        return None
    if chosen["precision"] == "bf16" and chosen["accumulate"] > 3:
        return None  # rounds that often, where the one device that it is compared with rounds once
    try:
        stages = stage_layers(chosen["stages"], chosen["pp"] * chosen["virtual"], generator)
        layout = Layout(**{key: chosen[key] for key in FIELDS}, stages=stages)
        model = _model(chosen, layout)
        batch = layout.dp * layout.micro * chosen["accumulate"]
        workload = Workload(chosen["seq"], batch, isolate_documents=chosen["documents"])
        check_runnable(layout, model, workload)
    except UserError:
        return None
    words = [chosen["model"], str(layout), f"{chosen['seq']}x{chosen['accumulate']}", chosen["transport"]]
    steps = BF16_STEPS if layout.precision == "bf16" else STEPS
    case = Case(model, workload, layout.precision, layout.attention, steps=steps)
    words += [f"window-{model.window}"] * bool(model.window) + ["documents"] * chosen["documents"]
    return Point(":".join(words), case, layout, tuple(chosen.items()))


@cache
def context_cases() -> tuple[Point, ...]:
    """At least `LEAST` points that cover every pair of choices seen in a large draw, and some with cp=8."""
    covered = covering(_draw, POOL, LEAST, EIGHT_RANKS)
    return tuple(dict.fromkeys((*covered, *first_with(_draw, LONGEST, cp=8))))


def _features(point: Point) -> set[tuple[str, Any]]:
    names = ("cpkind", "cp", "pp", "schedule", "window", "zero", "sp", "recompute", "attention", "documents",
             "precision", "model")  # fmt: skip
    return {(name, point[name]) for name in names}


def selected_contexts() -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    return context_cases() if EVERY_LAYOUT else stratified(context_cases(), _features, seed(), SAMPLE)
