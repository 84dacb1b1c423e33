"""`nvidia-smi topo -m` as a cluster: the tables of usual machines, and every text that is none in one line."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Cluster
from shardwise.cluster.accelerators import accelerators
from shardwise.cluster.catalog import lookup
from shardwise.cluster.nvml import ask
from shardwise.cluster.topology import Topology, cluster_of, device_of, explained, read
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError

NVIDIA = [name for name, entry in accelerators().devices.items() if entry.ports]

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line names the columns"),
        ("GPU0 GPU1\n", "no row GPU0"),
        (DGX_A100.split("GPU7    ")[0], "no row GPU0|no line"),
        ("\n".join(BRIDGE.splitlines()[:2]), "no row GPU1"),
        (BRIDGE.replace("NV12", "NV", 1), "'NV' in the table"),
        (BRIDGE.replace("NV12", "SYS", 1), "but GPU1 to GPU0 is NV12"),
        (BRIDGE.replace(" X ", "SYS", 1), "should be X"),
        (BRIDGE.replace("NV12", "NV0"), "NV0"),
        ("GPU0 GPU0\nGPU0 X X\n", "column twice"),
        ("GPU0 GPU1\nGPU0 X\nGPU1 NV1 X", "1 of 2 entries"),
        ("x" * 1_000_001, "more than 1,000,000"),
    ],
)
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
