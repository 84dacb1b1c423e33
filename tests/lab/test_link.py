import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.lab.link import LabLink, lab_cluster
from shardwise.lab.network import check_relay


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("1Gb/s", LabLink(1e9)),
        ("1Gb", LabLink(1e9)),
        ("100Mbit", LabLink(100e6)),
        ("12.5MB/s", LabLink(100e6)),
        ("2500kbps,loss=1%", LabLink(2.5e6, loss=0.01)),
        ("1Gb/s, latency=5ms, loss=0.1%", LabLink(1e9, 0.005, 0.001)),
    ],
)
def test_links_are_read_and_written(text: str, link: LabLink) -> None:
    read = LabLink.parse(text)
    assert [read.bandwidth, read.latency, read.loss] == pytest.approx([link.bandwidth, link.latency, link.loss])
    assert LabLink.parse(str(read)) == read


def test_the_relay_says_what_it_carries() -> None:
    check_relay([LabLink(1e9, 0.005)] * 2)
    with pytest.raises(UserError, match=r"at most 2Gb/s with latency .* give --link 500Mb/s"):
        check_relay([LabLink(1e9, 0.005)] * 4)
    with pytest.raises(UserError, match="at most 200Mb/s with loss"):
        check_relay([LabLink(1e9, loss=0.01)] * 2)


def test_hosts_are_nodes_with_one_nic_each() -> None:
    cluster = lab_cluster(Cluster.parse("4xcpu"), [LabLink(1e9, 0.002), LabLink(100e6)])
    assert (cluster.nodes, cluster.devices_per_node, cluster.nics) == (2, 2, 1)
    assert cluster.inter.bandwidth == 12.5e6 * 1448 / 1514 and cluster.inter.alpha >= 0.002
