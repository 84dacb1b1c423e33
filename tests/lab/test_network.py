"""Hosts of the lab: bandwidth, latency, bytes, and nothing left behind."""

import subprocess
import sys
import time

import pytest

from harness.cases import table
from harness.hosts import namespaces
from harness.processes import alive
from shardwise.lab.link import LabLink
from shardwise.lab.network import LabNetwork, lab_network

pytestmark = pytest.mark.usefixtures("several_hosts")
LIMIT = 60
SERVER = """
import socket
one, _ = socket.create_server(("", 5000)).accept()
while word := one.recv(1 << 16):
    one.sendall(word[:1])
"""
CLIENT = table(__file__, "CLIENT")
PING = CLIENT + "one.sendall(b'x'); one.recv(1); print(time.monotonic() - started)"
SEND = (
    CLIENT
    + """
size = int(sys.argv[1])
one.sendall(bytes(size))
one.shutdown(socket.SHUT_WR)
while one.recv(1 << 16):
    pass
print(size / (time.monotonic() - started))
"""
)


def between(network: LabNetwork, client: str, *words: str) -> float:
    """The number that a client on the second host prints, which talks to a server on the first."""
    first, second = network.hosts[:2]
    server = subprocess.Popen([*first.enter, sys.executable, "-c", SERVER])
    try:
        done = subprocess.run(
            [*second.enter, sys.executable, "-c", client, *words],
            capture_output=True, text=True, check=True, timeout=LIMIT,
        )  # fmt: skip
    finally:
        server.kill()
        server.wait()
    return float(done.stdout)


def test_a_link_lets_no_more_through_than_its_bandwidth() -> None:
    size = 8_000_000
    with lab_network([LabLink.parse("50Mb/s")] * 2) as network:
        assert between(network, SEND, str(size)) <= 1.1 * 50e6 / 8
        first, second = network.traffic()
    # Frames have headers, and acknowledgments go back.
    assert size <= second.sent <= 1.1 * size and first.received == pytest.approx(second.sent, rel=0.01)
    assert second.received < 0.1 * size
    assert namespaces() == []


@pytest.mark.parametrize("text", ["100Mb/s,latency=20ms", "50Mb/s,latency=20ms,loss=1%"])
def test_a_message_and_its_answer_take_twice_the_latency(text: str) -> None:
    with lab_network([LabLink.parse(text)] * 2) as network:
        assert between(network, PING) >= 2 * 0.020
    assert namespaces() == []


def test_frames_of_every_length_pass_the_relay() -> None:
    with lab_network([LabLink.parse("50Mb/s,latency=1ms,loss=0.5%")] * 3) as network:
        assert between(network, SEND, "1000000") > 0
        second = network.traffic()[1]
    assert second.sent >= 1_000_000  # what is lost is sent again


def test_what_a_killed_lab_has_left_is_removed_by_the_next() -> None:
    program = """if True:
        import os, subprocess
        from shardwise.lab.link import LabLink
        from shardwise.lab.network import lab_network
        with lab_network([LabLink(1e8, 0.001)] * 2) as network:
            sleep = [*network.hosts[1].enter, "sh", "-c", "echo; exec sleep 100"]
            subprocess.Popen(sleep, stdout=subprocess.PIPE).stdout.readline()  # it has entered the host
            for name in (network.hosts[1].name, network.hosts[1].name.replace("node1", "switch")):
                subprocess.run(["ip", "netns", "pids", name])
            os.kill(os.getpid(), 9)
    """
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    relay_and_sleep = [int(word) for word in killed.communicate(timeout=LIMIT)[0].split()]
    assert len(relay_and_sleep) == 2
    with lab_network([LabLink(1e8)] * 2):
        assert len(namespaces()) == 3 and namespaces(killed.pid) == []
    deadline = time.monotonic() + 5
    while any(map(alive, relay_and_sleep)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert namespaces() == [] and not any(map(alive, relay_and_sleep))
