"""A switch of the lab in Python: forwards frames between ports, each after a delay, and drops some.

`python -m shardwise.lab.relay '[{port, latency, loss}, ...]'` runs in the switch's namespace, where the kernel has no
`netem`. It reads every frame of a port as the kernel has it, with the header of segmentation offload, so that one call
carries up to 64 KB. It writes a line when it is ready, and ends when its standard input does. Loss is per frame: the
network keeps frames single where links have some.
"""

import json
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
"""SOL_PACKET, PACKET_VNET_HDR and PACKET_IGNORE_OUTGOING of linux/if_packet.h."""
_RECEIVE_BUFFER, _SEND_BUFFER = 33, 32
"""SO_RCVBUFFORCE and SO_SNDBUFFORCE: frames wait in the queues of `tbf`, not here."""
_BUFFER = 64 << 20
_HEADER = 10
_LARGEST = _HEADER + (1 << 16) + 256
_BATCH = 64
"""Frames of a port that are read before others have their turn."""


@dataclass
class Port:
    """One port: its socket, and frames under way from it, oldest first, each with the time when it is due."""

    socket: socket.socket
    latency: float
    loss: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


def open_port(interface: str) -> socket.socket:
    """A socket for every frame that arrives at an interface, and for sending."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    port.setsockopt(_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_RECEIVE_BUFFER, _SEND_BUFFER):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def receive(port: Port) -> None:
    """Take what has arrived at a port, less what is lost."""
    for _ in range(_BATCH):
        try:
            frame = port.socket.recv(_LARGEST)
        except BlockingIOError:
            return
        if not port.loss or random.random() >= port.loss:
            port.waiting.append((time.monotonic() + port.latency, frame))


def forward(port: Port, ports: list[Port], homes: dict[bytes, Port], now: float) -> None:
    """Send what is due, to the port behind which its destination is, or to all others."""
    while port.waiting and port.waiting[0][0] <= now:
        frame = port.waiting.popleft()[1]
        target, source = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
        homes[source] = port
        targets: Iterable[Port] = [homes[target]] if target in homes else [item for item in ports if item is not port]
        for item in targets:
            with suppress(OSError):  # its queue is full: a switch drops the frame
                item.socket.send(frame)


def run(ports: list[Port]) -> None:
    """Forward until standard input ends."""
    homes: dict[bytes, Port] = {}
    by_number = {port.socket.fileno(): port for port in ports}
    inputs = [sys.stdin.fileno(), *by_number]
    while True:
        due = min((port.waiting[0][0] for port in ports if port.waiting), default=None)
        limit = None if due is None else max(0.0, due - time.monotonic())
        for number in select.select(inputs, [], [], limit)[0]:
            if number not in by_number:
                return
            receive(by_number[number])
        now = time.monotonic()
        for port in ports:
            forward(port, ports, homes, now)


if __name__ == "__main__":
    made = [Port(open_port(item["port"]), item["latency"], item["loss"]) for item in json.loads(sys.argv[1])]
    print("ready", flush=True)
    run(made)
