"""Cluster files that are written are read back as they were; measured fields that are wrong are refused in one line."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster, Device, Host, Link, Speed
from shardwise.cluster.catalog import lookup
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError

FIGURE = st.floats(1e-3, 1e15)
SECONDS = st.floats(0, 10)
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
SPEEDS = st.lists(st.builds(Speed, FIGURE, *[st.none() | FIGURE] * 4), max_size=3, unique_by=lambda s: s.nbytes)
LINKS = st.builds(
    lambda source, speeds, *others: Link(
        *others[:2], source or "the cluster file", *others[2:], tuple(sorted(speeds, key=lambda speed: speed.nbytes))
    ),
    TEXT, SPEEDS, SECONDS, FIGURE, SECONDS, SECONDS, st.booleans(),
)  # fmt: skip
DEVICES = st.just(lookup("H100").device) | st.just(lookup("CPU").device) | st.builds(
    lambda name, kind, memory, bandwidth, peaks, source: Device("X" + name, kind, memory, bandwidth, peaks, source),
    st.sampled_from(["", "-1", " ü"]), st.sampled_from(["cuda", "cpu", "tpu"]), st.none() | st.integers(99, 10**15),
    st.none() | FIGURE, st.dictionaries(st.sampled_from(["float32", "bfloat16"]), FIGURE), TEXT,
)  # fmt: skip
HOSTS = st.just(Host()) | st.just(lookup("H100").host) | st.builds(
    lambda rates, source: Host(None, *rates, source=source or "the cluster file"),
    st.tuples(*[st.none() | FIGURE] * 5), TEXT,
)  # fmt: skip
MEMORIES = st.none() | st.integers(1, 10**15)


def of_host(nodes, devices, device, intra, inter, host, memory, nics):
    if device.kind == "cpu":
        return Cluster(nodes, devices, device, intra, inter, replace(host, memory_bytes=None), nics)
    host = replace(host, memory_bytes=memory, source=host.source or "the cluster file") if memory else host
    return Cluster(nodes, devices, device, intra, inter, host, nics)


@given(
    st.builds(
        of_host, st.integers(1, 99), st.integers(1, 99), DEVICES, LINKS, LINKS, HOSTS, MEMORIES, st.integers(0, 9)
    )
)
@settings(deadline=None)
def test_what_is_written_is_read_back(cluster):
    text = to_toml(cluster, ["measured today"], {"intra.alpha": "1 to 2", "inter.speeds.0": "a remark"})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.toml")
        file.write_text(text, encoding="utf-8")
        found = Cluster.parse(str(file))
    assert found == cluster and found.device.peak_flops == cluster.device.peak_flops
    assert text.startswith("# measured today\n") and text.count("# 1 to 2") == 1


@from_table
def test_a_bad_host_gives_one_line(tmp_path, lines, words):
    (tmp_path / "cluster.toml").write_text(f'devices_per_node = 2\ndevice = "H100"\n[host]\n{lines}\n')
    with pytest.raises(UserError) as error:
        Cluster.parse(str(tmp_path / "cluster.toml"))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_table_of_the_host_is_read_in_place_of_the_catalogs(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('devices_per_node = 8\ndevice = "H100"\n[host]\nmemory_bytes = 64e9\nadamw_rate = 1e9\n')
    assert Cluster.parse(str(file)).host == Host(64 * 10**9, None, None, 1e9, source="the cluster file")
    file.write_text('devices_per_node = 8\ndevice = "H100"\nhost = 3\n')
    with pytest.raises(UserError, match="host must be a table"):
        Cluster.parse(str(file))
    file.write_text('devices_per_node = 8\ndevice = "CPU"\n[host]\nmemory_bytes = 64e9\n')
    with pytest.raises(UserError, match=r"write device\.memory_bytes"):
        Cluster.parse(str(file))


@from_table
def test_a_bad_file_gives_one_line(tmp_path, lines, words):
    file = tmp_path / "cluster.toml"
    file.write_text(f'devices_per_node = 2\ndevice = "CPU"\n[intra]\nalpha = 1e-6\nbandwidth = 1e9\n{lines}\n')
    with pytest.raises(UserError, match=words) as caught:
        Cluster.parse(str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
