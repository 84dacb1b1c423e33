"""Mistakes of offloading that known layouts show: each trains as in memory, bit by bit, with exact bytes and rows."""

from dataclasses import replace

import pytest

from harness.cases import table
from harness.checks import assert_ledger, assert_memory, judge, train
from harness.experts import settled
from harness.reference import Case
from harness.space import cases, point
from shardwise.layout import Layout

DENSE = table(__file__, "DENSE")


def equal(case: Case, layout: Layout) -> None:
    plain = replace(layout, offload="none", offload_params="none", offload_activations="none")
    ranks, in_memory = train(case, layout), train(case, plain, memory=False)
    bits, expected = ([(r.losses, r.norms, r.pieces) for r in each] for each in (ranks, in_memory))
    assert bits == expected
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


@pytest.mark.parametrize("text", DENSE)
def test_trap_28_no_home_changes_a_bit(text: str) -> None:
    case = point(**{"model": "llama", "dp": 2, "accumulate": 2} | DENSE[text]).case
    case = replace(case, model=case.model.replace(layers=4), precision="fp32")
    micro = DENSE[text].get("micro", 1)
    equal(case, Layout.parse(f"dp=2,micro={micro},precision=fp32,{text}"))


def test_trap_28_routers_biases_move_in_the_state_of_their_step() -> None:
    chosen = next(p for p in cases("experts") if "deepseek" in p.id and p.layout.stage == 3 and p.layout.ranks <= 4)
    case = settled(chosen.case)
    assert judge(case).losses
    equal(case, replace(chosen.layout, offload="nvme"))
