"""A link between a host and the switch, as text: 1Gb/s,latency=5ms,loss=0.1%."""

import re
from dataclasses import dataclass, replace
from typing import Self

from shardwise.cluster import Cluster, Link
from shardwise.errors import UserError, did_you_mean
from shardwise.schedule.pipeline.times import seconds_of

EXAMPLE = "such as 1Gb/s or 100Mb/s,latency=5ms,loss=0.1%"
LEAST, MOST = 1e6, 100e9
"""Limits of the bandwidth, in bits/s: a queue of fewer bits cannot hold a frame, and no machine carries more."""
MOST_LATENCY = 2.0
FRAME, SEGMENT = 1514, 1448
"""Bytes of a whole frame, and of what it carries beside the headers of Ethernet, IP and TCP with time stamps."""
_BANDWIDTH = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([kMG])(b|bit|bps|B)(?:/s)?")
_LOSS = re.compile(r"(\d{1,2}(?:\.\d{1,6})?)\s*%")
_SCALE = {"k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class LabLink:
    """One host's link to the switch, equal in both directions."""

    bandwidth: float
    """Bits per second, each way."""
    latency: float = 0.0
    """Seconds that a frame of this host takes to any other host, besides its transmission."""
    loss: float = 0.0
    """Share of this host's frames that never arrive."""

    @property
    def payload(self) -> float:
        """Bytes per second that TCP carries over it, each way."""
        return self.bandwidth / 8 * SEGMENT / FRAME

    @property
    def plain(self) -> bool:
        """Whether it has a bandwidth alone."""
        return not (self.latency or self.loss)

    def __str__(self) -> str:
        scale, unit = (1e9, "Gb/s") if self.bandwidth >= 1e9 else (1e6, "Mb/s")
        latency = f",latency={self.latency * 1e3:g}ms" if self.latency else ""
        return f"{self.bandwidth / scale:g}{unit}{latency}" + (f",loss={self.loss * 100:g}%" if self.loss else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read BANDWIDTH[,latency=TIME][,loss=PERCENT]. Raises `UserError` with an example."""
        bandwidth, *rest = (word.strip() for word in text.split(","))
        values = {"latency": 0.0, "loss": 0.0}
        for word in rest:
            name, _, value = word.partition("=")
            if name not in values:
                hint = did_you_mean(name, values, "keys:")
                raise UserError(f"--link {text}: {word!r} is neither latency=TIME nor loss=PERCENT; {hint}; {EXAMPLE}")
            values[name] = _latency(text, value) if name == "latency" else _loss(text, value)
        return cls(_bits(text, bandwidth), **values)


def _bits(text: str, word: str) -> float:
    match = _BANDWIDTH.fullmatch(word)
    if not match:
        raise UserError(f"--link {text}: {word!r} is no bandwidth; give bits per second, {EXAMPLE}")
    bits = float(match[1]) * _SCALE[match[2]] * (8 if match[3] == "B" else 1)
    if not LEAST <= bits <= MOST:
        raise UserError(f"--link {text}: give a bandwidth from {LEAST / 1e6:g}Mb/s to {MOST / 1e9:g}Gb/s, {EXAMPLE}")
    return bits


def _latency(text: str, word: str) -> float:
    try:
        seconds = seconds_of(word)
    except UserError:
        seconds = MOST_LATENCY + 1
    if seconds > MOST_LATENCY:
        raise UserError(f"--link {text}: give a latency of at most {MOST_LATENCY:g}s, {EXAMPLE}")
    return seconds


def _loss(text: str, word: str) -> float:
    match = _LOSS.fullmatch(word)
    if not match or float(match[1]) > 50:
        raise UserError(f"--link {text}: give a loss from 0% to 50%, {EXAMPLE}")
    return float(match[1]) / 100


def lab_cluster(machine: Cluster, links: list[LabLink]) -> Cluster:
    """Hosts as nodes with one NIC each, and as many ranks together as measured this machine at once.

    machine: as `calibrate device --ranks N --transport gloo` writes it. Raises `UserError` when it is no CPU, or its
    ranks cannot be spread over the hosts.
    """
    if machine.device.kind != "cpu":
        raise UserError("the lab's ranks compute on this machine's cores: give --cluster a file of `calibrate device`")
    hosts, slowest = len(links), min(links, key=lambda link: link.bandwidth)
    ranks, rest = divmod(machine.devices, hosts)
    if rest:
        raise UserError(
            f"--cluster describes {machine.devices} ranks, which {hosts} hosts cannot share evenly: calibrate with "
            f"--ranks {hosts * max(1, ranks)}"
        )
    alpha = (machine.intra.alpha or 0.0) + max(link.latency for link in links)
    source = f"a lab's link of {slowest}; latency of a message inside a host added"
    between = Link(alpha, slowest.payload, source, kind="network")
    return replace(machine.without_paths(), nodes=hosts, devices_per_node=ranks, inter=between, nics=1)
