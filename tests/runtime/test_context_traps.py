"""Mistakes of context parallelism that others shipped, each a small layout in which it shows (`tests/mutation/`)."""

import pytest

from harness.checks import assert_ledger, assert_parity, train
from harness.reference import Case
from harness.space import MODELS
from shardwise.layout import Layout, Workload

LAYOUTS = [
    ("llama", "cp=2,precision=fp64", 13, True),
    ("mqa", "cp=3,cpkind=allgather,zero=1,precision=fp64", 17, True),
    ("gpt2-drop", "cp=2,attention=math,precision=fp64", 12, False),
    ("prime", "dp=2,cp=2,zero=2,precision=fp64", 12, False),
    ("qwen3", "cp=4,cpkind=ulysses,precision=fp64", 13, True),
    ("gpt2-drop", "cp=2,cpkind=ulysses,attention=math,precision=fp64", 13, False),
    ("gemma2", "cp=4,cpkind=allgather,attention=math,precision=fp64", 13, False),
    ("gemma2", "cp=2,precision=fp64", 17, True),
    ("qwen3", "cp=2,tp=2,sp,precision=fp64", 13, False),
    ("olmo2", "cp=2,pp=2,precision=fp64", 12, False),
]


@pytest.mark.parametrize(("model", "text", "seq", "documents"), LAYOUTS, ids=[row[1] for row in LAYOUTS])
def test_trap_25_sequences_cut_over_ranks(model: str, text: str, seq: int, documents: bool) -> None:
    layout = Layout.parse(text)
    workload = Workload(seq, 2 * layout.dp, isolate_documents=documents)
    case = Case(MODELS[model], workload, layout.precision, layout.attention)
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_ledger(case, layout, ranks)
