"""How a server ends, on a double of the engine: signals, patience that runs out, a failed engine; and addresses."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_double import EngineDouble, front_of

from shardwise.errors import UserError
from shardwise.runtime.job.launch import RunFailed
from shardwise.serving.http import server
from shardwise.serving.http.generation import Front


class Clients:
    """Requests from threads of their own; what came of each: (status, body)."""

    def __init__(self, port: int, front: Front) -> None:
        self.port, self.front = port, front
        self.answers: dict[str, tuple[int, str]] = {}
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, **body: Any) -> None:
        def work() -> None:
            way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            way.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = way.getresponse()
            self.answers[name] = response.status, response.read().decode()
            way.close()

        thread = threading.Thread(target=work)
        thread.start()
        self._threads.append(thread)

    def running(self, count: int) -> None:
        """Wait until so many sequences are open, and tokens have come."""
        deadline = time.monotonic() + 10
        while self.front.open < count or not self.front.metrics.generated_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


def run(folder: Path, story: Callable[[Clients, EngineDouble], None], grace: float = 10.0) -> tuple[Clients, list[str]]:
    """Serve in the main thread, as the command does, while `story` happens in another: (its clients, lines said)."""
    engine = EngineDouble(pause=0.01)
    front, app = front_of(engine, folder)
    sock = server.bind("127.0.0.1", 0)
    clients, lines = Clients(sock.getsockname()[1], front), []
    over = threading.Event()

    def tell() -> None:
        try:
            story(clients, engine)
        finally:
            # A story that came to nothing would leave the server running for ever.
            if not over.wait(30):
                kill(signal.SIGTERM)

    teller = threading.Thread(target=tell)
    try:
        server.run(app, front, sock, grace=grace, ready=teller.start, echo=lines.append)
    finally:
        over.set()
        teller.join(30)
        clients.join()
        engine.close()
    return clients, lines


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_what_runs_finish_and_nothing_new_begin(tmp_path, number, heeded):
    def story(clients: Clients, engine: EngineDouble) -> None:
        clients.ask("stream", prompt="ab", max_tokens=30, stream=True)
        clients.ask("whole", prompt="ab", max_tokens=30)
        clients.running(2)
        kill(number)
        deadline = time.monotonic() + 10
        while not clients.front.stopping and time.monotonic() < deadline:
            time.sleep(0.005)
        clients.ask("late", prompt="ab")

    clients, lines = run(tmp_path, story)
    assert clients.answers["stream"][0] == 200 and clients.answers["stream"][1].endswith("data: [DONE]\n\n")
    assert json.loads(clients.answers["whole"][1])["choices"][0]["text"] == "ab" * 15
    assert clients.answers["late"][0] == 503 and "stopping" in clients.answers["late"][1]
    (line,) = lines
    assert line.startswith(signal.Signals(number).name) and "2 running request(s)" in line


def test_patience_ends_and_clients_hear_it(tmp_path):
    def story(clients: Clients, engine: EngineDouble) -> None:
        clients.ask("stream", prompt="ab", max_tokens=190, stream=True)
        clients.ask("whole", prompt="ab", max_tokens=190)
        clients.running(2)
        engine.hold = True
        kill(signal.SIGTERM)

    clients, _ = run(tmp_path, story, grace=0.1)
    last = json.loads(clients.answers["stream"][1].removesuffix("\n\n").rpartition("data: ")[2])
    assert clients.answers["stream"][0] == 200 and "before the answer was complete" in last["error"]["message"]
    assert clients.answers["whole"][0] == 503 and "before the answer was complete" in clients.answers["whole"][1]


def test_clients_that_do_nothing_are_not_waited_for_in_many_words(tmp_path, capfd):
    ways = []

    def story(clients: Clients, engine: EngineDouble) -> None:
        ways.append(socket.create_connection(("127.0.0.1", clients.port)))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        ways.append(socket.create_connection(("127.0.0.1", clients.port)))
        ways[-1].sendall(head)
        # An answer to a later request says that the server has seen the earlier one.
        clients.ask("whole", prompt="ab", max_tokens=1)
        clients.join()
        kill(signal.SIGTERM)

    run(tmp_path, story)
    assert capfd.readouterr().err == ""
    for way in ways:
        way.close()


def test_who_is_still_reading_a_request_refuses_it_in_the_form_of_all_errors(tmp_path):
    ways = []

    def story(clients: Clients, engine: EngineDouble) -> None:
        kind = b"content-type: application/json"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + kind + b"\r\ncontent-length: 100\r\n\r\n{"
        for _ in range(2):
            ways.append(socket.create_connection(("127.0.0.1", clients.port), timeout=30))
            ways[-1].sendall(head)
        while len(clients.front.readers) < 2:
            time.sleep(0.005)
        kill(signal.SIGTERM)
        while not clients.front.stopping:
            time.sleep(0.005)
        ways[0].sendall(b'"prompt": "ab"}'.ljust(99))  # one comes in time, the other never

    clients, _ = run(tmp_path, story, grace=0.5)
    for way in ways:
        response = http.client.HTTPResponse(way)
        response.begin()
        assert response.status == 503 and json.loads(response.read())["error"]["code"] == "stopping"
        way.close()
    assert not clients.front.readers


def test_signals_do_afterwards_what_they_did_before(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(tmp_path, lambda clients, engine: (kill(signal.SIGHUP), kill(signal.SIGTERM)))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_ends_the_patience(tmp_path):
    def story(clients: Clients, engine: EngineDouble) -> None:
        clients.ask("whole", prompt="ab", max_tokens=190)
        clients.running(1)
        engine.hold = True
        kill(signal.SIGTERM)
        while not clients.front.stopping:
            time.sleep(0.005)
        kill(signal.SIGTERM)

    clients, _ = run(tmp_path, story, grace=1000)
    assert clients.answers["whole"][0] == 503


def test_an_engine_that_fails_ends_the_server_with_its_reason(tmp_path):
    heard = []

    def story(clients: Clients, engine: EngineDouble) -> None:
        clients.ask("stream", prompt="ab", max_tokens=190, stream=True)
        clients.ask("whole", prompt="ab", max_tokens=190)
        clients.running(2)
        engine.fail("rank 1 was killed by SIGKILL")
        clients.join()
        heard.append(clients.answers)

    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL"):
        run(tmp_path, story)
    (answers,) = heard
    assert answers["whole"][0] == 500 and "SIGKILL" in answers["whole"][1] and "SIGKILL" in answers["stream"][1]


def test_addresses_that_cannot_be_had():
    with server.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert server.url_of(taken) == f"http://127.0.0.1:{port}"
        taken.listen()
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port} cannot be used .*--port"):
            server.bind("127.0.0.1", port)
    for host, port, words in (("127.0.0.1", 70000, "port 70000 does not exist"), ("203.0.113.7", 0, "cannot be used")):
        with pytest.raises(UserError, match=words):
            server.bind(host, port)
    for host in ("no such host", "a..b", "x" * 64):
        with pytest.raises(UserError, match="is no address"):
            server.bind(host, 0)


def test_nobody_else_gets_an_address_while_weights_are_read(tmp_path):
    """Nor does the next server have to wait for connections of the last one, which linger."""
    with server.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(UserError, match="cannot be used"):
            server.bind("127.0.0.1", port)

    def story(clients: Clients, engine: EngineDouble) -> None:
        with socket.create_connection(("127.0.0.1", clients.port)) as client:
            kill(signal.SIGTERM)
            client.recv(1)  # the server has closed its end, which lingers

    clients, _ = run(tmp_path, story)
    server.bind("127.0.0.1", clients.port).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_written_in_brackets():
    try:
        sock = server.bind("::1", 0)
    except UserError:
        pytest.skip("no IPv6 loopback here")
    with sock:
        assert server.url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"
