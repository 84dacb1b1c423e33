"""Clients that open connections and say nothing, or little, or read nothing: others are answered all the same."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from serving_double import Running, serving

from shardwise.serving.http.connections import MOST, RESERVED, ConnectionLimits, connection_limit

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
