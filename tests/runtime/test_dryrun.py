"""The dry run observes the very runtime at scales that no machine here has; the closed form must say the same."""

from __future__ import annotations

import pytest

from shardwise.errors import LayoutError
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.report import compare
from shardwise.runtime.dryrun import dry_run

CASES = [
    ("llama-3-70b", "dp=128,tp=8,zero=3,sp", 4096, 128),
    ("llama-3-8b", "dp=64,tp=2,zero=1,micro=2,recompute=full", 2048, 256),
    ("qwen3-0.6b", "dp=16,tp=16,zero=2,sp,grads=fp32", 1024, 32),
    ("tiny-gpt", "dp=1024,shard=8,zero=3,recompute=input,precision=fp32", 128, 1024),
    ("tiny-gpt", "dp=4,tp=4,attention=math,recompute=selective", 128, 8),
    ("llama-2-7b", "dp=512", 1024, 512),
]


@pytest.mark.parametrize(("model", "layout", "seq", "batch"), CASES, ids=[f"{c[0]}:{c[1]}" for c in CASES])
def test_observed_at_scale_equals_the_closed_form(model: str, layout: str, seq: int, batch: int) -> None:
    asked = get(model), Layout.parse(layout), Workload(seq=seq, batch=batch)
    observed = dry_run(*asked)
    comparison = compare(estimate(*asked), observed)
    assert observed.source == "dry-run" and len(observed.roles[0].ranks) == asked[1].ranks
    assert comparison.equal_ledger
    assert comparison.exact_classes_equal
    assert comparison.peak_error < 0.05


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(LayoutError, match="pp=2"):
        dry_run(get("tiny-llama"), Layout.parse("pp=2"), Workload(seq=64, batch=2))
