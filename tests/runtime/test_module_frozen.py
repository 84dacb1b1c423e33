"""`split` of modules with frozen parameters: training is that of one device, and frozen parameters stay."""

import math

import pytest
import torch
from torch import Tensor

from harness.cases import table
from harness.frozen_jobs import FrozenTraining, build, one_device, train_frozen
from harness.own_modules import SkipMLP
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError
from shardwise.checkpoint import find
from shardwise.model.lora import Lora
from shardwise.runtime.module.adapters import add_adapters
from shardwise.runtime.module.describe import describe, find_blocks
from shardwise.runtime.module.initial import MetaValues

assert train_frozen
FIRST = ("enter", "blocks.0", "blocks.1")
HEAD_ONLY = ("enter", "blocks", "scale")
MIXED = ("blocks.0.up.weight", "blocks.1.norm", "head.bias", "enter")
CASES = table(__file__, "CASES")


@pytest.mark.parametrize(("name", "layout", "frozen"), some_of(CASES, 4, "frozen modules"))
def test_training_is_that_of_one_device(name: str, layout: str, frozen: tuple[str, ...]) -> None:
    job = FrozenTraining(name, layout, frozen)
    final = trained_as_on_one_device(job)
    before = {key: p.double() for key, p in build(job).named_parameters()}
    for key, whole in final.items():
        assert (before[key] == whole).all() == key.startswith(frozen), key


ADAPTED = table(__file__, "ADAPTED")
NARROW = table(__file__, "NARROW")


@pytest.mark.parametrize(("name", "layout", "lora"), some_of(ADAPTED, 3, "adapted modules"))
def test_trap_35_adapters_are_those_of_one_device(name: str, layout: str, lora: str) -> None:
    """Column and row maps, gathered and split ones, a map that two blocks share."""
    job = FrozenTraining(name, layout, lora=lora)
    final = trained_as_on_one_device(job)
    before = {key.replace(".weight", ""): p for key, p in build(job).named_parameters()}
    moved = [key for key, whole in final.items() if ".lora_" in key and whole.abs().max() > 0]
    assert moved and len(moved) == sum(".lora_" in key for key in final)
    for key, whole in final.items():
        if ".lora_" not in key:
            assert (before[key.replace(".weight", "")].double() == whole).all(), key


@pytest.mark.parametrize(("name", "layout", "lora"), some_of(NARROW, 2, "adapted modules in fewer bits"))
def test_trap_35_a_base_in_fewer_bits_is_that_of_one_device(name: str, layout: str, lora: str) -> None:
    """One device computes with the same rounded weights, in float64."""
    job = FrozenTraining(name, layout, lora=lora)
    final = trained_as_on_one_device(job)
    assert any(tensor.dtype == torch.int8 for tensor in final.values())


def test_adapters_of_a_module_on_the_meta_device() -> None:
    module = SkipMLP(device="meta")
    add_adapters(module, Lora(2))
    values = MetaValues(module).made("blocks.0.up")
    assert values.lora_a.std() > 0 and (values.lora_b == 0).all() and not values.weight.isnan().any()


def test_maps_that_are_not_there_are_named() -> None:
    with pytest.raises(UserError, match=r"nothing to adapt that is named 'q_proj'; maps: down, enter, head, up"):
        add_adapters(SkipMLP(), Lora(2, targets=("q_proj",)))


def trained_as_on_one_device(job: FrozenTraining) -> dict[str, Tensor]:
    """Train in processes, and compare with one device; its final parameters."""
    layout = job.layout
    expected, final = one_device(job)
    outcomes = run_ranks("harness.frozen_jobs:train_frozen", Layout.parse(layout).ranks, (job, final))
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-9)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-9)
        still = {row.unit for row in outcome.ledger if row.unit.endswith(".frozen")}
        sums = [r for r in outcome.ledger if r.unit in still and r.op != "all_gather_into"]
        assert not sums and bool(still) == ("zero=3" in layout)
    for key, whole in final.items():
        error = math.sqrt(sum(outcome.errors.get(key, 0.0) for outcome in outcomes))
        assert error <= 1e-9 * float(whole.double().norm()), key
    return final


def test_a_checkpoint_has_what_is_trained(tmp_path) -> None:
    job = FrozenTraining("skips", "dp=2,zero=3", FIRST, folder=str(tmp_path))
    (first, second) = run_ranks("harness.frozen_jobs:train_frozen", 2, (job, one_device(job)[1]))
    trained = {name for name, p in build(job).named_parameters() if p.requires_grad}
    assert {name.partition("/")[2] for name in find(tmp_path).tensors} == trained
    elements = sum(p.numel() for p in build(job).parameters() if p.requires_grad)
    assert elements <= first.optimizer + second.optimizer <= elements + 8


def test_a_module_without_anything_to_train_is_an_error() -> None:
    module = SkipMLP().requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        describe(module, Layout(), None, find_blocks(module, None))
