"""Second copies of gathered parameters (hpz): they change no bit, and every step makes them anew."""

from dataclasses import replace

import pytest

from harness.checks import judge
from harness.jobs import RankOutcome, Training
from harness.pool import run_ranks
from harness.reference import Case
from harness.space import MODELS, point
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import HPZ, SHARD
from shardwise.model.catalog import get

CASE = point(model="qwen3", dp=4, zero=3, accumulate=3).case
PLAIN = Layout(dp=4, zero=3)


def train(layout: Layout) -> list[RankOutcome]:
    case = replace(CASE, precision=layout.precision)
    asked = Training(case, layout, judge(case), memory=False)
    return run_ranks("harness.jobs:train", layout.ranks, asked)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trap_26_a_second_copy_changes_no_bit(precision: str) -> None:
    plain = replace(PLAIN, precision=precision)
    for one, other in zip(train(plain), train(replace(plain, hpz=2)), strict=True):
        assert (one.losses, one.norms, one.pieces) == (other.losses, other.norms, other.pieces)


@pytest.mark.parametrize("pp", [1, 2])
def test_trap_26_an_evaluation_has_the_weights_of_today(pp: int) -> None:
    """After every step, on packed weights as on second copies; a pipeline gathers for it as it does for a step."""
    model = MODELS["llama"].replace(layers=2)
    case = Case(model, Workload(12, 8), "fp32")
    plain = Layout(dp=4, pp=pp, zero=3, precision="fp32")
    ways = [plain, replace(plain, hpz=2), replace(plain, qwz=True), replace(plain, hpz=2, qwz=True)]
    found = [
        run_ranks("harness.quantized_jobs:evaluated", layout.ranks, Training(case, layout, judge(case)))[-1]
        for layout in ways
    ]
    assert found[1] == found[0] and found[3] == found[2] == pytest.approx(found[0], rel=0.02)
    assert len(set(found[0])) == case.steps


NEAR = {"embedding": 3, "blocks.0": 4, "blocks.1": 7, "blocks.2": 7, "blocks.3": 3, "head": 3}
"""Gathers of a step from copies: forward and backward of four micro-batches but the first, less what is still there."""


@pytest.mark.parametrize(("pp", "near"), [(1, NEAR), (2, {})])  # a pipeline gathers each of its stages once
def test_only_the_first_gather_of_a_step_is_over_all_shards(pp: int, near: dict[str, int]) -> None:
    plan = unit_plan(get("tiny-llama"), Layout(dp=8, pp=pp, zero=3, hpz=4), Workload(64, 32))
    assert plan.micro_batches == 4
    counts = plan.gather_counts()
    for unit in plan.units:
        over = {axes: sum(n for (_, g), n in counts.items() if g[:2] == (unit.name, axes)) for axes in (SHARD, HPZ)}
        assert over == {SHARD: 1, HPZ: near.get(unit.name, 0)}, unit.name


def test_every_copy_is_a_part_of_the_unit() -> None:
    plan = unit_plan(get("tiny-llama"), Layout(dp=8, zero=3, hpz=4), Workload(64, 32))
    assert plan.mesh.group(HPZ, 6) == (4, 5, 6, 7)
    assert all(unit.copy_numel * 4 == unit.padded for unit in plan.units)
