"""`nvidia-smi topo -m` as a cluster: the tables of usual machines, and every text that is none in one line."""

import json
import random
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table, table
from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import accelerators, lookup
from shardwise.cluster.paths import paths_of
from shardwise.cluster.topology import Topology, advice, ask, cluster_of, device_of, explained, read
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError
from shardwise.predict.time.constants import constants
from shardwise.predict.time.network import Collectives
from shardwise.predict.traffic.slow_links import tensor_warning
from shardwise.schedule.network import Network

NVIDIA = [name for name, entry in accelerators().devices.items() if entry.ports]

LEGEND = table(__file__, "LEGEND")


def table(gpus: int, path, nics: int = 0, to_nic=None, nic="NIC", tabs=False, listed="") -> str:
    """A table as nvidia-smi prints it. path(a, b) of two GPUs; to_nic(gpu, nic)."""
    heads = [f"GPU{i}" for i in range(gpus)] + [f"{nic}{i}" for i in range(nics)]
    space = "\t" if tabs else "    "
    tail = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = [f"GPU {i}: {listed} (UUID: GPU-00000000-{i})" for i in range(gpus if listed else 0)]
    lines.append(space + space.join(heads + tail) if not tabs else "\x1b[4m\t" + "\t".join(heads + tail) + "\x1b[0m")
    for a in range(gpus):
        cells = [" X " if a == b else path(a, b) for b in range(gpus)]
        cells += [to_nic(a, n) for n in range(nics)]
        lines.append(space.join([f"GPU{a}", *cells, "0-47,96-143", str(a // 4), "N/A"]))
    for n in range(nics):
        cells = [to_nic(a, n) for a in range(gpus)] + [" X " if n == other else "SYS" for other in range(nics)]
        lines.append(space.join([f"{nic}{n}", *cells]))
    return "\n".join(lines) + LEGEND


def near(a: int, n: int) -> str:
    """Two GPUs and two NICs on a switch, as in a DGX A100; the last two NICs are for storage."""
    return "PXB" if a // 2 == n // 2 and n < 8 else "SYS"


DGX_A100 = table(8, lambda a, b: "NV12", 10, near, nic="mlx5_")
DGX_H100 = table(8, lambda a, b: "NV18", 8, lambda a, n: "PIX" if a == n else "NODE", listed="NVIDIA H100 80GB HBM3")
HYBRID = table(8, lambda a, b: "NV12" if a // 2 == b // 2 else ("PXB" if a // 4 == b // 4 else "SYS"), tabs=True)
PCIE = table(
    8, lambda a, b: "PIX" if a // 2 == b // 2 else ("PHB" if a // 4 == b // 4 else "SYS"), 1, lambda a, n: "PHB"
)
BRIDGE = table(2, lambda a, b: "NV12")
BOARD = table(4, lambda a, b: "NV4")


def test_a_switch_reaches_every_peer_with_all_links():
    found = read(DGX_A100)
    assert len(found.gpus) == 8 and found.nics[0] == "mlx5_0" and found.between() == {"NV12": 28}
    cluster = cluster_of(found, "A100-80GB-SXM", nodes=4)
    assert cluster == Cluster.parse("4x8xA100"), "the catalog's usual node"
    fast = cluster_of(found, "A100-80GB-SXM", nodes=4, nic_gbits=200)
    assert fast.inter.bandwidth == 25e9, "eight of ten NICs are near a GPU, one a GPU"
    assert cluster_of(read(DGX_H100), "H100-80GB-SXM").intra.bandwidth == 450e9


def test_fewer_links_are_slower():
    """The A800 of eight links to a switch, four A100 without one, and a pair of cards with bridges."""
    eight = cluster_of(read(table(8, lambda a, b: "NV8")), "A100-80GB-SXM")
    assert eight.intra.bandwidth == 200e9 and "over a switch" in eight.intra.source
    board = cluster_of(read(BOARD), "A100-80GB-SXM")
    assert board.intra.bandwidth == 300e9, "all its links, to three peers"
    half = cluster_of(read(table(2, lambda a, b: "NV4")), "A100-80GB-SXM")
    assert half.intra.bandwidth == 100e9 and "at most 4 of them to one peer" in half.intra.source
    assert half.intra.alpha == lookup("A100").intra.alpha
    assert cluster_of(read(BRIDGE), "H100-PCIe").intra.bandwidth == 300e9
    assert cluster_of(read(table(8, lambda a, b: "NV18")), "B200").intra.bandwidth == 900e9


def test_the_slowest_path_is_the_nodes():
    found = read(HYBRID)
    assert found.between() == {"NV12": 4, "PXB": 8, "SYS": 16}
    whole = cluster_of(found, "A100-80GB-PCIe")
    assert (whole.nodes, whole.devices_per_node, whole.intra.bandwidth) == (1, 8, 31e9)
    assert "SYS" in whole.intra.source
    pairs = cluster_of(found, "A100-80GB-PCIe", islands=True)
    assert (pairs.nodes, pairs.devices_per_node, pairs.intra.bandwidth, pairs.inter.bandwidth) == (4, 2, 300e9, 31e9)
    assert found.islands() == [("GPU0", "GPU1"), ("GPU2", "GPU3"), ("GPU4", "GPU5"), ("GPU6", "GPU7")]
    assert any("NVLinks join GPU0 GPU1;" in line for line in explained(found))


def test_a_box_without_nvlinks():
    found = read(PCIE)
    lines = list(explained(found))
    assert [line.split(":")[0] for line in lines[:3]] == ["PIX", "PHB", "SYS"], "nearest first"
    assert "16 pairs" in lines[2] and "1 NICs, 0 of them" in lines[3]
    assert cluster_of(found, "L40S").intra.bandwidth == 31e9
    assert cluster_of(found, "H100-PCIe", nic_gbits=400).inter.bandwidth == 400e9 / 8 / 8, "one NIC for eight GPUs"
    older = read(PCIE.replace("SYS", "SOC"))
    assert older.between() == found.between()


def test_one_gpu_has_the_usual_links():
    found = read(table(1, None))
    assert cluster_of(found, "H100-80GB-SXM") == Cluster.parse("1xH100")


def test_devices_are_named_by_the_driver_or_the_user():
    assert device_of(read(DGX_H100), None) == "H100-80GB-SXM"
    assert device_of(read(DGX_A100), "a100") == "A100-80GB-SXM"
    assert all(bool(entry.driver_name) == bool(entry.ports) for entry in accelerators().devices.values())
    for text, given_name, words in (
        (DGX_A100, None, "does not name the GPUs; give --device"),
        (DGX_H100.replace("H100 80GB HBM3", "H900"), None, "'NVIDIA H900' is not in the catalog"),
        (DGX_A100, "H1000", "did you mean"),
        (DGX_A100, "MI300X", "is not NVIDIA's"),
        (DGX_H100.replace("HBM3", "HBM2e", 1), None, "different GPUs"),
    ):
        with pytest.raises(UserError, match=words):
            device_of(read(text), given_name)


@pytest.mark.parametrize(("text", "device"), [(DGX_A100, "A100-80GB-SXM"), (HYBRID, "A100-80GB-PCIe"), (PCIE, "L4")])
def test_files_are_read_back(text, device, tmp_path):
    found = read(text)
    cluster = cluster_of(found, device, 1, 100.0 if found.nics else None)
    (tmp_path / "node.toml").write_text(to_toml(cluster, list(explained(found))))
    back = Cluster.parse(str(tmp_path / "node.toml"))
    assert (back.devices, back.device) == (cluster.devices, cluster.device)
    assert back.intra.bandwidth == cluster.intra.bandwidth and back.inter.bandwidth == cluster.inter.bandwidth


@from_table
def test_texts_that_are_no_table(text, words):
    with pytest.raises(UserError, match=words) as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((BRIDGE, "L4", {}), "L4 has none"),
        ((DGX_H100, "A100-80GB-SXM", {}), "has NV18, but A100-80GB-SXM has 12"),
        ((BRIDGE, "A100-80GB-SXM", {"nic_gbits": 200}), "no NICs"),
        ((DGX_A100, "A100-80GB-SXM", {"nic_gbits": -1}), "positive number"),
        ((DGX_A100, "A100-80GB-SXM", {"nodes": 0}), "nodes must be a positive integer"),
        ((DGX_A100, "A100-80GB-SXM", {"islands": True}), "groups of equal size"),
        ((PCIE, "L4", {"islands": True}), "groups of equal size"),
        ((HYBRID, "A100-80GB-PCIe", {"islands": True, "nodes": 2}), "one machine"),
    ],
)
def test_what_makes_no_cluster(arguments, words):
    text, device, options = arguments
    with pytest.raises(UserError, match=words):
        cluster_of(read(text), device, **options)


@given(st.sampled_from([DGX_A100, DGX_H100, HYBRID, PCIE, BRIDGE]), st.randoms(), st.integers(1, 30), st.booleans())
def test_damaged_tables_are_read_or_refused(text: str, draw: random.Random, changes: int, words: bool):
    parts = text.split(" ") if words else list(text)
    for _ in range(changes):
        at = draw.randrange(len(parts))
        parts[at : at + draw.randrange(3)] = draw.choices(
            ["", "X", "GPU0", "NV99", "SYS", "\n", "\x1b[", "é", *parts[:3]]
        )
    try:
        found = read((" " if words else "").join(parts))
        assert list(explained(found)) or len(found.gpus) == 1
        cluster = cluster_of(found, device_of(found, draw.choice([None, *NVIDIA])), islands=draw.random() < 0.3)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert cluster.devices == len(found.gpus)


@given(st.text())
def test_any_text_is_refused_or_read(text):
    try:
        read(text)
    except UserError as error:
        assert str(error)


class Driver(SimpleNamespace):
    """What NVML says of four GPUs: pairs with NVLinks, or all on a switch, or no driver at all."""

    class NVMLError(Exception):
        pass

    def __init__(self, switch: bool, gpus: int = 4, broken: bool = False) -> None:
        super().__init__(switch=switch, gpus=gpus, broken=broken, open=0)

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, gpu):
        return b"NVIDIA A100-SXM4-80GB" if self.switch else "NVIDIA A100 80GB PCIe"

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=f"0000000{gpu}:00:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 10 if one // 2 == other // 2 else 50

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= 12:
            raise self.NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return 2 if self.switch else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(busId=f"0000000{gpu ^ 1}:00:00.0")


def test_nvml_says_the_same(monkeypatch):
    driver = Driver(switch=True)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver)
    found = ask()
    assert found.between() == {"NV12": 6} and device_of(found, None) == "A100-80GB-SXM" and driver.open == 0
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Driver(switch=False))
    pairs = ask()
    assert pairs.between() == {"NV12": 2, "SYS": 4} and pairs.paths["GPU2", "GPU3"] == "NV12"
    assert cluster_of(pairs, device_of(pairs, None), islands=True).nodes == 2
    assert isinstance(pairs, Topology)


