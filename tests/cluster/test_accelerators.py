"""The catalog's figures: all that must be there is, with a source, in bytes and in one direction."""

import pytest

from harness.cases import from_table
from shardwise.cluster import Cluster
from shardwise.cluster.accelerators import accelerators
from shardwise.cluster.catalog import lookup
from shardwise.errors import UserError

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
