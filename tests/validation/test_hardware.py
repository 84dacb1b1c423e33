import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Link, catalog
from shardwise.errors import UserError
from shardwise.validation.scoreboard.hardware import cluster_of, network_of

USUAL = catalog.lookup("H100-80GB-SXM").inter


def bandwidth(text: str, per_node: int = 8) -> tuple[float | None, list[str]]:
    assumed: list[str] = []
    return network_of(text, USUAL, per_node, 4, assumed).bandwidth, assumed


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([100, 200, 400]),
    st.sampled_from(["Gb/s", "Gbps", "Gbit/s", " Gb/s"]),
)
def test_a_count_of_ports_is_of_a_node(count, rate, unit):
    found, assumed = bandwidth(f"{count}x{rate}{unit} InfiniBand")
    assert found == pytest.approx(count * rate * 1e9 / 8 / 8)
    assert not assumed


@given(st.sampled_from([100, 200, 400, 800]), st.sampled_from(["per GPU", "/GPU", "each GPU", "per device"]))
def test_a_rate_of_a_device_is_its_own(rate, words):
    assert bandwidth(f"{rate} Gb/s RDMA {words}") == (rate * 1e9 / 8, [])


@from_table
def test_published_texts(text, bytes_per_second, said):
    found, assumed = bandwidth(text)
    assert found == pytest.approx(bytes_per_second)
    assert bool(assumed) is said


def test_without_a_text_or_other_nodes_the_network_is_the_usual_one():
    assert network_of("", USUAL, 8, 4, []) == USUAL
    assert network_of("8x200Gb/s", USUAL, 8, 1, []) == USUAL
    assumed: list[str] = []
    assert network_of("carrier pigeons", USUAL, 8, 2, assumed) == USUAL
    assert "'carrier pigeons' not known" in assumed[0]


@from_table
def test_names_of_tables_are_the_catalogs_or_near_them(name, device, said):
    assumed: list[str] = []
    row = {"gpu": name, "gpus": 8}
    if said is None:
        with pytest.raises(UserError, match=f"device {name} is not in the catalog"):
            cluster_of(row, assumed)
        return
    assert cluster_of(row, assumed).device.name == device
    assert [f"device {name} taken as {device}"] * said == assumed


def test_a_link_keeps_its_latency():
    link = network_of("8x200Gb/s HDR IB per node", Link(3e-6, 1e9, "usual", kind="network"), 8, 2, [])
    assert (link.alpha, link.bandwidth, link.kind) == (3e-6, 25e9, "network")


def test_omni_path_is_a_kind_of_its_own():
    link = network_of("Omni-Path 4x100Gb/s per node (Jean Zay)", USUAL, 8, 2, [])
    assert link.kind == "omni-path" and USUAL.kind != "omni-path"


def test_a_power_limit_is_among_what_was_assumed():
    row = {"gpu": "B200", "gpus": 8}
    usual: list[str] = []
    limited: list[str] = []
    whole, less = cluster_of(row, usual), cluster_of({**row, "notes": "power limited B200"}, limited)
    assert less.device.peak("bfloat16") == pytest.approx(whole.device.peak("bfloat16") * (5 / 7) ** 0.5)
    assert less.device.memory_bandwidth == whole.device.memory_bandwidth
    assert not usual and limited == [
        "a lower power limit, not stated: 5/7 of the usual power, as the H100 of the same source"
    ]
