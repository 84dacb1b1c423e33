"""Mistakes of context parallelism that others shipped, each a small layout in which it shows (`tests/mutation/`)."""

import pytest

from harness.cases import table
from harness.checks import assert_ledger, assert_parity, train
from harness.reference import Case
from harness.space import MODELS
from shardwise.layout import Layout, Workload

LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("model", "text", "seq", "documents"), LAYOUTS, ids=[row[1] for row in LAYOUTS])
def test_trap_25_sequences_cut_over_ranks(model: str, text: str, seq: int, documents: bool) -> None:
    layout = Layout.parse(text)
    workload = Workload(seq, 2 * layout.dp, isolate_documents=documents)
    case = Case(MODELS[model], workload, layout.precision, layout.attention)
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_ledger(case, layout, ranks)
