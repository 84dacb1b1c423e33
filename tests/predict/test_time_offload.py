from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster, Device, Host, Link
from shardwise.cluster.catalog import accelerators
from shardwise.layout import Layout, Workload
from shardwise.layout.homes import DISK_READ, DISK_WRITE, TO_DEVICE, TO_HOST
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.predict.step_seconds import step_seconds
from shardwise.predict.time import Pricing, StepShape, engine, training_step
from shardwise.predict.time.host_rates import HostShare, host_share
from shardwise.predict.time.offload import ADAMW, BOUNDS, SLOWDOWN, WIDE, Sharded, offload_seconds

LLAMA, H100 = get("llama-3-8b"), Cluster.parse("8xH100")
RATE = st.floats(1e8, 1e11)
HOSTS = st.builds(HostShare, RATE, RATE, RATE, RATE, st.booleans())
HOMES = st.sampled_from([("none", 0.0, "none"), ("cpu", 1.0, "none"), ("cpu", 0.25, "none"), ("cpu", 1.0, "cpu"),
                         ("nvme", 1.0, "none"), ("nvme", 0.5, "cpu"), ("nvme", 1.0, "nvme")])  # fmt: skip
MEASURED = accelerators().hosts["measured"]


def shape(zero=0, count=1, homes=("none", 0.0, "none"), **more) -> StepShape:
    home, fraction, parameters = homes
    return StepShape(
        4096, zero=zero, micro_batches=count, offload=home, offloaded=fraction, offload_params=parameters, **more
    )


def seconds_of(layout: str, cluster: Cluster = H100, batch: int = 32):
    return step_seconds(LLAMA, Layout.parse(layout), Workload(4096, batch), cluster)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 8]), HOMES), min_size=2, max_size=6))
