"""`split` of modules with frozen parameters: training is that of one device, and frozen parameters stay."""

from __future__ import annotations

import math

import pytest

from harness.frozen_jobs import FrozenTraining, build, one_device, train_frozen
from harness.own_modules import SkipMLP
from harness.pool import run_ranks
from shardwise import Layout, UserError
from shardwise.checkpoint import find
from shardwise.runtime.module.describe import describe, find_blocks

assert train_frozen
FIRST = ("enter", "blocks.0", "blocks.1")
HEAD_ONLY = ("enter", "blocks", "scale")
MIXED = ("blocks.0.up.weight", "blocks.1.norm", "head.bias", "enter")
CASES = [
    ("skips", "dp=2,zero=3", FIRST),
    ("skips", "dp=2,zero=1", HEAD_ONLY),
    ("skips", "tp=2", MIXED),
    ("skips", "dp=2,zero=3,recompute=full", MIXED),
    ("skips", "dp=4,zero=3,hpz=2", HEAD_ONLY),
    ("states", "dp=2,tp=2,zero=2", ("table", "blocks.0")),
    ("shared", "dp=2,zero=2", ("blocks",)),
]


@pytest.mark.parametrize(("name", "layout", "frozen"), CASES)
def test_training_is_that_of_one_device(name: str, layout: str, frozen: tuple[str, ...]) -> None:
    job = FrozenTraining(name, layout, frozen)
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
        assert error <= 1e-9 * float(whole.norm()), key
    before = {key: p.double() for key, p in build(job).named_parameters()}
    for key, whole in final.items():
        assert (before[key] == whole).all() == key.startswith(frozen), key


def test_a_checkpoint_has_what_is_trained(tmp_path) -> None:
    job = FrozenTraining("skips", "dp=2,zero=3", FIRST, str(tmp_path))
    (first, second) = run_ranks("harness.frozen_jobs:train_frozen", 2, (job, one_device(job)[1]))
    trained = {name for name, p in build(job).named_parameters() if p.requires_grad}
    assert {name.partition("/")[2] for name in find(tmp_path).tensors} == trained
    elements = sum(p.numel() for p in build(job).parameters() if p.requires_grad)
    assert elements <= first.optimizer + second.optimizer <= elements + 8


def test_a_module_without_anything_to_train_is_an_error() -> None:
    module = SkipMLP().requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        describe(module, Layout(), None, find_blocks(module, None))