@pytest.mark.parametrize(
    ("driver", "words"),
    [(None, "pynvml is not there"), (Driver(True, broken=True), "Driver Not Loaded"), (Driver(True, 0), "no GPU")],
)
def test_without_nvml_a_line_says_what_to_do(driver, words, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver)
    with pytest.raises(UserError, match=words):
        ask()


@pytest.mark.parametrize(
    ("path", "device", "kind"), [("NV12", "A100", "nvlink"), ("PIX", "L40S", "pcie"), ("PXB", "L40S", "pcie"),
                                 ("PHB", "L40S", "host"), ("NODE", "L40S", "host"), ("SYS", "L40S", "host")]
)  # fmt: skip
def test_the_slowest_path_says_the_kind_of_link(path, device, kind):
    found = cluster_of(read(table(4, lambda a, b: path)), lookup(device).device.name)
    assert found.intra.kind == kind and found.over_pcie == (kind != "nvlink")


# -- Links by pair


class Node(NamedTuple):
    """A machine of a public thread. near: (GPU, GPU) -> path, of those that differ from `far`; tp: degree -> (kind of
    its link, GB/s); nic_path: to the NIC of a GPU's switch."""

    thread: str
    device: str
    gpus: int
    far: str
    near: dict[tuple[int, int], str]
    tp: dict[int, tuple[str, float]]
    nics: int = 0
    nic_path: str = "SYS"


