"""Saved tensors of the recordings against the hand-written formulas, and recordings made again against those stored."""

import importlib.util
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.pairs import featured, pair
from harness.space import SPACES, cases
from harness.today import EVERYTHING, seed
from shardwise.decoder import modules
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.predict.memory import recorded
from shardwise.predict.memory.activations import Sizes, made_items, saved_mask
from shardwise.predict.memory.recorded import keys_of, recordings, sizes_of

RECORDER = Path(__file__).resolve().parents[2] / "benchmarks" / "record_memory.py"
SAMPLE = 2000 if EVERYTHING else 60
AGAIN = 40 if EVERYTHING else 3
NOT_RECORDED = "compiled"
"""Word of forms without recordings."""


def plans(count: int) -> Iterator[UnitPlan]:
    """Random plans: of wide models, half with features, and of the spaces of layouts."""
    points = [point for name in SPACES for point in cases(name)]
    first = 0 if EVERYTHING else seed() * count
    generator = random.Random(seed())
    for index in range(count):
        if index % 4 == 3:
            point = generator.choice(points)
            yield unit_plan(point.case.model, point.layout, point.case.workload)
        else:
            yield (featured if index % 2 else pair)(7, first + index)[0]


@cache
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_memory", RECORDER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_bytes_equal_the_formulas() -> None:
    """Of every part of every plan but those under compile=block."""
    compared = 0
    for plan in plans(SAMPLE):
        s, words = Sizes.of(plan), f"{plan.model.name} {plan.layout} {plan.workload}"
        for part in plan.parts:
            saved, keys = recordings().saved(plan, part), keys_of(plan, part)
            if saved is None:
                missing = next(key for key in keys if recordings().find(key) is None)
                assert NOT_RECORDED in missing[0], f"{words}: {missing}"
                continue
            compared += 1
            assert sum(saved) == sum(made_items(plan, s, part).values()), f"{words}: {keys}"
        blocks = plan.of_kind("block")
        shared = recordings().shared(plan, blocks[0]) if blocks else None
        if shared is not None and not plan.layout.offloads_activations:
            assert shared == saved_mask(plan, s), words
    assert compared > SAMPLE


def test_sizes_may_be_columns() -> None:
    """One evaluation for many layouts."""
    several = [unit_plan(get("llama-3.2-1b"), Layout.parse("tp=2,sp"), Workload(seq, 4)) for seq in (640, 4096, 8192)]
    (number,) = {recordings().find(keys_of(plan, "blocks.0")[0]) for plan in several}
    rows = [sizes_of(plan, "blocks.0") for plan in several]
    columns = {symbol: np.array([row[symbol] for row in rows]) for symbol in rows[0]}
    sums = sum(recordings().at(columns, number))
    assert sums.tolist() == [sum(recordings().saved(plan, "blocks.0")) for plan in several]


def test_plans_recorded_again_give_the_stored_formulas() -> None:
    """A plan of a few models a day."""
    record, generator = recorder(), random.Random(seed())
    modules._scalar.cache_clear()
    fake, stored = FakeTensorMode(), recordings()
    try:
        models = list(record.models())
        for model in generator.sample(models, min(AGAIN, len(models))):
            for plan in generator.sample(list(record.plans(model, set())), 1):
                for key, formulas in record.recorded_lists(plan, fake):
                    assert stored.data["lists"][stored.find(key)] == list(formulas), f"{plan.layout}: {key}"
    finally:
        modules._scalar.cache_clear()


def test_devices_without_recordings_have_none() -> None:
    plan = unit_plan(get("llama-3.2-1b"), Layout(), Workload(64, 1), backend="nccl")
    assert recordings().saved(plan, "blocks.0") is None is recordings().shared(plan, "blocks.0")


def test_the_stored_recordings_name_symbols_that_every_plan_has() -> None:
    data = json.loads(Path(recorded.__file__).with_name("recordings.json").read_text(encoding="utf-8"))
    symbols = {word for formulas in data["lists"] for formula in formulas for word in formula.split("*")}
    latent = unit_plan(get("deepseek-v2-lite"), Layout.parse("cp=2,cpkind=ulysses"), Workload(64, 1))
    sizes = sizes_of(latent, "blocks.1") | sizes_of(unit_plan(get("gpt2"), Layout(), Workload(64, 1)), "blocks.0")
    assert {word for word in symbols if not word.isdecimal()} <= set(sizes)


@pytest.mark.parametrize("nbytes", [2 * 97, 2 * 7 * 97])
def test_bytes_of_no_known_size_are_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="no product"):
        recorder().factored(nbytes, "bfloat16", {"e": 2, "a": 4, "B": 7})
