"""Cluster text and TOML files, the devices of the catalog, every refusal in one line."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster, Device, Link
from shardwise.cluster.catalog import lookup, names
from shardwise.errors import UserError

COUNTS = st.integers(1, 10**6)


@given(nodes=COUNTS, devices=COUNTS, device=st.sampled_from(names()))
def test_text_round_trip(nodes, devices, device):
    cluster = Cluster.parse(f"{nodes}x{devices}x{device}")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (nodes, devices, nodes * devices)
    assert Cluster.parse(str(cluster)) == cluster
    assert str(Cluster.parse(str(cluster))) == str(cluster)


@from_table
def test_canonical_text(text, canonical):
    assert str(Cluster.parse(text)) == canonical


@from_table
def test_bad_text_is_refused_with_what_to_write(text, hint):
    with pytest.raises(UserError) as caught:
        Cluster.parse(text)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@given(text=st.text() | st.from_regex(r"[0-9x]{0,6}[a-zA-Z0-9-]{0,6}", fullmatch=True))
def test_any_text_is_read_or_refused(text):
    try:
        cluster = Cluster.parse(text)
    except UserError:
        return
    assert Cluster.parse(str(cluster)) == cluster


def test_ranks_fill_nodes_one_after_the_other():
    cluster = Cluster.parse("2x8xH100")
    assert cluster.link(0, 7) == cluster.intra
    assert cluster.link(7, 8) == cluster.inter
    assert cluster.link(15, 8) == cluster.intra


@pytest.mark.parametrize("name", ["H100", "A100"])
def test_gpus_carry_plausible_figures_with_their_sources(name):
    entry = lookup(name)
    device = entry.device
    # Usable memory of an "80GB" device: below the 80 GiB of its chips, above 79 GiB.
    assert 79 * 2**30 < device.memory_bytes < 80 * 2**30
    # Operations that a byte of memory traffic must bring, 295 on H100 and 153 on A100.
    assert 150 < device.peak("bfloat16") / device.memory_bandwidth < 300
    assert device.peak("float32") < device.peak("tfloat32") < device.peak("bfloat16")
    assert device.peak("float64") is None
    # Units: an all-gather of a small message takes microseconds; NVLink is far slower than memory, the network than it.
    assert 0.1e-6 < entry.intra.alpha < 10e-6
    assert device.memory_bandwidth / 20 < entry.intra.bandwidth < device.memory_bandwidth
    assert entry.inter.bandwidth < entry.intra.bandwidth / 8
    assert entry.inter.alpha is None, "nobody measured it"
    assert device.source and entry.intra.source and entry.inter.source


def test_the_faster_device_is_the_newer_one():
    new, old = lookup("H100"), lookup("A100")
    assert new.device.peak("bfloat16") / old.device.peak("bfloat16") == pytest.approx(3.17, abs=0.01)
    assert new.intra.bandwidth / old.intra.bandwidth == 1.5
    assert old.device.peak("float8_e4m3fn") is None


def test_ranks_on_a_cpu_share_its_memory_and_gpus_do_not():
    cpu = Cluster.parse("4xcpu")
    assert cpu.device.kind == "cpu"
    assert 0 < cpu.device.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.memory_per_device == cpu.device.memory_bytes // 4
    assert (cpu.intra.alpha, cpu.intra.bandwidth, cpu.device.peak("float32")) == (None, None, None)
    gpus = Cluster.parse("8xH100")
    assert gpus.memory_per_device == gpus.device.memory_bytes


def parse_toml(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.parse(str(path))


def test_toml_with_a_device_of_the_catalog(tmp_path):
    usual = lookup("H100")
    plain = parse_toml(tmp_path, 'nodes = 2\ndevices_per_node = 8\ndevice = "h100"\n')
    assert plain == Cluster.parse("2x8xH100")
    slow = parse_toml(tmp_path, 'devices_per_node = 8\ndevice = "H100"\n[inter]\nalpha = 3e-6\n')
    assert (slow.nodes, slow.intra) == (1, usual.intra)
    assert (slow.inter.alpha, slow.inter.bandwidth) == (3e-6, usual.inter.bandwidth)
    assert "cluster file" in slow.inter.source and usual.inter.source in slow.inter.source


def test_toml_with_a_device_of_its_own(tmp_path):
    text = """
        devices_per_node = 4
        [device]
        name = "MyGPU"
        memory_bytes = 48e9
        memory_bandwidth = 1_000_000_000_000
        peak_flops = { bfloat16 = 300e12 }
        [intra]
        bandwidth = 31e9
    """
    cluster = parse_toml(tmp_path, text)
    assert cluster.device == Device("MyGPU", "cuda", 48 * 10**9, 1e12, {"bfloat16": 300e12}, "the cluster file")
    assert cluster.intra == Link(None, 31e9, "the cluster file")
    assert cluster.inter == Link(None, None)
    assert str(cluster) == "4xMyGPU"
    assert hash(cluster) == hash(parse_toml(tmp_path, text))


@from_table
def test_bad_toml_is_refused_by_file_and_field(tmp_path, text, hint):
    with pytest.raises(UserError) as caught:
        parse_toml(tmp_path, text)
    assert hint in str(caught.value)
    assert "cluster.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rooms_of_the_first_floor_import_nothing_slow():
    code = "import sys, shardwise.cluster, shardwise.model.catalog, shardwise.model.huggingface, shardwise.model.flops"
    slow = "{'numpy', 'torch', 'rich', 'tomllib'} & sys.modules.keys()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print({slow} or '')"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