def blocks(size: int, gpus: int, path: str) -> dict[tuple[int, int], str]:
    return {pair: path for pair in combinations(range(gpus), 2) if pair[0] // size == pair[1] // size}


CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
NODES = {
    "8 H100 on a switch": Node(
        "NVIDIA/nccl issue 1453", "H100", 8, "NV18", {}, {2: ("nvlink", 450), 8: ("nvlink", 450)}, 8, "PIX"
    ),
    "8 A100 on a switch": Node(
        "NVIDIA/nccl issue 820", "A100", 8, "NV12", {}, {2: ("nvlink", 300), 8: ("nvlink", 300)}, 8, "PXB"
    ),
    "8 A800, 8 links each": Node(
        "NVIDIA/nccl issue 933", "A100", 8, "NV8", {}, {2: ("nvlink", 200), 8: ("nvlink", 200)}, 8, "PIX"
    ),
    "16 V100 of a DGX-2": Node(
        "NVIDIA/nccl-tests issue 78", "V100", 16, "NV6", {}, {2: ("nvlink", 150), 16: ("nvlink", 150)}, 8, "PIX"
    ),
    "8 V100 of a DGX-1": Node(
        "NVIDIA/nccl issue 671", "V100", 8, "SYS", {pair: f"NV{n}" for pair, n in CUBE.items()},
        {2: ("nvlink", 25), 4: ("nvlink", 100), 8: ("nvlink", 150)},
    ),
    "4 H100 without a switch": Node(
        "NVIDIA/nccl issue 1617", "H100", 4, "NV6", {}, {2: ("nvlink", 150), 4: ("nvlink", 450)}, 4, "PIX"
    ),
    "8 A40 with bridges": Node(
        "NVIDIA/nccl-tests issue 74", "A40", 8, "SYS", blocks(4, 8, "NODE") | blocks(2, 8, "NV4"),
        {2: ("nvlink", 56.25), 4: ("host", 31), 8: ("host", 31)},
    ),
    "2 cards with a bridge": Node("NVIDIA/nccl issue 557", "3090", 2, "NV3", {}, {2: ("nvlink", 42.1875)}),
    "8 cards without": Node(
        "NVIDIA/nccl issue 1817", "L40S", 8, "SYS", blocks(4, 8, "NODE") | blocks(2, 8, "PIX"),
        {2: ("pcie", 31), 4: ("host", 31), 8: ("host", 31)},
    ),
    "2 RTX 5090": Node("noonghunna/club-3090 issue 1229", "5090", 2, "PHB", {}, {2: ("host", 63)}),
    "a tray of an NVL72": Node(
        "NVIDIA/k8s-test-infra issue 371", "GB200", 4, "NV18", {}, {2: ("nvlink", 900), 4: ("nvlink", 900)}
    ),
}  # fmt: skip


def text_of(node: Node, order: tuple[int, ...] | None = None) -> str:
    """The table. order: the driver's number of each of the machine's GPUs, where it is another."""
    at = {gpu: place for place, gpu in enumerate(order or range(node.gpus))}
    each = max(1, node.gpus // node.nics) if node.nics else 1

    def path(a: int, b: int) -> str:
        one, other = sorted((at[a], at[b]))
        return " X " if a == b else node.near.get((one, other), node.far)

    heads = [*(f"GPU{gpu}" for gpu in range(node.gpus)), *(f"NIC{nic}" for nic in range(node.nics))]
    lines = ["\t" + "\t".join([*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for gpu in range(node.gpus):
        nics = [node.nic_path if at[gpu] // each == nic else "SYS" for nic in range(node.nics)]
        lines.append("\t".join([f"GPU{gpu}", *(path(gpu, b) for b in range(node.gpus)), *nics, "0-63", "0", "N/A"]))
    return "\n".join(lines) + "\n"


def cluster(name: str, nodes: int = 1, order: tuple[int, ...] | None = None) -> Cluster:
    node = NODES[name]
    return cluster_of(read(text_of(node, order)), lookup(node.device).device.name, nodes)


@pytest.mark.parametrize("name", NODES)
def test_each_degree_has_its_link(name):
    node, found = NODES[name], cluster(name)
    for tp, (kind, gigabytes) in node.tp.items():
        link = found.seen_by(tp).intra
        assert (link.kind, (link.bandwidth or 0) / 1e9) == (kind, gigabytes), (name, tp)


@pytest.mark.parametrize("name", NODES)
def test_each_pair_has_its_link(name):
    node, found = NODES[name], cluster(name)
    for a, b in combinations(range(node.gpus), 2):
        path, link = node.near.get((a, b), node.far), found.link(a, b)
        assert link == found.link(b, a)
        assert (link.kind == "nvlink") == path.startswith("NV")
        if found.paths:
            assert link.name == path


@pytest.mark.parametrize("name", NODES)
def test_a_written_file_has_the_same_links(name, tmp_path):
    found = cluster(name)
    (tmp_path / "node.toml").write_text(to_toml(found, list(explained(read(text_of(NODES[name]))))))
    back = Cluster.parse(str(tmp_path / "node.toml"))
    assert back.paths == found.paths and back.intra.bandwidth == found.intra.bandwidth
    assert [back.seen_by(tp).intra.bandwidth for tp in NODES[name].tp] == [
        found.seen_by(tp).intra.bandwidth for tp in NODES[name].tp
    ]


@pytest.mark.parametrize("name", NODES)
def test_advice_names_the_degrees_on_pcie(name):
    """A warning for tp on PCIe, none for tp on NVLinks, and the largest degree that NVLinks join in its place."""
    node, found, parts = NODES[name], cluster(name), {"tensor": 1.0, "weights": 3.0}
    (line,) = advice(found)
    for tp, (kind, _) in node.tp.items():
        warning = tensor_warning(found, tp, parts, "the step")
        assert (warning is None) == (kind == "nvlink"), (name, tp)
        assert f"tp={tp} {'NVLink' if kind == 'nvlink' else 'PCIe'}" in line
        joined = [t for t, (k, _) in node.tp.items() if k == "nvlink" and t < tp]
        if warning and joined:
            assert f"compare tp={max(joined)}, which NVLinks join, with pp={tp // max(joined)}" in warning


@pytest.mark.parametrize("name", ["8 A40 with bridges", "8 cards without"])
def test_prices_are_those_of_the_groups_links(name):
    found = cluster(name)
    known = constants(found.device)
    collectives, whole = Collectives(found, known), Collectives(found.without_paths(), known)
    for ranks, stride in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 2)):
        near = Collectives(found.seen_by(ranks, stride), known)
        assert collectives.seconds("all_reduce", 1e8, ranks, stride) == near.seconds("all_reduce", 1e8, ranks)
    pair, far = (float(collectives.seconds("all_reduce", 1e8, 2, stride)) for stride in (1, 4))
    assert found.intra.name == found.seen_by(8).intra.name == "SYS" and found.seen_by(4).intra.name == "NODE"
    assert pair < far == pytest.approx(float(whole.seconds("all_reduce", 1e8, 2)))
    assert collectives.hop(1e8, 1) <= collectives.hop(1e8, 4)
    several = collectives.seconds("all_reduce", 1e8, [2, 4, 8], 1)
    assert several.tolist() == [float(collectives.seconds("all_reduce", 1e8, ranks)) for ranks in (2, 4, 8)]
    assert Network.of(found, [0, 1]).intra.beta <= Network.of(found, [0, 4]).intra.beta
    assert Network.of(found, [0, 1]).intra.alpha < Network.of(found, [0, 4]).intra.alpha


@from_table
def test_messages_to_all_take_each_pairs_own_link(name, ranks, kind, gigabytes):
    found = cluster(name)
    link = found.seen_by(ranks, pairs=True).intra
    assert link.kind == kind and (link.bandwidth or 0) / 1e9 == pytest.approx(gigabytes, rel=0.02)
    known = constants(lookup("A100").device)
    collectives, seen = Collectives(found, known), Collectives(found.seen_by(ranks, pairs=True), known)
    assert collectives.seconds("all_to_all", 1e8, ranks) == seen.seconds("all_to_all", 1e8, ranks)
    several = np.broadcast_to(collectives.streamed(1e8, "link", np.array([ranks, ranks])), 2)
    assert several == pytest.approx(seen.streamed(1e8, "link"))


def test_between_nodes_a_chain_of_nvlinks_will_do():
    rows = [["X", "NV4", "SYS"], ["NV4", "X", "NV4"], ["SYS", "NV4", "X"]]
    node = replace(Cluster.parse("2x3xA100"), paths=paths_of(rows, lookup("A100"), {}))
    assert node.seen_by(3).intra.kind == "host" and node.seen_by(6).intra.kind == "nvlink"
    assert node.seen_by_group([0, 1, 2]).intra.kind == "host"
    assert node.seen_by_group([0, 1, 2, 3, 4, 5]).intra.kind == "nvlink"


def test_gpus_that_are_near_become_neighbors():
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    found, usual = cluster("8 A40 with bridges", order=order), cluster("8 A40 with bridges")
    assert [found.seen_by(tp).intra for tp in (2, 4, 8)] == [usual.seen_by(tp).intra for tp in (2, 4, 8)]
    lines = "\n".join(explained(read(text_of(NODES["8 A40 with bridges"], order))))
    assert "CUDA_VISIBLE_DEVICES=0,4,1,5,2,6,3,7" in lines
    assert "CUDA_VISIBLE_DEVICES" not in "\n".join(explained(read(text_of(NODES["8 A40 with bridges"]))))


def test_trays_of_one_nvlink_switch_are_one_node():
    rack = cluster("a tray of an NVL72", 18)
    assert (rack.nodes, rack.devices_per_node, rack.intra.kind) == (1, 72, "nvlink")
    racks = cluster("a tray of an NVL72", 36)
    assert (racks.nodes, racks.devices_per_node) == (2, 72)
    assert cluster("a tray of an NVL72").devices_per_node == 4
    with pytest.raises(UserError, match="give --nodes up to 18, or a multiple"):
        cluster("a tray of an NVL72", 20)
    assert (cluster("8 H100 on a switch", 4).nodes, cluster("8 H100 on a switch", 4).devices_per_node) == (4, 8)


def test_gpus_share_the_nics_that_there_are():
    shared = cluster("16 V100 of a DGX-2", 2)
    assert (shared.nics, shared.network_share) == (8, 0.5)
    assert cluster("8 H100 on a switch", 2).nics == 0
    node = NODES["8 H100 on a switch"]
    given = cluster_of(read(text_of(node._replace(nics=2))), "H100-80GB-SXM", 2, nic_gbits=400)
    assert (given.inter.bandwidth, given.nics) == (50e9, 2)


def test_any_device_may_have_links_by_pair(tmp_path):
    file = tmp_path / "c.toml"
    text = (
        "devices_per_node = 4\n"
        'paths = ["X fast slow slow", "fast X slow slow", "slow slow X fast", "slow slow fast X"]\n'
        '[device]\nname = "G"\nmemory_bytes = 8e10\n[links.fast]\nbandwidth = 1e11\nkind = "nvlink"\n'
        '[links.slow]\nbandwidth = 1e10\nkind = "host"\n'
    )
    file.write_text(text)
    found = Cluster.parse(str(file))
    assert [found.seen_by(tp).intra.bandwidth for tp in (2, 4)] == [1e11, 1e10]
    assert found.intra.bandwidth == 1e10 and found.link(2, 3).name == "fast"
    (tmp_path / "d.toml").write_text(to_toml(found))
    assert Cluster.parse(str(tmp_path / "d.toml")) == found
    for wrong, right, hint in (
        ("[links.slow]", "[links.none]", "describe it in [links.slow]"),
        ("paths = [", "nothing = [", "unknown field nothing"),
        ('"X fast slow slow"', '"X fast slow"', "row 0 has 3 of 4"),
        ('"fast X slow slow"', '"slow X slow slow"', "but"),
        ("devices_per_node = 4", "devices_per_node = 8", "those of 4 devices, but a node has 8"),
        ("[links.fast]", "[intra]\nbandwidth = 1e9\n[links.fast]", "leave out [intra]"),
        ("bandwidth = 1e11", "bandwidth = -1", "must be positive"),
        ("bandwidth = 1e11", 'bandwidth = 1e11\nname = "a\\nb"', "links.fast.name must be a short text"),
        ('"X fast slow slow"', "3", "list of texts"),
    ):
        file.write_text(text.replace(wrong, right))
        with pytest.raises(UserError) as caught:
            Cluster.parse(str(file))
        assert hint in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="NV99"):
        paths_of([["X", "NV99"], ["NV99", "X"]], lookup("H100"), {})


@pytest.fixture
def command(capsys):
    """Run `shardwise ...`: (exit code, standard output, standard error)."""

    def run(*argv):
        code = main(list(argv))
        return code, *capsys.readouterr()

    return run


SERVE = "plan llama-3-8b --serve --prompt 1024 --output 256 --concurrency 64"


def test_pairs_are_planned_and_not_warned_of(command, tmp_path):
    """The published complaint: with bridges, tp=2 was said to run over PCIe."""
    table, file = tmp_path / "topo.txt", tmp_path / "node.toml"
    table.write_text(text_of(NODES["8 A40 with bridges"]))
    code, out, _ = command("calibrate", "topology", str(table), "--device", "a40", "--out", str(file))
    assert code == 0 and "tp=2 NVLink, 56.25 GB/s; tp=4 PCIe, through the host, 31 GB/s" in out.replace("\n", " ")
    data = json.loads(command(*SERVE.split(), "--cluster", str(file), "--top", "100", "--json")[1])
    assert not [line for line in data["warnings"] if "tp=2 " in line]
    assert any("tp=4 runs over PCIe, through the host" in line for line in data["warnings"])
    assert data["cluster_links"]["inside_node"]["by_pair"]["NV4"]["pairs"] == 4
    assert "4 pairs over NV4, 56.2 GB/s" in command(*SERVE.split(), "--cluster", str(file))[1].replace("\n", " ")


def test_pix_and_sys_give_different_plans(command, tmp_path):
    """One PCIe switch between all GPUs, or the processors' link."""
    found = {}
    for path in ("PIX", "SYS"):
        table, file = tmp_path / "topo.txt", tmp_path / f"{path}.toml"
        table.write_text(text_of(NODES["8 cards without"]._replace(far=path, near={})))
        assert command("calibrate", "topology", str(table), "--device", "l40s", "--out", str(file))[0] == 0
        data = json.loads(command(*SERVE.split(), "--cluster", str(file), "--top", "100", "--json")[1])
        found[path] = {(row["layout"], row["weights"]): row["token_seconds"] for row in data["ranked"]}
    slower = [key for key in found["PIX"].keys() & found["SYS"].keys() if "tp=" in key[0]]
    assert slower and all(found["SYS"][key] > found["PIX"][key] for key in slower)
