"""Hosts as network namespaces behind a switch, which is one more namespace: made, counted and removed again.

Each host has one interface, a `veth` whose other end is a port of the switch. `tbf` on both ends holds the bandwidth in
both directions, so that several senders to one host queue at its port. Latency and loss are `netem`'s on the ports
where the kernel has it, else the relay's (`relay.py`), which then forwards in place of the kernel's bridge.

How a host's TCP sends does not depend on the machine's settings: they differ from one to the next, and with them what
a collective takes.

Names carry the process id of their maker and its start time: what a killed one has left is removed by the next.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import UserError
from shardwise.lab.link import SEGMENT, LabLink
from shardwise.runtime.job.hosts import LaunchHost

INTERFACE = "eth0"
MOST_HOSTS = 8
RELAY_MOST, RELAY_MOST_LOSS = 2e9, 200e6
"""Bits/s that the relay carries, all hosts together, beside ranks that compute: about half of what it carries alone.
The second is with loss, where every packet comes alone (docs/lab.md)."""
_PREFIX = "shardwise-lab"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\w+")
_NAMESPACES = Path("/run/netns")
_QUEUE = "400ms"
"""How long a frame waits at most for its transmission before it is dropped."""
_BURST_SECONDS, _BURST_LEAST = 0.002, 128 << 10
_UNSENT_SECONDS, _UNSENT_LEAST = 0.0013, 16 << 10
"""What a connection may have queued at its host's port, in seconds of the link, and in bytes. A longer queue delays the
small messages by which gloo's ranks agree that a large one may come; network cards hold it as short."""
_MOST_SEGMENTS = 44
"""Packets that the kernel hands over at once, 64 KiB."""
_ADDRESS = "10.77.0.{}"


class PortBytes(NamedTuple):
    """Bytes that crossed a host's port, as its interface counted them, frame headers included."""

    sent: int
    received: int


