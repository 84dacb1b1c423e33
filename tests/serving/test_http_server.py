import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from described_requests import ANYTHING, ASKED, DESCRIBED, changed, is_described, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_double import MODEL, EngineDouble, Running, front_of, serving

from shardwise import __version__
from shardwise.errors import UserError
from shardwise.serving.http import server
from shardwise.serving.http.bodies import description
from shardwise.serving.http.connections import MOST, RESERVED, ConnectionLimits, connection_limit
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


# -- Clients that open connections and say nothing, or little, or read nothing: others are answered all the same


HALF = b"GET /health HTTP/1.1\r\nhost: x\r\n"
BUSY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
LONG = 60.0


@contextmanager
def crowd(server: Running, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets = []
        for _ in range(count):
            way = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            way.sendall(data)
            sockets.append(way)
        yield sockets


def readers(server: Running, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(server.front.readers) != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended(way: socket.socket) -> bytes:
    """What a connection gives until its end, which comes without the client's doing."""
    received = b""
    try:
        while part := way.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_half_open_connections_make_way_for_others_the_oldest_first(tmp_path: Path) -> None:
    limits = ConnectionLimits(connections=20, header_seconds=LONG)
    with serving(tmp_path, limits=limits) as server, crowd(server, 60, HALF) as sockets:
        for _ in range(3):
            assert server.ask("GET", "/health")[0] == 200
        assert all(ended(way) == b"" for way in sockets[:40])
        # The last ones are still listened to.
        for way in sockets[-10:]:
            way.sendall(b"\r\n")
            response = http.client.HTTPResponse(way)
            response.begin()
            assert response.status == 200 and json.loads(response.read()) == {"status": "ok"}


@pytest.mark.parametrize("sent", [b"", HALF])
def test_headers_that_do_not_end_in_time_end_their_connection(tmp_path: Path, sent: bytes) -> None:
    limits = ConnectionLimits(connections=20, header_seconds=0.1)
    with serving(tmp_path, limits=limits) as server, crowd(server, 3, sent) as sockets:
        for way in sockets:
            answer = ended(way)
            assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


def test_a_byte_now_and_then_buys_no_time(tmp_path: Path) -> None:
    """Neither before a request nor after its answer."""
    refused = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    with serving(tmp_path, limits=ConnectionLimits(connections=20, header_seconds=0.2), api_key="key") as server:
        for begin in (HALF, refused):
            with crowd(server, 1, begin) as (way,):
                way.settimeout(0.01)
                for _ in range(3000):
                    try:
                        way.sendall(b"a")
                        if not way.recv(4096):
                            break
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        break
                else:
                    pytest.fail("it stays open")


def test_where_all_connections_are_busy_health_is_answered_and_the_rest_refused(tmp_path: Path) -> None:
    with serving(tmp_path, limits=ConnectionLimits(connections=20, header_seconds=LONG)) as server:
        with crowd(server, 20, BUSY) as sockets:
            readers(server, 20)
            for _ in range(3):
                assert server.ask("GET", "/health")[0] == 200
                status, body, headers = server.ask("GET", "/v1/models")
                assert (status, body["error"]["code"]) == (503, "too_many_connections")
                assert headers["connection"] == "close"
            with crowd(server, 30, HALF):  # those over the limit make way for each other, too
                assert server.ask("GET", "/health")[0] == 200
            sockets[0].sendall(b'"a": 1, ')
            assert sockets[0].recv(4096).startswith(b"HTTP/1.1 400 ")
        readers(server, 0)
        assert server.ask("GET", "/v1/models")[0] == 200


def test_a_client_that_does_not_read_is_left(tmp_path: Path) -> None:
    limits = ConnectionLimits(connections=20, header_seconds=LONG, stall_seconds=0.1)
    with serving(tmp_path, limits=limits) as server, crowd(server, 1, b"") as (way,):
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                way.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 10)
        assert server.ask("GET", "/health")[0] == 200


def test_descriptors_stay_free_for_what_is_no_connection() -> None:
    assert connection_limit(256, 30) == 256 - 30 - RESERVED
    assert connection_limit(1 << 30, 30) == MOST
    assert connection_limit(64, 30) > 0
    assert 0 < ConnectionLimits().connections <= MOST


# -- The HTTP surface against requests made from its own description


ODD = ("/", "/v1/models/%00", "/v1//models", "/v1/models/a/b", "/v1/completions/")


@pytest.fixture(scope="module")
def server_fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("fuzzed"), slots=64, queue=1000) as running:
        yield running


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_described_is_answered(server_fuzz, path, data):
    body = data.draw(values(ASKED[path]))
    status, answer, _ = server_fuzz.ask("POST", path, body)
    is_described(status, answer, path)
    if status == 200:
        return
    # What no schema can say: lengths, the model's own names, and fields that depend on each other.
    error = answer["error"]
    known = error["code"] in ("context_length_exceeded", "model_not_found")
    related = ("stream_options", "prompt", "n", "max_tokens", "top_logprobs")
    assert known or error["param"] in related or "template" in error["message"], error
    assert "must be" not in error["message"] and "not a field" not in error["message"], error


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_not_described_is_refused_and_nothing_dies(server_fuzz, path, data):
    status, answer, _ = server_fuzz.ask("POST", path, data.draw(changed(path)))
    is_described(status, answer, path)


@settings(max_examples=50)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]),
    path=st.sampled_from([*DESCRIBED["paths"], *ODD]),
    body=st.binary(max_size=60) | ANYTHING.map(lambda value: json.dumps(value).encode()),
    kind=st.sampled_from(["application/json", "application/json; charset=utf-8", "text/plain", ""]),
)
def test_any_method_on_any_path_with_any_bytes(server_fuzz, method, path, body, kind):
    path = path.replace("{model}", "x")
    status, _, _ = server_fuzz.ask(method, path, body, {"content-type": kind})
    assert status < 500


def test_every_described_path_answers_and_the_description_is_served(server_fuzz):
    assert server_fuzz.ask("GET", "/openapi.json")[1] == json.loads(json.dumps(description(__version__)))
    for path, operations in DESCRIBED["paths"].items():
        for method in operations:
            status, _, _ = server_fuzz.ask(method.upper(), path, {} if method == "post" else None)
            assert status not in (405, 500) and str(status) in operations[method]["responses"], path


def test_afterwards_nothing_is_left(server_fuzz):
    assert server_fuzz.post("/v1/completions", prompt="ab", max_tokens=3)[1]["choices"][0]["text"] == "aba"
    assert server_fuzz.front.open == 0 and not server_fuzz.front.live


# -- The official `openai` client, unchanged, against the HTTP interface on a double of the engine


HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("openai"), slots=2, queue=2, pause=0.001, api_key="key") as running:
        yield running


@pytest.fixture(scope="module")
def client(server_client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_client.url}/v1", api_key="key", max_retries=0, timeout=30) as one:
        yield one


def test_the_stream_helper_of_the_client_gathers_a_whole_answer(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stop="er-", logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "[-us"
    assert [entry.token for entry in final.choices[0].logprobs.content] == list("[-us")


def test_its_exceptions_are_the_ones_it_has_for_each_mistake(client):
    with pytest.raises(openai.BadRequestError, match="at most 2") as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=[{"type": "function"}])
