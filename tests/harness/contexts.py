"""The space of context parallelism: its kinds with other ways to split, drawn and covered as `space.py` does it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from harness.reference import BF16_STEPS, STEPS, Case
from harness.space import MODELS, WORLDS, Point, covering, stratified
from harness.today import EVERYTHING, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable

POOL = 1200
LEAST = 64
EIGHT_RANKS = 8
SAMPLE = 12

CHOICES: dict[str, list[Any]] = {
    "cpkind": ["ring", "ulysses", "allgather"],
    "cp": [2, 2, 2, 3, 4, 8],
    "model": list(MODELS),
    "seq": [12, 13, 16, 17, 24],
    "dp": [1, 1, 2, 3],
    "tp": [1, 1, 2, 3],
    "pp": [1, 1, 1, 2],
    "schedule": ["1f1b", "gpipe", "zb-h1"],
    "zero": [0, 1, 2, 3],
    "shard": [0, 0, 2],
    "sp": [False, True],
    "recompute": ["none", "none", "selective", "full", "input"],
    "attention": ["sdpa", "sdpa", "math"],
    "micro": [1, 2],
    "accumulate": [1, 2, 3],
    "documents": [False, True],
    "precision": ["fp64"] * 6 + ["fp32", "bf16"],
    "order": ["pp-dp-cp-tp", "pp-tp-cp-dp"],
    "transport": ["shared", "shared", "gloo"],
}


def _draw(generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal, or means the same as a simpler one."""
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    if chosen["pp"] == 1 and chosen["schedule"] != "1f1b":
        return None
    keys = ("cpkind", "cp", "dp", "tp", "pp", "schedule", "zero", "shard", "sp", "recompute", "attention", "micro",
            "order", "precision")  # fmt: skip
    try:
        layout = Layout(**{key: chosen[key] for key in keys})
        model = MODELS[chosen["model"]]
        batch = layout.dp * layout.micro * chosen["accumulate"]
        workload = Workload(chosen["seq"], batch, isolate_documents=chosen["documents"])
        check_runnable(layout, model, workload)
    except UserError:
        return None
    if layout.ranks not in WORLDS:
        return None
    words = [chosen["model"], str(layout), f"{chosen['seq']}x{chosen['accumulate']}", chosen["transport"]]
    steps = BF16_STEPS if layout.precision == "bf16" else STEPS
    case = Case(model, workload, layout.precision, layout.attention, steps=steps)
    words += ["documents"] * chosen["documents"]
    return Point(":".join(words), case, layout, tuple(chosen.items()))


@cache
def context_cases() -> tuple[Point, ...]:
    """At least `LEAST` points that cover every pair of choices seen in a large draw."""
    return covering(_draw, POOL, LEAST, EIGHT_RANKS)


def _features(point: Point) -> set[tuple[str, Any]]:
    names = ("cpkind", "cp", "pp", "zero", "sp", "recompute", "attention", "documents", "precision", "model")
    return {(name, point[name]) for name in names}


def selected_contexts() -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    return context_cases() if EVERYTHING else stratified(context_cases(), _features, seed(), SAMPLE)
