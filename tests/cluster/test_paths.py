"""Links by pair: tables of nvidia-smi topo -m as people posted them, written anew with their paths, and what prices and
advice make of each."""

import json
from itertools import combinations
from typing import NamedTuple

import pytest

from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import lookup
from shardwise.cluster.paths import paths_of
from shardwise.cluster.topology import advice, cluster_of, explained, read
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError
from shardwise.predict.time.constants import constants
from shardwise.predict.time.network import Collectives
from shardwise.predict.traffic.slow_links import tensor_warning
from shardwise.schedule.network import Network


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
    """One path between neighbors in groups of `size`."""
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


def test_gpus_that_are_near_become_neighbors():
    """Bridges between GPU0 and GPU4, GPU1 and GPU5, ..."""
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
