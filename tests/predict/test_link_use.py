"""Communication by axis: the ledger's calls and bytes, and prices that follow the placement."""

import pytest

from harness.cases import table
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import SERVER
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.predict.arguments import as_cluster
from shardwise.predict.time.link_use import LinkUse, link_advice, link_uses

CASES = table(__file__, "CASES")


def uses_of(name: str, text: str, devices: str) -> tuple[LinkUse, ...]:
    model, layout, cluster = get(name), Layout.parse(text), as_cluster(devices)
    report = estimate(model, layout, Workload(batch=64, seq=1024), cluster)
    uses = link_uses(model, layout, cluster, report.roles)
    for role in report.roles:
        rows = [row for row in role.ledger if row.axes != SERVER]
        mine = [use for use in uses if use.role == role.role]
        assert sum(use.calls for use in mine) == sum(row.count for row in rows)
        assert sum(use.payload_bytes for use in mine) == sum(row.payload_bytes for row in rows)
    return uses


@pytest.mark.parametrize(("name", "text", "devices"), CASES)
def test_calls_and_bytes_are_the_ledgers_and_times_follow_the_placement(name: str, text: str, devices: str):
    cluster = as_cluster(devices)
    per_node = cluster.devices_per_node
    for use in uses_of(name, text, devices):
        assert use.ranks > 1 and use.seconds > 0
        assert (use.inside is None) == (use.ranks > per_node)
        if "network" not in use.link:
            assert use.seconds == use.inside
        elif use.ranks * per_node >= 16 and use.inside is not None and use.payload_bytes > 1e6:
            assert use.seconds > use.inside
        # A card's own port of 25 GB/s is no slower than PCIe through the host.
        if use.between is not None and use.inside is not None and use.payload_bytes > 1e6 and not cluster.over_pcie:
            assert use.between > use.inside


def test_advice_names_the_axis_that_a_network_is_too_slow_for():
    step = 2.0
    slow = LinkUse("all", "tp", 2, "NVLink", 10, 10, 0.2, 0.2, 1.9)
    cheap = LinkUse("all", "pp", 2, "NVLink", 10, 10, 0.001, 0.001, 0.02)
    dear = LinkUse("all", "cp", 4, "NVLink", 10, 10, 0.9, 0.9, 3.0)
    tiny = LinkUse("all", "dp_pp", 4, "NVLink", 1, 8, 1e-5, 1e-5, 2e-5)
    lines = link_advice([slow, cheap, dear, tiny], step)
    assert [line.split(":")[0] for line in lines] == ["tp", "pp", "cp"]
    assert "inside a node: 95% of the step between nodes, 10% inside" in lines[0]
    assert "either link" in lines[1] and "dear on every link" in lines[2]
