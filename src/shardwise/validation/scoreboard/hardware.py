"""A row's devices and network as a `Cluster`: names of the catalog or near them, network texts parsed."""

import re
from dataclasses import replace
from math import sqrt

from shardwise.cluster import Cluster, Link, catalog
from shardwise.cluster.catalog import Accelerator
from shardwise.errors import UserError
from shardwise.predict.time.constants import known_devices
from shardwise.validation.scoreboard.configuration import Row, whole

NEAR = (
    (r"A100.*40 ?GB.*", "A100-40GB-SXM"),
    (r"A100.*PCI.*", "A100-80GB-PCIe"),
    (r"A100.*", "A100-80GB-SXM"),
    (r"H100.*96 ?GB.*", "H100-96GB-HBM2e"),
    (r"H100.*(PCI|NVL).*", "H100-PCIe"),
    (r"H100.*", "H100-80GB-SXM"),
    (r"H200.*", "H200"),
    (r"GB300.*", "GB300-NVL72"),
    (r"GB200.*", "GB200-NVL72"),
    (r"B300.*", "B300"),
    (r"B200.*", "B200"),
    (r"RTX.*(PRO.*6000|6000.*PRO).*", "RTX-PRO-6000-Server"),
    (r"(GeForce )?RTX[- ]?(3090|4090|5090).*", r"RTX-\2"),
    (r"L40S.*", "L40S"),
    (r"L4", "L4"),
    (r"A10G?", "A10G"),
    (r"V100.*", "V100-SXM-32GB"),
    (r"MI300X.*", "MI300X"),
    (r"MI250X?.*", "MI250X-GCD"),
)
"""Pattern of a device's name in tables, without its maker's -> its name in the catalog, or the nearest one's."""

EXACT = {
    "A100-SXM", "A100-80GB-SXM (Selene)", "A100-80GB 330W hybrid cube mesh", "MI250X one GCD",
}  # fmt: skip
"""Names that mean a device of the catalog without a doubt, beside the catalog's own and its aliases."""

RATE = re.compile(r"(?:(\d+)\s*[xX]\s*)?(\d+(?:\.\d+)?)\s*([GT])(b|B)(?:it)?(?:/s|ps)", re.IGNORECASE)
"""Bandwidth in a network's text: a count, a number, its unit; "b" are bits and "B" bytes."""
OTHERS = ("RoCE", "EFA", "Ethernet", "Slingshot")
"""Networks that are not InfiniBand, and whose share of the bandwidth was not measured."""
CARDS = (("pytorch/ao", {"H100-80GB-SXM": "H100-96GB-HBM2e"}),)
"""Words of a source -> device as its rows name it -> the card that it had. torchao's rows run torchtitan, whose own
pages name the card (500 W, HBM2e) and measure as many tokens per second on it."""
LIMITED = "power limited"
"""Words in a row's notes that its devices draw less power than usual."""
PORTS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Generation of InfiniBand -> Gb/s of a port."""


def cluster_of(row: Row, assumed: list[str]) -> Cluster:
    """The devices, and the network that the row names, else the usual one. Raises `UserError` for devices that are
    not in the catalog nor near one of it, or have no constants."""
    text, near = str(row.get("gpu")), next((one for words, one in CARDS if words in str(row.get("source")).lower()), {})
    if text in near:
        assumed.append(f"{text}: the card of {near[text]}, which the source does not name")
    entry = _device(near.get(text, text), assumed)
    if entry.device.name not in known_devices():
        raise UserError(f"device {row.get('gpu')} has no constants of time")
    gpus = whole(row, "gpus")
    usual = 72 if "NVL72" in entry.device.name else 8
    per_node = min(gpus, whole(row, "gpus_per_node", usual))
    if per_node == 72 or (usual == 72 and gpus > 64):
        # Jobs on NVL72 racks use 64 of the 72 GPUs, where degrees are powers of two.
        per_node = 64
    nodes = -(-gpus // per_node)
    device = entry.device
    if LIMITED in str(row.get("notes", "")).lower():
        assumed.append("a lower power limit, not stated: 5/7 of the usual power, as the H100 of the same source")
        # Power grows about as the clock's square near the limit.
        device = replace(device, peak_flops={dtype: rate * sqrt(5 / 7) for dtype, rate in device.peak_flops.items()})
    network = network_of(str(row.get("inter_node") or ""), entry.inter, per_node, nodes, assumed)
    return Cluster(nodes, per_node, device, entry.intra, network)


def _device(text: str, assumed: list[str]) -> Accelerator:
    name = re.sub(r"^(NVIDIA|AMD|Tesla|DGX|HGX|Instinct)[- ]", "", re.sub(r"^(NVIDIA|AMD) ", "", text.strip()))
    if any(name.lower() == known.lower() for known in catalog.names()):
        return catalog.lookup(name)
    for pattern, near in NEAR:
        if match := re.fullmatch(pattern, name, re.IGNORECASE):
            entry = catalog.lookup(match.expand(near))
            if name not in EXACT:
                assumed.append(f"device {text} taken as {entry.device.name}")
            return entry
    raise UserError(f"device {text} is not in the catalog")


def network_of(text: str, usual: Link, per_node: int, nodes: int, assumed: list[str]) -> Link:
    """The network of a text, such as "8x200Gb/s HDR IB per node" or "400 Gb/s RDMA per GPU", as a link of one device;
    the usual one where there is no text, and where it cannot be read, which is then among what was assumed."""
    if not text or nodes == 1:
        return usual
    if bandwidth := _bandwidth(text, per_node, assumed):
        if other := next((name for name in OTHERS if name.lower() in text.lower()), None):
            assumed.append(f"{other}: as large a share of its bandwidth is reached as of InfiniBand's")
        kind = "omni-path" if "omni-path" in text.lower() else "network"
        return replace(usual, bandwidth=bandwidth, source=f"{text}, from the row", kind=kind)
    assumed.append(f"network {text!r} not known: {usual.source}")
    return usual


def _bandwidth(text: str, per_node: int, assumed: list[str]) -> float | None:
    found = RATE.search(text)
    if found is None:
        port = next((rate for name, rate in PORTS.items() if name in text.upper()), None)
        if port is None:
            return None
        assumed.append(f"network {text!r}: one port of {port} Gb/s a GPU")
        return port * 1e9 / 8
    count, number, scale, unit = found.groups()
    whole_rate = int(count or 1) * float(number) * (1e12 if scale in "Tt" else 1e9) / (8 if unit == "b" else 1)
    apart = re.search(r"(per|/|a|each)\s*(GPU|device|card|port)", text, re.IGNORECASE)
    shared = count or re.search(r"(per|/|a|each)\s*(node|host|server)", text, re.IGNORECASE)
    if not apart and not shared:
        assumed.append(f"network {text!r}: of {'a GPU' if whole_rate <= 50e9 else 'a node'}")
    return whole_rate if apart or (not shared and whole_rate <= 50e9) else whole_rate / per_node
