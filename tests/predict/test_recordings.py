"""Recordings of the tensors that parts save, made again, at other sizes, and for all mechanisms of models."""

import importlib.util
import itertools
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.pairs import featured, pair
from harness.space import SPACES, cases
from harness.today import EVERYTHING, seed
from shardwise.decoder import modules
from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.model.catalog import catalog, get
from shardwise.model.lora import Lora
from shardwise.predict.memory.activations import made_items
from shardwise.predict.memory.recorded import recordings, traits_of
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.dryrun import _observe

RECORDER = Path(__file__).resolve().parents[2] / "benchmarks" / "record_memory.py"
SAMPLE = 400 if EVERYTHING else 8
AGAIN = 40 if EVERYTHING else 3


@cache
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_memory", RECORDER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    modules._scalar.cache_clear()
    yield FakeTensorMode()
    modules._scalar.cache_clear()


def plans(count: int) -> Iterator[UnitPlan]:
    """Random plans without pipelines and offloads: of wide models, half with features, and of the spaces of layouts."""
    points = [point for name in SPACES for point in cases(name)]
    generator = random.Random(seed())
    for index in itertools.count(0 if EVERYTHING else seed() * count):
        if index % 4 == 3:
            point = generator.choice(points)
            plan = unit_plan(point.case.model, point.layout, point.case.workload)
        else:
            plan = (featured if index % 2 else pair)(7, index)[0]
        if plan.layout.pp == 1 and plan.layout.compile != "block" and not plan.layout.offloads_activations:
            yield plan
            count -= 1
        if not count:
            return


def test_predicted_tensors_are_those_that_the_runtime_saves(fake: FakeTensorMode) -> None:
    """Of every part, at any sizes: bytes, and names as the recorder gives them."""
    for plan in plans(SAMPLE):
        s, blocks = Sizes.of(plan), plan.of_kind("block")
        for part, storages in recorder().saved_storages(plan, fake).items():
            predicted = sum(made_items(plan, s, part).values())
            if len(blocks) == 1 and part in blocks:  # whose masks nobody shares
                continue
            assert predicted == sum(saved.nbytes for saved in storages), f"{plan.model.name} {plan.layout} {part}"


def test_plans_recorded_again_give_the_stored_formulas(fake: FakeTensorMode) -> None:
    """A plan of a few models a day."""
    record, generator = recorder(), random.Random(seed())
    models = list(record.models())
    for model in generator.sample(models, min(AGAIN, len(models))):
        for plan in generator.sample(list(record.plans(model, set())), 1):
            rows, found = record.recorded_rows(plan, fake), dict[tuple[str, str], int]()
            for (part, name), formulas in rows.items():
                found[part, name] = sum(map(record.Namer(plan, part).value, formulas))
            stored = {
                (part, name): n for part in plan.parts for name, n in made_items(plan, Sizes.of(plan), part).items()
            }
            assert found == {key: nbytes for key, nbytes in stored.items() if nbytes}, f"{model.name} {plan.layout}"


MECHANISMS: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "window": (0, 4),
    "qk_norm": (False, True),
    "qk_norm_scope": ("head", "all heads"),
    "norm": ("rmsnorm", "layernorm"),
    "norm_placement": ("pre", "post", "both"),
    "parallel_residual": (False, True),
    "gated": (False, True),
    "positions": ("rope", "learned", "alibi"),
    "score_softcap": (None, 50.0),
    "embedding_norm": (False, True),
    "lora": (None, Lora(4), Lora(4, targets=("q", "up")), Lora(4, targets=("out",))),
}
LAYOUTS = ("micro=2", "attention=math", "recompute=selective", "recompute=input", "compile=block", "tp=2,sp", "cp=2",
           "cp=2,cpkind=ulysses", "cp=2,cpkind=ulysses,attention=math", "dp=2,ep=2", "tp=2,etp=1")  # fmt: skip


def test_every_mechanism_has_recordings() -> None:
    """Those of models that no decoder runs, too, beside others that no model of the catalog has."""
    generator, answered = random.Random(seed()), 0
    for _ in range(20_000 if EVERYTHING else 1_000):
        model = get(generator.choice(sorted(catalog())))
        changed = {name: generator.choice(values) for name, values in MECHANISMS.items() if generator.random() < 0.3}
        backend = generator.choice(("gloo", "nccl"))
        workload = Workload(generator.choice((64, 4096)), 4, isolate_documents=generator.random() < 0.3)
        try:
            model = model.replace(layers=2, **changed)
            plan = unit_plan(model, Layout.parse(generator.choice(LAYOUTS)), workload, backend=backend)
        except (UserError, ValueError):
            continue
        s = Sizes.of(plan)
        for part in plan.parts:
            kind = traits_of(plan, part, plan.blueprint.routes_in(part))["kind"]
            items = made_items(plan, s, part)
            assert items.keys() - {"norm"} <= recordings()[str(kind)].keys() and min(items.values(), default=0) >= 0
            answered += 1
    assert answered > 500


def test_cut_attention_that_is_recomputed_saves_no_output_for_a_frozen_map(fake: FakeTensorMode) -> None:
    model = get("tiny-llama").replace(lora=Lora(4, targets=("q", "up")))
    plan = unit_plan(model, Layout.parse("cp=2,recompute=selective"), Workload(64, 1))
    assert predict_bytes(plan).saved == _observe(plan, 0, fake).bytes.saved


@pytest.mark.parametrize("nbytes", [2 * 97, 2 * 7 * 97])
def test_bytes_of_no_known_size_are_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="no product"):
        recorder().factored(nbytes, "bfloat16", {"element": 2, "statistic": 4, "tokens": 7})
