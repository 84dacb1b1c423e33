"""Attention over a cut sequence equals one device's, forward and backward, for every kind and odd lengths."""

import pytest

from harness.context_jobs import AttentionJob, attend  # noqa: F401
from harness.pool import run_ranks

JOBS = [
    AttentionJob(cp=2, kind="ring", seq=64),
    AttentionJob(cp=3, kind="ring", seq=50, documents=True),
    AttentionJob(cp=4, kind="ring", seq=37, heads=6, kv_heads=1, shared=False),
    AttentionJob(cp=2, kind="ring", seq=33, explicit=True),
    AttentionJob(cp=4, kind="ring", seq=64, documents=True, explicit=True, heads=4, kv_heads=4),
    AttentionJob(cp=3, kind="allgather", seq=41),
    AttentionJob(cp=4, kind="allgather", seq=64, documents=True, shared=False),
    AttentionJob(cp=2, kind="ulysses", seq=35, documents=True),
    AttentionJob(cp=4, kind="ulysses", seq=64),
    AttentionJob(cp=4, kind="ulysses", seq=64, heads=8, kv_heads=1, shared=False),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_equals_one_device(job):
    for difference, _ in run_ranks("harness.context_jobs:attend", job.cp, job):
        assert difference < 1e-12
