import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster, Device, Host, Link, Speed
from shardwise.cluster import catalog as prices
from shardwise.cluster.catalog import accelerators, lookup, names, price_date, price_of
from shardwise.cluster.networks import network_of
from shardwise.cluster.writing import to_toml
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


# -- List prices of devices: dated, each with its offer, and overridden by a given one


ROWS = tomllib.loads((Path(prices.__file__).parent / "prices.toml").read_text())["prices"]


def test_every_price_is_dated_and_of_a_device_of_the_catalog():
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", price_date())
    assert len({(row["device"], row["offer"]) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["device"] in accelerators().devices and row["offer"] and 0.05 < row["usd"] < 50


@pytest.mark.parametrize("name", accelerators().devices)
def test_the_lowest_list_price_counts_and_the_highest_is_kept(name):
    offers = [row["usd"] for row in ROWS if row["device"] == name]
    price = price_of(accelerators().devices[name].device)
    if not offers:
        assert price is None
        return
    assert price is not None and (price.usd, price.highest) == (min(offers), max(offers))
    assert price_date() in price.source


@given(st.floats(0.01, 100), st.integers(1, 1000), st.floats(1, 1e7))
def test_a_given_price_overrides_and_a_million_tokens_cost_their_hours(usd, devices, speed):
    price = price_of(accelerators().devices["H100-80GB-SXM"].device, usd)
    assert price is not None and price.usd == usd and price.source == "--price"
    hours = 1e6 / speed / 3600
    assert price.per_million_tokens(devices, speed) == pytest.approx(usd * devices * hours)


# -- Networks between nodes by the words that people use, and one line for every text that names none


NODES = Cluster.parse("2x8xH100")


@from_table
def test_networks_have_a_speed_and_nics(text, gigabytes, nics):
    cluster = NODES.with_network(text)
    assert (cluster.inter.bandwidth, cluster.nics) == (gigabytes * 1e9, nics)
    assert cluster.inter.name == text and cluster.inter.source.startswith(f"--network {text}")
    assert (cluster.inter.kind == "omni-path") == (text == "omni-path")


def test_efa_is_that_of_the_devices_machines():
    assert Cluster.parse("2x8xA100").with_network("efa").nics == 4
    assert Cluster.parse("2x16xTrainium2").with_network("EFA").inter.bandwidth == 25e9
    with pytest.raises(UserError, match="write one of EFA-p4d, EFA-p5"):
        Cluster.parse("2x8xMI300X").with_network("EFA")


@from_table
def test_other_texts_are_one_line(text, hint):
    with pytest.raises(UserError) as caught:
        NODES.with_network(text)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_one_node_has_no_network():
    with pytest.raises(UserError, match="between nodes, and 8xH100-80GB-SXM is one node"):
        Cluster.parse("8xH100").with_network("NDR")


@given(st.text(max_size=40), st.integers(1, 72))
def test_any_text_is_a_network_or_one_line(text, per_node):
    try:
        link, nics = network_of(text, "H100-80GB-SXM", per_node)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert link.bandwidth and link.bandwidth > 0 and 0 <= nics < max(per_node, 2)


def test_named_networks_have_sources_and_known_devices():
    table = accelerators()
    for network in table.networks.values():
        assert network.source and 1 <= network.gbits <= 800 and set(network.devices) <= set(table.devices)
    assert set(table.network_aliases.values()) <= set(table.networks)


def test_a_cluster_file_names_its_network(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('nodes = 2\ndevices_per_node = 8\ndevice = "A100"\nnetwork = "EFA"\n')
    cluster = Cluster.parse(str(file))
    assert (cluster.inter.bandwidth, cluster.nics, cluster.network_share) == (12.5e9, 4, 0.5)
    for more, hint in (("nics = 1", "leave out nics"), ("[inter]\nbandwidth = 1e9", "leave out [inter]")):
        file.write_text(f'nodes = 2\ndevices_per_node = 8\ndevice = "A100"\nnetwork = "EFA"\n{more}\n')
        with pytest.raises(UserError) as caught:
            Cluster.parse(str(file))
        assert hint in str(caught.value)
    file.write_text('nodes = 2\ndevices_per_node = 8\ndevice = "A100"\nnetwork = 100\n')
    with pytest.raises(UserError, match="network must be a text, not 100"):
        Cluster.parse(str(file))


@pytest.mark.parametrize("text", ["100Gb", "EFA-p4d", "8xNDR", "omni-path"])
def test_a_written_file_keeps_the_network(text, tmp_path):
    cluster = NODES.with_network(text)
    (tmp_path / "c.toml").write_text(to_toml(cluster))
    assert Cluster.parse(str(tmp_path / "c.toml")) == cluster


# -- The catalog's figures: all that must be there is, with a source, in bytes and in one direction


ACCELERATORS, ALIASES, HOSTS = accelerators()[:3]

WANTED = [
    "A100-40GB", "A100-80GB", "H100-SXM", "H100-PCIe", "H200", "B200", "GB200-NVL72", "MI300X", "L4", "L40S",
    "RTX-3090", "RTX-4090", "RTX-5090", "V100", "A10G", "TPU-v5p", "H100-NVL", "H20", "RTX-6000-Ada", "A6000", "A40",
    "T4", "GH200", "MI325X", "MI355X", "TPU-v5e", "TPU-v6e", "Trainium2", "M1-Max", "M2-Ultra", "M3-Max", "M4-Max",
]  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_wanted_devices_are_known(name):
    device = lookup(name).device
    assert device.memory_bytes and device.memory_bandwidth and device.peak("bfloat16")


@pytest.mark.parametrize("entry", ACCELERATORS.values(), ids=ACCELERATORS)
def test_figures_have_sources_and_plausible_units(entry):
    device = entry.device
    assert device.source and entry.intra.source and entry.inter.source
    assert 50 < (device.watts or 400) < 2000 and "power" in device.source
    assert 1.5e10 < device.memory_bytes < 6e11
    assert 2e11 < device.memory_bandwidth < 1e13
    # Bits taken for bytes, or both directions for one, would leave these bounds.
    for link, most in ((entry.intra, 900e9), (entry.inter, 100e9)):
        assert link.bandwidth is None or 1e9 < link.bandwidth <= most
    assert device.peak("float16") == device.peak("bfloat16")
    narrow = [device.peak(dtype) for dtype in ("bfloat16", "float8_e4m3fn", "float4") if device.peak(dtype)]
    assert narrow == sorted(narrow)


def test_aliases_lead_to_devices():
    assert set(ALIASES.values()) <= set(ACCELERATORS)
    assert not set(ALIASES) & set(ACCELERATORS)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_hosts_have_sources_and_plausible_units(host):
    assert host.source
    assert 1e11 < (host.memory_bytes or 1e12) < 5e12
    assert 1e9 < (host.link_bandwidth or 1e10) < 64e9 and (host.links_bandwidth or 1e11) < 1e12
    assert 1e8 < (host.adamw_rate or 1e9) < 1e10
    assert 1e9 < (host.disk_read or 2e9) < 5e10 and 1e9 < (host.disk_write or 2e9) < 5e10


@pytest.mark.parametrize("entry", ACCELERATORS.values(), ids=ACCELERATORS)
def test_no_link_to_the_host_is_faster_than_its_slot(entry):
    if entry.ports and entry.host.link_bandwidth:
        assert entry.host.link_bandwidth < entry.ports.slot_bandwidth


def test_a_node_of_fewer_devices_has_their_part_of_the_host():
    whole, part = Cluster.parse("16xV100").host, Cluster.parse("4xV100").host
    assert part.memory_bytes * 4 == whole.memory_bytes and part.adamw_rate * 4 == whole.adamw_rate
    assert part.link_bandwidth == whole.link_bandwidth and "4 of 16 devices' part" in part.source
    assert Cluster.parse("32xV100").host == whole


def test_a_rack_is_one_node():
    rack = Cluster.parse("72xGB200")
    assert rack.link(0, 71) == rack.intra
    assert str(rack) == "72xGB200-NVL72"


@from_table
def test_names_forgive_spaces_case_and_dashes(text, name):
    assert lookup(text).device.name == name
    assert Cluster.parse(f"2x8x{text}") == Cluster.parse(f"2 x 8x {text.upper()}") == Cluster.parse(f"2x8x{name}")


def test_a_size_in_a_name_must_be_the_devices():
    for text in ("A100 60GB", "V100 16GB", "A100 40GB PCIe", "M2 Ultra 64GB", "80GB", "6000"):
        with pytest.raises(UserError, match="did you mean"):
            lookup(text)


@pytest.mark.parametrize("name", [*ACCELERATORS, *ALIASES])
def test_every_name_is_its_own(name):
    assert lookup(name.lower().replace("-", " ")) == lookup(name) == ACCELERATORS[ALIASES.get(name, name)]


# -- Cluster files that are written are read back as they were


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
HOSTS_FILES = st.just(Host()) | st.just(lookup("H100").host) | st.builds(
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
        of_host, st.integers(1, 99), st.integers(1, 99), DEVICES, LINKS, LINKS, HOSTS_FILES, MEMORIES, st.integers(0, 9)
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
