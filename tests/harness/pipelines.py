"""The space of pipelines: schedules with every way to split a stage, drawn and covered as `space.py` does it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from harness.reference import BF16_STEPS, STEPS, Case
from harness.space import MODELS, SEQ, WORLDS, Point, covering, possible_copies, stratified
from harness.today import EVERY_LAYOUT, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check_runnable, unit_plan
from shardwise.layout.units import Backend

POOL = 2000
LEAST = 90
EIGHT_RANKS = 8
SAMPLE = 6

CHOICES: dict[str, list[Any]] = {
    "schedule": ["naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
    "model": list(MODELS),
    "pp": [2, 3, 4],
    "virtual": [1, 1, 2, 3],
    "stages": ["even", "uneven", "ends"],
    "dp": [1, 1, 2, 3, 4],
    "tp": [1, 1, 2, 3],
    "zero": [0, 1, 2, 3],
    "hpz": [0, 2],
    "sp": [False, True],
    "tpkind": ["megatron", "megatron", "gathered"],
    "recompute": ["none", "none", "selective", "full", "input"],
    "attention": ["sdpa", "math"],
    "micro": [1, 2],
    "micro_batches": [1, 2, 3, 4, 6, 8],
    "documents": [False, False, True],
    "precision": ["fp64"] * 6 + ["fp32", "bf16"],
    "order": ["pp-dp-cp-tp", "dp-tp-cp-pp"],
    "transport": ["shared", "shared", "gloo"],
}


FIELDS = (
    "schedule", "pp", "virtual", "dp", "tp", "zero", "hpz", "sp", "tpkind", "recompute", "attention", "micro", "order",
    "precision",
)  # fmt: skip


def stage_layers(kind: str, chunks: int, generator: random.Random) -> tuple[int, ...]:
    """Layers of each stage; empty where the layout says nothing about them."""
    if kind == "even":
        return ()
    layers = [generator.choice((1, 2)) for _ in range(chunks)]
    if kind == "ends":  # the embedding alone, or the head, or both
        layers[generator.choice((0, -1))] = 0
    return tuple(layers)


def _draw(generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal, or means the same as a simpler one."""
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    pp, dp, tp = chosen["pp"], chosen["dp"], chosen["tp"]
    if pp * dp * tp not in WORLDS or (chosen["zero"] and dp == 1):
        return None
    if chosen["precision"] == "bf16" and chosen["micro_batches"] > 4:
        return None  # rounds that often, where the one device that it is held against rounds once
    chunks = pp * chosen["virtual"]
    chosen["hpz"] = possible_copies(chosen | {"shard": 0}, dp)
    try:
        layout = Layout(
            **{key: chosen[key] for key in FIELDS},
            stages=stage_layers(chosen["stages"], chunks, generator),
        )
        model = MODELS[chosen["model"]]
        model = model.replace(layers=sum(layout.stages) or chunks + chunks % 3)
        workload = Workload(SEQ, dp * layout.micro * chosen["micro_batches"], isolate_documents=chosen["documents"])
        check_runnable(layout, model, workload)
    except UserError:
        return None
    words = [chosen["model"], str(layout), f"x{chosen['micro_batches']}", *["documents"] * chosen["documents"]]
    steps = BF16_STEPS if layout.precision == "bf16" else STEPS
    case = Case(model, workload, layout.precision, layout.attention, steps=steps)
    return Point(":".join(words), case, layout, tuple(chosen.items()))


@cache
def pipeline_cases() -> tuple[Point, ...]:
    """At least `LEAST` points that cover every pair of choices seen in a large draw."""
    return covering(_draw, POOL, LEAST, EIGHT_RANKS)


def long_cases(generator: random.Random, count: int) -> Iterator[tuple[UnitPlan, int]]:
    """(plan, place) of as many pipelines with up to a hundred micro-batches, on a place drawn at random."""
    points = pipeline_cases()
    while count:
        point = generator.choice(points)
        layout, workload, model = point.layout, point.case.workload, point.case.model
        batch = layout.dp * layout.micro * generator.randrange(20, 100)
        if layout.schedule == "interleaved":
            batch = batch // (layout.dp * layout.micro * layout.pp) * layout.dp * layout.micro * layout.pp
        place = generator.randrange(layout.pp)
        rank = Mesh.of(layout, model).rank(pp=place)
        backend: Backend = generator.choice(("shared", "gloo", "nccl"))
        yield unit_plan(model, layout, replace(workload, batch=batch), rank=rank, backend=backend), place
        count -= 1


def _features(point: Point) -> set[tuple[str, Any]]:
    names = (
        "schedule",
        "pp",
        "virtual",
        "stages",
        "zero",
        "sp",
        "tpkind",
        "recompute",
        "precision",
        "model",
        "transport",
    )
    return {(name, point[name]) for name in names} | {("tied", point.case.model.tied, point["zero"])}


def selected_pipelines() -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    if EVERY_LAYOUT:
        return pipeline_cases()
    return stratified(pipeline_cases(), _features, seed(), SAMPLE)
