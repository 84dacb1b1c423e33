"""Predictions of parameter servers without running them."""

import pytest

from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.model.parameters import parameters
from shardwise.predict import estimate
from shardwise.predict.memory.servers import server_bytes

MODEL = get("tiny-llama")


def test_a_server_grows_with_workers_and_the_bound() -> None:
    def held(text: str) -> int:
        layout = Layout.parse(text)
        return server_bytes(unit_plan(MODEL, layout, Workload(64, 2 * layout.dp)), 0).comm

    assert held("dp=2,sync=ps") < held("dp=4,sync=ps")
    assert held("dp=4,sync=ssp,staleness=0") == held("dp=4,sync=ps") < held("dp=4,sync=ssp,staleness=3")
    assert held("dp=4,sync=ps,servers=2") == pytest.approx(held("dp=4,sync=ps") / 2, rel=0.001)


def test_moments_are_on_the_servers_alone() -> None:
    report = estimate(MODEL, "dp=2,sync=ps,servers=1:own,precision=fp32", Workload(64, 4))
    worker, server = report.roles
    assert worker.ranks == (0, 1) and server.ranks == (2,)
    assert worker.bytes.optimizer == 0
    assert server.bytes.optimizer == pytest.approx(12 * sum(p.numel for p in parameters(MODEL)), rel=0.01)
    assert not server.ledger and {row.op for row in worker.ledger if row.axes == "server"} == {"push", "pull"}


def test_the_optimizer_decides_what_a_server_keeps() -> None:
    def kept(optimizer: str) -> int:
        work = Workload(64, 4, optimizer=optimizer)
        return estimate(MODEL, "dp=2,sync=ps,servers=1:own", work).roles[1].bytes.optimizer

    assert kept("adamw") == 3 * kept("sgd") and kept("momentum") == 2 * kept("sgd")
