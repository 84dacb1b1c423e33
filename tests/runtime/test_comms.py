"""All-to-alls and messages along any axes, in real processes, over gloo and through shared memory."""

from collections import Counter

import pytest
import torch

from harness.comms_jobs import Exchanges
from harness.pool import run_ranks
from harness.today import seed
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP, DP, EDP, EP, SHARD, TP
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import Realization

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


class Noted:
    """A transport that moves nothing and notes what is called."""

    def __init__(self, calls, lazy):
        self.calls, self.lazy = calls, lazy

    def how(self, op, full):
        return Realization("noted", self.lazy)

    def shortcut(self, op, nbytes):
        return False

    def wait(self):
        self.calls.append("wait")

    def is_completed(self):
        return True

    def __getattr__(self, name):
        def started(*args, **options):
            self.calls.append(name)
            return self

        return started


class NotedPulse:
    def __init__(self, calls):
        self.calls, self.words = calls, []

    def collective(self, words):
        self.words.append(words)

    def wait(self, words=None):
        self.calls.append(words)

    def work(self):
        self.calls.append("work")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("op", "method"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather_into", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("all_to_all", "all_to_all"),
        ("send", "send"),
        ("recv", "receive"),
    ],
)
def test_ledger_timing_and_heartbeat_wrap_every_operation(op, method, lazy, later, monkeypatch):
    monkeypatch.setattr(Comms, "_group", lambda self, ranks: None)
    calls, x = [], torch.zeros(4)
    pulse = NotedPulse(calls)
    comms = Comms(
        Mesh(Layout.parse("dp=2")), 0, (DP,), timeout=1.0, pulse=pulse, backend="gloo",
        connect=lambda group, ranks: Noted(calls, lazy),
    )  # fmt: skip
    arguments = {
        "all_gather": (x, x[:2], DP, "unit"),
        "reduce_scatter": (x, DP, "unit", lambda: Target(x[:2])),
        "all_to_all": (x, x.clone(), DP, "unit"),
        "send": (x, DP, 1, "unit"),
        "receive": (x, DP, 1, "unit"),
    }.get(method, (x, DP, "unit"))
    comms.start_recording()
    pending = getattr(comms, method)(*arguments, **({} if op in ("send", "recv") else {"later": later}))
    words = f"{op} over dp for unit in forward"
    assert pulse.words == [words]
    if op in ("send", "recv") or later:
        assert calls == [method], "it has not been waited for"
        pending.wait()
    pending.wait()
    assert calls == [method, words, "wait", "work"]
    assert [(row.op, row.unit, row.elements, row.count) for row in comms.ledger()] == [(op, "unit", 4, 1)]
    (row,) = comms.transport()
    assert row.algorithm == "noted" and row.time_s >= row.wait_s > 0


@transports
def test_reduce_scatters_that_nothing_is_reserved_for(shared):
    job = Exchanges("dp=2", (DP,), shared, 0, 0)
    assert run_ranks("harness.comms_jobs:unreserved", 2, job) == [[3.0] * 4] * 2
