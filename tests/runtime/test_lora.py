"""Low-rank adapters under generated layouts: parity with one device in float64, equal ledgers, equal bytes.

Layouts are the dense ones and pipelines of `test_layouts.py` that adapters can have, each with its own rank and
targets.
"""

from dataclasses import replace
from functools import cache
from zlib import crc32

import pytest

from harness.cases import from_table, table
from harness.checks import EXACT, PEAK_TOLERANCE, assert_rules, train
from harness.reference import Case, reference
from harness.space import MODELS, Point, cases
from harness.today import some_of
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload, check_runnable, unit_plan
from shardwise.model.catalog import get
from shardwise.model.lora import FP8, INT8, NF4, Lora
from shardwise.model.parameters import blueprint, parameters
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.dryrun import dry_run

TARGETS = ((), (), ("q", "v"), ("down",), ("k", "up"), ("out",), ("q", "k", "v", "up"))
PER_DAY = 4
MOST_RANKS = 6


def adapted(point: Point) -> Point | None:
    """The point with adapters; None for a layout that they cannot have yet."""
    number = crc32(point.id.encode())
    base = INT8 if number % 3 == 0 else ""
    lora = Lora(1 + number % 5, float(1 + number % 7), TARGETS[number % len(TARGETS)], base)
    try:
        model = point.case.model.replace(lora=lora)
        check_runnable(point.layout, model, point.case.workload)
    except UserError:
        return None
    return replace(point, id=f"{point.id}:{lora}", case=replace(point.case, model=model))


@cache
def points() -> tuple[Point, ...]:
    every = (*cases("dense"), *cases("pipelines"))
    return tuple(filter(None, map(adapted, (point for point in every if point.layout.ranks <= MOST_RANKS))))


@pytest.mark.parametrize("point", some_of(points(), PER_DAY, "adapters"), ids=lambda p: p.id)
def test_layout(point: Point) -> None:
    def trained(case: Case) -> list:
        return train(case, point.layout)

    ranks = trained(point.case)
    lora = point.case.model.lora
    assert lora
    if point.case.precision == "fp64" or (point.layout.pp == 1 and not (lora.base and point.case.precision == "bf16")):
        # Pipelines have up to sixteen blocks: random weights magnify rounding so much that one device in bf16 gets
        # gradients wrong by their own norm. Bases in 8 bits have other scales in bf16 than in fp32.
        assert_rules(point.case, point.layout, ranks, again=trained)


OTHERS = table(__file__, "OTHERS")
"""Keys that the spaces above have not."""


@pytest.mark.parametrize("text", some_of(OTHERS, 2, "adapters elsewhere"))
def test_other_layouts(text: str) -> None:
    layout = Layout.parse(text)
    model = MODELS["llama"].replace(lora=Lora(3, targets=("q", "down")))
    case = Case(model, Workload(12, 4 * layout.dp), "fp64")
    ranks = train(case, layout)
    assert_rules(case, layout, ranks)


WIDE = MODELS["llama"].replace(name="wide", hidden=128, heads=4, kv_heads=2, head_dim=64, ffn=256)
"""Its ranks' pieces begin inside blocks of 128 rows, and inside 256 scales of NF4."""
BASE_LAYOUTS = table(__file__, "BASE_LAYOUTS")


@pytest.mark.parametrize("text", some_of(BASE_LAYOUTS, 2, "layouts of bases"))
@pytest.mark.parametrize("base", [NF4, FP8])
def test_trap_35_bases_in_4_bits_and_fp8_under_layouts(base: str, text: str) -> None:
    layout = Layout.parse(text)
    model = WIDE.replace(lora=Lora(3, targets=("q", "down", "up"), base=base), layers=max(2, layout.pp))
    case = Case(model, Workload(12, 4 * layout.dp), layout.precision)
    assert_rules(case, layout, train(case, layout))


