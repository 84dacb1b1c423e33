"""Pipelines of traced modules: what is predicted from a stage with all parts is what `split` measures on its stages."""

import json
from dataclasses import replace
from functools import cache, partial
from typing import ClassVar

import pytest
from torch import nn

from harness.cases import from_table
from harness.own_modules import OWN, own_batch, summed_loss
from harness.pool import run_ranks
from harness.today import some_of
from harness.traced_jobs import TracedCase
from shardwise import Blueprint, Layout, UserError, Workload, estimate, trace
from shardwise.errors import LayoutError
from shardwise.model.blueprint import Part
from shardwise.runtime.module.chain import find_chain
from shardwise.runtime.module.describe import describe, find_blocks

CASES = [
    TracedCase("plain", "pp=2,micro=4", 4),
    TracedCase("plain", "pp=2,micro=3,precision=fp32", 3),
    TracedCase("plain", "pp=2,schedule=zb-h1,dp=2,zero=2,micro=2", 4),
    TracedCase("plain", "pp=2,stages=0/4,micro=4", 2),
    TracedCase("plain", "pp=2,stages=4/0,micro=3,schedule=zb-h2", 4),
    TracedCase("tied", "pp=2,dp=2,zero=1,micro=3", 2),
    TracedCase("states", "pp=2,tp=2,micro=4,precision=fp32", 2),
    TracedCase("llama", "pp=2,micro=3", 4),
    TracedCase("llama", "pp=4,micro=2,precision=fp32", 4),
    TracedCase("llama", "pp=2,dp=2,zero=1,micro=2", 2),
    TracedCase("llama", "pp=2,dp=2,zero=2,micro=4,schedule=gpipe", 3),
    TracedCase("llama", "pp=2,dp=2,zero=3,micro=2", 3),
    TracedCase("llama", "pp=2,dp=2,zero=3,micro=3,recompute=full", 4),
    TracedCase("llama", "pp=2,virtual=2,schedule=interleaved,micro=2", 4),
    TracedCase("llama", "pp=2,virtual=2,schedule=breadth-first,dp=2,zero=3,micro=2", 4),
    TracedCase("llama", "pp=2,schedule=zb-h1,micro=2", 4),
    TracedCase("llama", "pp=2,schedule=zb-h1,micro=2,recompute=full", 4),
    TracedCase("llama", "pp=2,tp=2,micro=3", 2),
    TracedCase("gpt2", "pp=2,dp=2,zero=1,micro=2", 2),
    TracedCase("gpt2", "pp=2,tp=2,micro=2", 2),
    TracedCase("qwen3", "pp=2,recompute=full,micro=4", 4),
    TracedCase("gemma3", "pp=2,dp=2,zero=2,micro=2", 4),
    TracedCase("phi3", "pp=2,stages=1/3,micro=2", 2),
]


@cache
def traced(name: str, tp: int, precision: str) -> Blueprint:
    case = TracedCase(name, "pp=2")
    return trace(
        case.build, case.batch(2), case.plan, loss=case.loss(), parts=case.parts, tp=[tp], precisions=[precision]
    )


@pytest.mark.parametrize("case", some_of(CASES, 1, "pipelines of traced modules"), ids=str)
def test_a_measured_step_of_stages_is_that_of_the_trace(case):
    layout = Layout.parse(case.layout)
    model = traced(case.name, layout.tp, layout.precision)
    workload = Workload(seq=model.trace.seq, batch=layout.dp * layout.micro * case.accumulate)
    predicted = estimate(model, layout, workload)
    assert len(predicted.roles) == layout.pp
    for result in run_ranks("harness.traced_jobs:measured", layout.ranks, (case, predicted)):
        assert result.equal_ledger, [row for row in result.rows if not row.equal]
        assert result.exact_classes_equal, [row for row in result.bytes if not row.equal]
        assert result.peak_error < 0.05, [row for row in result.bytes if not row.equal]
        assert not result.differences


def without_shards(part: Part) -> Part:
    """A part as it is without sequence parallelism, which pipelines do not have."""
    return replace(part, parameters=tuple(replace(p, sees_shards=False) for p in part.parameters))


@pytest.mark.parametrize(("name", "tp"), some_of([("plain", 1), ("tied", 2), ("gpt2", 2)], 1, "parts of stages"))
def test_stages_have_the_parts_of_split(name, tp):
    """Both find entry, blocks and exit, and the table that the ends share."""
    case, model = TracedCase(name, "pp=2"), traced(name, tp, "bf16")
    module = case.build()
    blocks = find_blocks(module, None)
    chain = find_chain(module, case.parts, blocks)
    described = describe(module, Layout(tp=tp), case.plan, blocks, chain).blueprint
    assert [without_shards(part) for part in model.piped.parts] == list(described.parts)
    assert Blueprint.from_json(json.loads(json.dumps(model.to_json()))) == model


class Frozen(nn.Module):
    """Blocks; the first one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OWN["plain"]()
        self.inner.enter.requires_grad_(False)

    def forward(self, x):
        return self.inner(x)


class HeadLeftOut(OWN["plain"]):
    """Publishes an order in which a part with parameters is missing."""

    _pp_plan: ClassVar = {"enter": (["inputs"], ["x"]), "blocks": (["x"], ["x"])}


class Pairs(OWN["plain"]):
    """Publishes an order of blocks that return more than the tensor that travels."""

    _pp_plan: ClassVar = {**HeadLeftOut._pp_plan, "head": (["x"], ["y"])}

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(_paired, block.forward)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def _paired(forward, x):
    return forward(x), None


def plain(build=OWN["plain"], parts=None, **options) -> Blueprint:
    return trace(build, own_batch("plain", 4, 0), loss=summed_loss, parts=parts, tp=[1], **options)


@pytest.mark.parametrize(
    ("build", "parts", "message"),
    [
        (OWN["plain"], None, r"PlainMLP publishes no order of its parts: trace it with parts= \(--parts\)"),
        (HeadLeftOut, None, "parts: head.weight is in none of them"),
        (Pairs, None, "blocks.0 returns a tuple; under a pipeline each block returns one tensor"),
        (Frozen, ["inner.enter", "inner.blocks.*", "inner.head"], "some of its parameters are frozen: leave pp out"),
    ],
)
def test_without_an_order_of_parts_there_are_no_pipelines(build, parts, message):
    model = plain(build, parts)
    estimate(model, "dp=2", Workload(seq=1, batch=8))
    with pytest.raises(LayoutError, match=message) as caught:
        estimate(model, "pp=2", Workload(seq=1, batch=8))
    assert "\n" not in str(caught.value)


@from_table
def test_what_a_pipeline_cannot_have_is_one_line(layout, message):
    model = traced("plain", 1, "bf16")
    with pytest.raises(LayoutError, match=message) as caught:
        estimate(model, layout, Workload(seq=1, batch=8))
    assert "\n" not in str(caught.value)


def test_files_of_an_earlier_release_say_how_to_get_pipelines():
    model = traced("plain", 1, "bf16")
    earlier = replace(model, trace=replace(model.trace, ends=None))
    with pytest.raises(LayoutError, match="PlainMLP has no predictions for pipelines: trace it again"):
        estimate(earlier, "pp=2", Workload(seq=1, batch=8))


def test_a_bad_list_of_parts_is_that_of_split():
    with pytest.raises(UserError, match=r"no module is named 'block.\*'"):
        plain(parts=["enter", "block.*", "head"])
