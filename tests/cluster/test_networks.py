"""Networks between nodes by the words that people use, and one line for every text that names none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster
from shardwise.cluster.accelerators import accelerators
from shardwise.cluster.networks import network_of
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError

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
