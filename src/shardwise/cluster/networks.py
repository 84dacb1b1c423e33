"""Networks between nodes as people name them: `--network 100Gb`, "8x400Gb", "NDR", "RoCE 400Gb", "EFA".

A speed alone is one NIC of each node, which its devices share; a number before it counts a node's NICs. The generations
of InfiniBand (HDR, NDR) are one port per device, as their machines have them. A cloud's network is its machines'.
"""

import re
from math import ceil

from shardwise.cluster.catalog import KnownNetwork, accelerators
from shardwise.cluster.device import Link
from shardwise.errors import UserError, did_you_mean

MOST_GBITS = 1e6
"""Gb/s beyond which no NIC sends."""
MOST_NIC = 800.0
"""Gb/s of the fastest NIC (XDR InfiniBand, 800 Gb/s Ethernet)."""
MOST_NICS = 1024
MOST_TEXT = 60
"""Characters of a network's name."""

EXAMPLES = "100Gb (a node's), 8x400Gb (NICs of a node), 50GB/s, 400Gb per device, NDR, RoCE 400Gb, EFA-p5"

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGTkmgt])\s*([bB](?:it)?s?)?(E)?\s*(/\s*s(?:ec)?|ps)?(?![a-zA-Z])")
_COUNT = re.compile(r"(?<![\w.])(\d{1,9})\s*[x\u00d7*]\s*")
_NODES = ("node", "host", "server", "machine")
_PER = re.compile(r"(?:per|/|a|each)\s*(gpu|device|accelerator|node|host|server|machine|port|nic)\b", re.IGNORECASE)
_TRANSPORTS = ("infiniband", "ib", "rocev2", "roce2", "roce", "ethernet", "eth", "rdma", "tcp", "network")
_IDLE = (*_TRANSPORTS, "efa", "aws", "ec2", "of", "on", "the", "nic", "nics", "port", "ports", "with")
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def network_of(text: str, device: str, per_node: int) -> tuple[Link, int]:
    """The link between nodes that a text names, and the NICs of a node, each as fast as the link; 0 for one per device.

    device: its name in the catalog, which decides what "EFA" is. per_node: devices of a node. Raises `UserError` in one
    line for a text that names none.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"network {_short(text)!r}...: write {EXAMPLES}")
    count = _COUNT.search(text)
    rest = _COUNT.sub(" ", text, count=1)
    per = _PER.search(rest)
    rest = _PER.sub(" ", rest)
    rate = _RATE.search(rest)
    known = _named(text, _RATE.sub(" ", rest, count=1), device)
    if rate is None and known is None:
        raise UserError(f"network {_short(text)!r}: how fast is it? Write {EXAMPLES}")
    gbits = _gbits(text, rate) if rate else known.gbits if known else 0.0
    nics = known.nics if known and not (rate and known.devices) else 1
    if per:
        nics = nics or 1 if per[1].lower() in _NODES else 0
    if count:
        nics = int(count[1])
        if not 1 <= nics <= MOST_NICS:
            raise UserError(f"network {_short(text)!r}: a node has 1 to {MOST_NICS:,} NICs, not {nics:,}")
    if nics == 1 and not count and gbits > MOST_NIC:  # a node's speed, of several NICs together
        nics = ceil(gbits / MOST_NIC)
        gbits /= nics
    # Several NICs of one device work together.
    bandwidth = gbits * 1e9 / 8 * max(1.0, nics / per_node)
    kind, name = known.kind if known else "network", " ".join(text.split())
    source = f"--network {name}" + (f": {known.source}" if known and not rate else "")
    return Link(None, bandwidth, source, kind=kind, name=name), nics if nics < per_node else 0


def _named(text: str, rest: str, device: str) -> KnownNetwork | None:
    """The network of what is left of a text without its numbers; None where only words without a speed are left.
    Raises `UserError` for other words, and for "EFA" where the device's machines have none."""
    table = accelerators()
    names = {_plain(name): name for name in table.networks}
    names |= {_plain(alias): name for alias, name in table.network_aliases.items()}
    words = re.findall(r"[a-z0-9]+", re.sub(r"\.\d*xlarge|\.metal", " ", rest.lower()))
    word = "".join(word for word in words if word not in _IDLE)
    if name := names.get(word) or names.get("efa" + word):
        return table.networks[name]
    if word:
        hint = did_you_mean(_short(rest.strip()), table.networks, "known are")
        raise UserError(f"network {_short(text)!r}: no network of that name; {hint}; or write {EXAMPLES}")
    if "efa" not in words:
        return None
    for network in table.networks.values():
        if device in network.devices:
            return network
    machines = ", ".join(name for name, network in table.networks.items() if network.devices)
    raise UserError(f"network {_short(text)!r}: which machines? None with {device} is known; write one of {machines}")


def _short(text: str) -> str:
    return text.strip()[:60]


def _gbits(text: str, rate: re.Match[str]) -> float:
    number, scale, unit, ethernet, second = rate.groups()
    in_bytes = (unit or "").startswith("B") and not ethernet
    if in_bytes and not second:
        raise UserError(f"network {_short(text)!r}: write {number}{scale}b for bits or {number}{scale}B/s for bytes")
    gbits = float(number) * _UNITS[scale.upper()] * (8 if in_bytes else 1) / 1e9
    if not 1e-3 <= gbits <= MOST_GBITS:
        raise UserError(f"network {_short(text)!r}: give a speed from 1Mb to {MOST_GBITS / 1e3:,.0f}Tb")
    return gbits


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