class LabNetwork(NamedTuple):
    """Hosts that are up."""

    hosts: tuple[LaunchHost, ...]
    links: tuple[LabLink, ...]
    relayed: bool
    """Whether the relay carries the frames."""

    def traffic(self) -> list[PortBytes]:
        counts = []
        for host in self.hosts:
            (shown,) = json.loads(_run("ip", "-n", host.name, "-j", "-s", "link", "show", "dev", INTERFACE))
            stats = shown["stats64"]
            counts.append(PortBytes(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return counts


@contextmanager
def lab_network(links: list[LabLink]) -> Iterator[LabNetwork]:
    """As many hosts as links, until the end of the block, when every process in them is killed.

    Raises `UserError` where this machine allows no network namespaces, and for links that it cannot carry.
    """
    check_allowed()
    remove_abandoned()
    prefix = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}"
    switch, names = f"{prefix}-switch", [f"{prefix}-node{node}" for node in range(len(links))]
    relay = None
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        shaped = any(not link.plain for link in links)
        relayed = shaped and not _has_netem(switch)
        if relayed:
            check_relay(links)
        for node, (name, link) in enumerate(zip(names, links, strict=True)):
            _connect(switch, name, node, link, single=relayed and any(link.loss for link in links))
            # a host's TCP as in a cluster's own network: its connections keep their rate while they wait, and queue
            # little
            settings = {"congestion_control": "reno", "slow_start_after_idle": 0, "limit_output_bytes": _unsent(link)}
            words = "; ".join(f"echo {value} > /proc/sys/net/ipv4/tcp_{setting}" for setting, value in settings.items())
            _run("ip", "netns", "exec", name, "sh", "-ec", words)
            if shaped and not relayed:
                _shape(name, link)
        if relayed:
            relay = _start_relay(switch, links)
        else:
            _bridge(switch, len(links))
        yield LabNetwork(tuple(_host(name, node) for node, name in enumerate(names)), tuple(links), relayed)
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for name in (*names, switch):
            remove(name)


def check_allowed() -> None:
    """Raise `UserError` where this process may not make network namespaces, and say what is missing."""
    if not sys.platform.startswith("linux"):
        raise UserError("the lab needs Linux's network namespaces")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(f"the lab needs {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise UserError("the lab needs root for network namespaces: run it with sudo, or in a privileged container")


def check_relay(links: list[LabLink]) -> None:
    """Raise `UserError` for more bandwidth than the relay carries."""
    most, what = (RELAY_MOST_LOSS, "loss") if any(link.loss for link in links) else (RELAY_MOST, "latency")
    total = sum(link.bandwidth for link in links)
    if total > most:
        raise UserError(
            f"the relay carries at most {LabLink(most)} with {what} (this kernel has no netem), and the hosts' links "
            f"are {LabLink(total)} together: give --link {LabLink(most / len(links))},..., or bandwidth alone"
        )


def remove_abandoned() -> None:
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        match = _NAME.fullmatch(path.name)
        if match and _started(int(match[1])) != int(match[2]):
            remove(path.name)


def remove(name: str) -> None:
    """Kill every process in a namespace and remove it; its ends of links go with it."""
    for pid in _run("ip", "netns", "pids", name, check=False).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", name, check=False)


def _started(pid: int) -> int | None:
    """Start time of a process, in the kernel's ticks; None when there is none, or only what its parent did not reap."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _host(name: str, node: int) -> LaunchHost:
    return LaunchHost(name, _ADDRESS.format(node + 1), INTERFACE, ("ip", "netns", "exec", name))


def _port(node: int) -> str:
    return f"port{node}"


def _connect(switch: str, name: str, node: int, link: LabLink, *, single: bool) -> None:
    """The link of a host. single: the kernel hands over packets one by one, as a wire has them."""
    size = ("gso_max_segs", "1" if single else str(min(_MOST_SEGMENTS, _unsent(link) // SEGMENT)))
    ends = [(name, INTERFACE), (switch, _port(node))]
    _run("ip", "link", "add", INTERFACE, "netns", name, *size, "type", "veth", "peer", _port(node), "netns", switch)
    _run("ip", "-n", name, "addr", "add", f"{_ADDRESS.format(node + 1)}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    burst = max(_BURST_LEAST, round(link.bandwidth / 8 * _BURST_SECONDS))
    for space, end in ends:
        # Without IPv6 nothing crosses a port but what the ranks send; a kernel that has none refuses this.
        _run("ip", "-n", space, "link", "set", end, "addrgenmode", "none", check=False)
        _run("ip", "-n", space, "link", "set", end, "up")
        rate = ("rate", f"{link.bandwidth:.0f}bit", "burst", str(burst), "latency", _QUEUE)
        _run("tc", "-n", space, "qdisc", "add", "dev", end, "root", "handle", "1:", "tbf", *rate)


def _unsent(link: LabLink) -> int:
    return max(_UNSENT_LEAST, round(link.bandwidth / 8 * _UNSENT_SECONDS))


def _bridge(switch: str, hosts: int) -> None:
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for node in range(hosts):
        _run("ip", "-n", switch, "link", "set", _port(node), "master", "bridge")


def _has_netem(switch: str) -> bool:
    added = ("tc", "-n", switch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    if subprocess.run(added, capture_output=True, check=False).returncode:
        return False
    _run("tc", "-n", switch, "qdisc", "del", "dev", "lo", "root")
    return True


def _shape(name: str, link: LabLink) -> None:
    """Delay and drop what a host sends, by a queue inside the one that holds its bandwidth."""
    words = ("delay", f"{link.latency * 1e6:.0f}us", "loss", f"{link.loss * 100:g}%", "limit", "100000")
    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "parent", "1:1", "handle", "10:", "netem", *words)


def _start_relay(switch: str, links: list[LabLink]) -> subprocess.Popen[str]:
    ports = [{"port": _port(node), "latency": link.latency, "loss": link.loss} for node, link in enumerate(links)]
    relay = subprocess.Popen(
        ["ip", "netns", "exec", switch, sys.executable, "-m", "shardwise.lab.relay", json.dumps(ports)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert relay.stdout is not None
    if relay.stdout.readline() != "ready\n":
        relay.kill()
        relay.wait()
        raise UserError("the relay of the lab's switch did not start; what it says is above")
    return relay


def _run(*words: str, check: bool = True) -> str:
    """Output of a command, which a signal to this process's group does not reach. Raises `UserError` if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True, check=False)
    if check and done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"the kernel refuses `{' '.join(words)}` ({said}): the lab needs the capabilities NET_ADMIN and SYS_ADMIN, "
            "as in docker run --privileged"
        )
    return done.stdout
