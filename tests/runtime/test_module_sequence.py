"""Sequence parallelism of a user's module: training is that of one device, with the collectives of cut sequences."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.cases import table
from harness.module_jobs import ROWS, OwnTraining, trained, verdict
from harness.own_modules import OWN, PLANS, SEQ, WIDTH, exact, token_example
from harness.today import some_of
from shardwise import Layout
from shardwise.errors import LayoutError
from shardwise.layout.modules import check_module_layout
from shardwise.runtime.module.describe import describe, find_blocks

CASES = table(__file__, "CASES")


@pytest.mark.parametrize(("name", "layout"), some_of(CASES, 2, "cut sequences"))
def test_trap_36_sequences_train_as_on_one_device(name: str, layout: str) -> None:
    trained(OwnTraining(name, layout))


@pytest.mark.parametrize("name", ["nested", "tied"])
def test_trap_36_sequences_have_the_ledger_of_their_cuts(name: str) -> None:
    """Maps of the block itself gather at the map, and once more for the gradients of its weights; those of a module
    inside gather where that begins. Beside these: the entry of the stream, its exit, and the sums for norms."""
    blocks, stream = [f"blocks.{i}" for i in range(len(OWN[name]().blocks))], ROWS * SEQ * WIDTH
    expected: Counter[tuple[str, str, str, int]] = Counter()
    for block in blocks:
        expected["forward", "all_gather_into", block, stream] += 1
        expected["forward", "reduce_scatter", block, stream] += 1
        expected["backward", "all_gather_into", block, stream] += 1 + (name == "tied")
        expected["backward", "reduce_scatter", block, stream] += 1
        expected["backward", "all_reduce", block, 3 * WIDTH] += 1  # weight and bias of the norm, bias of the row map
    expected["backward", "all_gather_into", blocks[0], stream] += 1
    expected["forward", "all_gather_into", blocks[-1], stream] += 1
    for outcome in trained(OwnTraining(name, "tp=2,sp")):
        rows = {(r.phase, r.op, r.unit, r.elements): r.count for r in outcome.ledger if r.axes == "tp"}
        assert {row: count for row, count in rows.items() if row[2] in blocks} == expected
        assert outcome.report.layout == "tp=2,sp,precision=fp64"


FAMILIES = ("llama", "qwen3", "gemma3", "phi3")
LAYOUTS = ["tp=2,sp", "dp=2,tp=2,zero=3,sp,recompute=full", "dp=2,tp=2,zero=1,sp"]


@pytest.mark.parametrize(
    ("family", "layout"), some_of([(f, at) for f in FAMILIES for at in LAYOUTS], 3, "families with cut sequences")
)
def test_transformers_classes_are_split_right(family: str, layout: str) -> None:
    """By their published plans, for tensor parallelism alone."""
    result = verdict(partial(exact, family), layout, partial(token_example, 4, 8), tolerance=1e-12)
    assert result and result.parameters >= 15, str(result)


class WithScale(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ScaledBlock() for _ in range(2))
        if shared:
            self.norm = self.blocks[1].norm


class _ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(self.norm(x)))


MAPS = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.mark.parametrize(
    ("build", "layout", "plan", "message"),
    [
        (OWN["plain"], "tp=2,pp=2,sp", MAPS, r"sp does not go with pp=2"),
        (OWN["routed"], "tp=2,ep=2,sp", PLANS["routed"], r"sp does not go with ep=2"),
        (OWN["states"], "tp=2,sp", PLANS["states"], r"decay is in no norm and no cut map: give blocks\.0 the"),
        (OWN["plain"], "tp=2,sp", {"head": "colwise_gather_output"}, r"the plan has none"),
        (WithScale, "tp=2,sp", MAPS, r"blocks\.0\.scale is in no norm and no cut map"),
        (
            partial(WithScale, True),
            "tp=2,sp",
            MAPS | {"blocks.*": "sequence_parallel"},
            r"are one parameter, and not all",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_line(build, layout: str, plan: dict[str, str], message: str) -> None:
    module = build()
    with pytest.raises(LayoutError, match=message) as caught:
        check_module_layout(Layout.parse(layout))
        describe(module, Layout.parse(layout), plan, find_blocks(module, None))
    assert "\n" not in str(caught.value)


def test_a_style_says_what_sees_shards() -> None:
    module = WithScale()
    plan = MAPS | {"blocks.*": "sequence_parallel"}
    described = describe(module, Layout.parse("tp=2,sp"), plan, find_blocks(module, None))
    partials = {p.name for p in described.blueprint.on_shards.parameters() if p.partial}
    assert partials == {
        f"blocks.{i}.{leaf}" for i in range(2) for leaf in ("scale", "norm.weight", "norm.bias", "down.bias")
    }
    whole = describe(module, Layout.parse("tp=2"), plan, find_blocks(module, None))
    assert not any(p.partial for p in whole.blueprint.on_shards.parameters())