def test_bytes_of_a_base_are_those_of_its_numbers_and_scales() -> None:
    """By hand: q [256, 128] in NF4 is 128 + 4 bytes a row, and 4 x (1 + 2) bytes of mean and second scales."""
    plan = unit_plan(WIDE.replace(lora=Lora(3, base=NF4)), Layout(tp=2), Workload(12, 2))
    (unit,) = (unit for unit in plan.units if unit.name == "blocks.0.narrow")
    sizes = {placed.name.removeprefix("blocks.0."): placed.numel for placed in unit.placed}
    assert sizes["attention.qkv.q.weight"] == 128 * (64 + 2) and sizes["mlp.down.weight"] == 128 * (64 + 2)
    assert sizes["attention.qkv.q.weight_scale"] == 4 * (1 + 2) == sizes["mlp.down.weight_scale"]
    assert unit.dtype == "int8" and unit.numel == sum(sizes.values())


@pytest.mark.parametrize(("base", "text"), [(NF4, "recompute=full"), (FP8, "dp=2,tp=2,zero=3,recompute=full")])
def test_a_base_of_8b_shape_has_its_bytes(base: str, text: str) -> None:
    """Two layers of Llama 3 8B at full width, on fake tensors: what the runtime allocates is what is predicted."""
    model = get("llama-3-8b").replace(layers=2, lora=Lora(16, base=base))
    layout, workload = Layout.parse(text), Workload(seq=512, batch=2)
    (role,) = dry_run(model, layout, workload).roles
    predicted = predict_bytes(unit_plan(model, layout, workload))
    for name in EXACT:
        assert getattr(role.bytes, name) == getattr(predicted, name), name
    assert role.bytes.total == pytest.approx(predicted.total, rel=PEAK_TOLERANCE)


def test_the_space_is_covered() -> None:
    assert len(points()) >= 130
    for key in ("dp", "tp", "pp"):
        assert {getattr(p.layout, key) for p in points()} >= {1, 2}, key
    assert {p.layout.zero for p in points()} == {0, 1, 2, 3}
    assert {p.layout.recompute for p in points()} == {"none", "selective", "full", "input"}


def test_the_reference_leaves_frozen_weights() -> None:
    """What parity compares with: frozen weights as they were, adapters moved."""
    model = MODELS["llama"].replace(lora=Lora(3))
    case = Case(model, Workload(12, 2))
    before, after = reference(replace(case, steps=0)).final, reference(case).final
    for p in parameters(model):
        assert (before[p.name] == after[p.name]).all() == p.frozen, p.name


def test_frozen_units_have_no_state() -> None:
    """The plan of an 8-fold split: what is frozen is whole below stage 3, and never reduced."""
    model = MODELS["llama"].replace(lora=Lora(3, targets=("q",)))
    for zero in (0, 1, 2, 3):
        plan = unit_plan(model, Layout(dp=4, zero=zero), Workload(12, 8))
        for unit in plan.units:
            assert unit.frozen == unit.name.endswith(".frozen")
            assert bool(unit.reduce) != unit.frozen
            assert unit.shard_ranks == (4 if zero and (zero == 3 or not unit.frozen) else 1), (zero, unit.name)
        assert {unit.name for unit in plan.units if not unit.frozen} == {"blocks.0", "blocks.1"}


@from_table
def test_what_adapters_cannot_have_yet(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check_runnable(Layout.parse(text), MODELS["llama"].replace(lora=Lora(3)), Workload(12, 8))


def test_blocks_of_a_base_are_whole_on_a_rank() -> None:
    def check(text: str, base: str, **changes: int) -> None:
        check_runnable(Layout.parse(text), WIDE.replace(lora=Lora(3, base=base), **changes), Workload(12, 8))

    check("tp=4", FP8, ffn=360)
    with pytest.raises(LayoutError, match=r"has 160 inputs, which tp=2 does not cut into blocks of 64: choose a smal"):
        check("tp=2", NF4, ffn=160)
    with pytest.raises(
        LayoutError, match=r"mlp.down.weight has 360 inputs, which blocks of 64 do not divide: choose base=fp8"
    ):
        check("dp=2", NF4, ffn=360)


def test_models_without_adapters_are_named() -> None:
    with pytest.raises(UserError, match="latent attention"):
        MODELS["latent"].replace(lora=Lora(3))
    with pytest.raises(UserError, match="no linear map 'gate'"):
        blueprint(MODELS["gpt2"].replace(lora=Lora(3, targets=("gate",))))