def test_arrays_are_numbers(rows):
    rows = [(3 if homes[2] != "none" else zero, count, homes) for zero, count, homes in rows]
    zero, count, homes = (list(column) for column in zip(*rows, strict=True))
    home, fraction, parameters = (np.array(column) for column in zip(*homes, strict=True))
    pricing, software = Pricing(H100), engine("shardwise")
    arrays = StepShape(4096, dp=8, shard=8, zero=np.array(zero), micro_batches=np.array(count), offload=home,
                       offloaded=fraction, offload_params=parameters)  # fmt: skip
    together = training_step(LLAMA, arrays, software, pricing)
    for place, row in enumerate(rows):
        one = training_step(LLAMA, shape(*row, dp=8, shard=8), software, pricing)
        assert np.broadcast_to(together.seconds, len(rows))[place] == pytest.approx(float(one.seconds), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(HOSTS, st.integers(0, 3), st.integers(1, 16), HOMES, st.floats(1e3, 1e10), st.floats(0, 100), st.integers(1, 4))
def test_no_resource_is_busy_for_longer_than_the_step(host, zero, count, homes, elements, micro, pp):
    split = shape(3 if homes[2] != "none" else zero, count, homes, pp=pp)
    found = offload_seconds(split, host, Sharded(elements, elements / 8), Sharded(2.0, 1.0), 32 / pp, micro)
    assert set(found.busy) == set(BOUNDS)
    step = float(found.exposed) + count * micro
    for name, seconds in found.busy.items():
        assert 0 <= float(seconds) <= step * (1 + 1e-9), name
    if not host.overlaps:
        assert float(found.exposed) >= max(float(seconds) for seconds in found.busy.values()) * (1 - 1e-9)


@given(st.floats(1e6, 1e10), RATE, RATE)
def test_the_update_moves_and_computes_what_it_must(elements, link, cores):
    host = HostShare(link, cores, 1e9, 2e9)
    whole = Sharded(elements, 0.0)
    once = offload_seconds(shape(1, 1, ("cpu", 1.0, "none")), host, whole, Sharded(2, 1), 32, 0.0)
    assert float(once.exposed) == pytest.approx(4 * elements / link + elements / cores)  # 2 bytes down, 2 up
    summed = offload_seconds(shape(1, 8, ("cpu", 1.0, "none")), host, whole, Sharded(2, 1), 32, 0.0)
    assert float(summed.exposed) == pytest.approx((WIDE + 2) * elements / link + elements / cores)
    half = offload_seconds(shape(1, 1, ("cpu", 0.5, "none")), host, whole, Sharded(2, 1), 32, 0.0)
    assert float(half.exposed) == pytest.approx(float(once.exposed) / 2)
    disk = offload_seconds(shape(1, 1, ("nvme", 1.0, "none")), host, whole, Sharded(2, 1), 32, 0.0)
    moved = 12 * elements * (1 / 1e9 + 1 / 2e9)
    assert float(disk.busy["disk"]) == pytest.approx(moved)
    assert float(disk.exposed) == pytest.approx(max(moved, float(once.exposed)))


def test_gradients_go_down_beside_backward():
    host, whole = HostShare(10e9, 1e12, 1e9, 1e9), Sharded(1e9, 0.0)
    split = shape(2, 1, ("cpu", 1.0, "none"))
    hidden, alone = (
        float(offload_seconds(split, host, whole, Sharded(2, 1), 32, micro).exposed) for micro in (30.0, 0.0)
    )
    copies = 2e9 / 10e9
    assert alone - hidden == pytest.approx(copies * (1 - 1 / 32) * (1 - SLOWDOWN))


def test_parameters_come_once_where_a_copy_or_packed_weights_stay():
    host, homes = HostShare(10e9, 1e12, 1e9, 1e9), ("cpu", 1.0, "cpu")
    link = [
        float(
            offload_seconds(shape(3, 4, homes, **more), host, Sharded(1e9, 0), Sharded(2.0, 1.0), 32, 0.0).busy["link"]
        )
        for more in ({}, {"hpz": 4}, {"qwz": True})
    ]
    gathers = 2 * 1e9 / 10e9
    assert link[0] - link[1] == pytest.approx(7 * gathers) and link[1] == link[2]


def test_an_optimizer_with_less_state_is_faster_on_the_host_and_on_disk():
    host = HostShare(10e9, 1e9, 1e9, 1e9)
    splits = [shape(1, 1, ("nvme", 1.0, "none"), optimizer=kind) for kind in ("adamw", "momentum", "sgd")]
    busy = [offload_seconds(split, host, Sharded(1e9, 0), Sharded(0.0, 0.0), 32, 0.0).busy for split in splits]
    assert [float(each["disk"]) for each in busy] == pytest.approx([24.0, 16.0, 8.0])
    assert [float(each["cores"]) for each in busy] == pytest.approx([1.0, 20 / ADAMW, 12 / ADAMW])


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("layout", ["zero=1,offload=cpu", "zero=2,offload=cpu", "zero=2,offload=nvme",
                                    "zero=3,offload=cpu,offload_params=cpu", "zero=3,offload=nvme,offload_params=nvme",
                                    "zero=3,hpz=2,offload=cpu,offload_params=cpu", "zero=1,offload=nvme:0.5",
                                    "zero=3,offload=cpu,offload_params=cpu,offload_activations=cpu"])  # fmt: skip
def test_bytes_are_those_of_the_ledger(layout, batch):
    report = estimate(LLAMA, f"dp=8,{layout}", Workload(4096, batch), H100)
    share, (role,) = host_share(H100), report.roles
    assert report.timing
    moves = TO_HOST, TO_DEVICE, DISK_READ, DISK_WRITE
    down, up, read, write = (
        sum(row.payload_bytes for row in role.ledger if (row.op, row.axes) == move) for move in moves
    )
    link, disk = (down + up) / share.link, read / share.read + write / share.write
    # The first or last block is gathered once, which the closed form of gathers does not know.
    assert report.timing["busy"]["link"] == pytest.approx(link, rel=0.02)
    assert report.timing["busy"]["disk"] == pytest.approx(disk, rel=0.02)


def test_nothing_changes_without_offloading():
    found = seconds_of("dp=8,zero=3")
    assert "offload" not in found.parts and not found.busy and "busy" not in found.to_json()
    assert not any(note.startswith("host:") for note in found.notes)


@pytest.mark.parametrize(
    "layout", ["zero=1,offload=cpu", "zero=2,offload=cpu", "zero=3,offload=cpu,offload_params=cpu"]
)
def test_what_leaves_the_device_leaves_its_optimizer(layout):
    plain, away = seconds_of("dp=8,zero=1"), seconds_of(f"dp=8,{layout}")
    assert away.parts["optimizer"] < plain.parts["optimizer"] / 3  # what a step takes without any parameter is left
    assert away.parts["offload"] > 0 and away.seconds > plain.seconds
    assert sum(away.parts.values()) == pytest.approx(away.seconds)


def test_the_farther_the_home_the_longer_the_step():
    rows = ["zero=3", "zero=3,offload=cpu:0.5", "zero=3,offload=cpu", "zero=3,offload=cpu,offload_params=cpu",
            "zero=3,offload=nvme", "zero=3,offload=nvme,offload_params=nvme"]  # fmt: skip
    times = [seconds_of(f"dp=8,{row}").seconds for row in rows]
    assert times == sorted(times)
    assert seconds_of("dp=8,zero=3,offload=cpu,offload_activations=cpu").seconds > times[2]


def test_a_single_device_has_a_stage_too():
    one = Cluster.parse("1xH100")
    later, once = (
        step_seconds(LLAMA, Layout.parse(f"zero={zero},offload=cpu"), Workload(4096, 4), one).busy for zero in (2, 0)
    )
    assert later["link"] > once["link"]


@pytest.mark.parametrize("name", ["8xH100", "1xH100", "8xA100", "16xV100", "2xRTX4090", "8xA10G", "4xcpu", "32xcpu"])
def test_no_rate_is_above_a_measured_or_physical_limit(name):
    cluster = Cluster.parse(name)
    share, ranks = host_share(cluster), cluster.devices_per_node
    entry = accelerators().devices.get(cluster.device.name)
    if entry:
        assert entry.ports and share.link < entry.ports.slot_bandwidth
        assert share.link * ranks <= (cluster.host.links_bandwidth or float("inf"))
    assert share.cores * ranks <= MEASURED.adamw_rate * (1 + 1e-9)
    assert share.read * ranks <= (cluster.host.disk_read or MEASURED.disk_read) * (1 + 1e-9)
    assert share.overlaps == (cluster.device.kind == "cuda")


def test_what_is_not_known_is_said_and_what_is_known_is_used():
    assert "disk" not in host_share(H100).notes(disk=False)[0].split("whose")[0]
    assert "disk reads, disk writes" in host_share(H100).notes(disk=True)[0]
    known = replace(H100, host=Host(10**12, 20e9, None, 8e8, 4e9, 2e9, "told"))
    share = host_share(known)
    assert (share.link, share.cores, share.read, share.write) == (20e9, 1e8, 5e8, 2.5e8) and not share.notes(disk=True)
    unknown = Cluster(1, 2, Device("X", "cuda", 10**10, 1e12), Link(1e-6, 1e9), Link(None, None))
    assert host_share(unknown).link == MEASURED.link_bandwidth


def test_a_link_is_no_faster_than_its_slot():
    assert host_share(replace(Cluster.parse("1xA100"), host=Host(link_bandwidth=9e12))).link == 31e9


@from_table
def test_what_binds_is_one_sentence(layout, words):
    from shardwise.report.timing_table import binding

    report = estimate("llama-3-8b", layout, Workload(4096, 32), "8xH100")
    assert report.timing
    (line,) = binding(report.timing)
    assert line.startswith(words) and "device" in line and not line.endswith(".")
    assert any(note.startswith("host: ") for note in report.notes)


def test_the_device_binds_where_the_host_is_quick():
    quick = replace(H100, host=Host(10**12, 60e9, None, 1e12, 1e12, 1e12, "told"))
    report = estimate("llama-3-8b", "dp=8,zero=3,offload=cpu", Workload(4096, 256), quick)
    assert report.timing and max(report.timing["busy"], key=report.timing["busy"].get) == "device"
