"""All-to-alls and messages along any axes, in real processes, over gloo and through shared memory."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.comms_jobs import Exchanges
from harness.pool import run_ranks
from harness.today import seed
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP, DP, EDP, EP, SHARD, TP

transports = pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])


@transports
@pytest.mark.parametrize(
    ("layout", "axes"),
    [("dp=2,tp=2,ep=4", (EP, TP, DP)), ("cp=3,ep=3", (CP, EP)), ("dp=4,zero=1,shard=2,ep=2", (SHARD, EDP, DP))],
)
def test_exchanges_along_axes(layout, axes, shared):
    rounds = 6
    mesh = Mesh(Layout.parse(layout))
    job = Exchanges(layout, axes, shared, seed(), rounds)
    for ledger, given in run_ranks("harness.comms_jobs:exchange", mesh.layout.ranks, job):
        assert sum(row.elements * row.count for row in ledger if row.unit == "exchange") == given
        for name in map(mesh.name, axes):
            counts = Counter({(row.op, row.unit): 0 for row in ledger})
            for row in ledger:
                counts[row.op, row.unit] += row.count * (row.axes == name)
            assert counts == {
                ("all_to_all", "exchange"): rounds,
                ("all_to_all", "between"): rounds,
                ("send", "ring"): 2 * rounds,
                ("recv", "ring"): 2 * rounds,
            }


@transports
def test_rows_that_do_not_fit(shared):
    job = Exchanges("dp=2", (DP, TP), shared, 0, 0)
    for said in run_ranks("harness.comms_jobs:objections", 2, job):
        assert said == [
            "8 rows are not [8] rows for 2 ranks",
            "8 rows are not [9, -1] rows for 2 ranks",
            "7 rows are not [3, 3] rows for 2 ranks",
            "torch.float32 [4, 4] of [8] are not torch.float64 [8]",
        ]
