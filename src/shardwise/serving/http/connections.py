"""Limits on connections: deadlines for slow clients, and how many may be open, so that `/health` always answers.

uvicorn waits for ever for the headers of a request, and accepts connections until the process has no descriptor left.
"""

import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shardwise.serving.http.problems import Problem

HEADER_SECONDS = 10.0
"""From a connection, or from the first byte of its next request, to the end of the request's headers."""
STALL_SECONDS = 60.0
"""Time for a client to continue reading, once unread output fills all buffers."""
MOST = 4096
ACCEPTED = 8
"""Connections accepted per pass of the event loop. Those of several passes exist before the first one is counted."""
RESERVED = 96
"""Descriptors kept for connections on their way in and out, for `/health`, and for files."""
OVER_LIMIT = "over_limit"
"""Key in a request's `scope["state"]`: only `/health` is answered."""
_LEAST = 8


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections. connections: open at once. header_seconds, stall_seconds: see the constants."""

    connections: int = field(default_factory=lambda: connection_limit(*_descriptors()))
    header_seconds: float = HEADER_SECONDS
    stall_seconds: float = STALL_SECONDS


def connection_limit(descriptors: int, used: int) -> int:
    """Connections that may be open in a process. descriptors: its limit (`ulimit -n`). used: those open already."""
    return max(_LEAST, min(MOST, descriptors - used - RESERVED))


def _descriptors() -> tuple[int, int]:
    """(limit, open now)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft, sum(1 for _ in Path("/proc/self/fd").iterdir())


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, with limits on connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(app, http=LimitedConnection, backlog=ACCEPTED, **settings)
        self.limits = limits


class LimitedConnection(H11Protocol):
    """An HTTP connection that ends when its client is too slow, or when it waits and another one needs its place.

    A connection over the limit closes the one that has waited longest for a request. If all are busy with requests, it
    stays for one request: `/health` is answered, any other path gets 503.
    """

    config: LimitedConfig

    def __init__(
        self, config: LimitedConfig, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._idle_since = 0.0
        self._over = False
        self._header_timer, self._stall_timer = _Timer(), _Timer()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._header_timer.start(self.loop, self._limits.header_seconds, self._headers_late)
        if len(self.connections) > self._limits.connections:
            self._take_place()

    def _take_place(self) -> None:
        waiting = [c for c in self.connections if isinstance(c, LimitedConnection) and c._idle and c is not self]
        if waiting:
            oldest = min(waiting, key=lambda connection: connection._idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            self._over = True
            self.app_state = {**self.app_state, OVER_LIMIT: True}

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._idle:
            self._header_timer.stop()
            if self._over:
                self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self._header_timer.start(self.loop, self._limits.header_seconds, self._headers_late)

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of all errors where the bytes are not HTTP."""
        body = json.dumps(Problem(400, "the request is not valid HTTP").to_json()).encode()
        kind = ("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")
        head = h11.Response(status_code=400, headers=list(kind), reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def _headers_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            headers = [("connection", "close"), ("content-length", "0")]
            late = h11.Response(status_code=408, reason=b"Request Timeout", headers=headers)
            self.transport.write(self.conn.send(late) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer.start(self.loop, self._limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer.stop()
        self._stall_timer.stop()


class _Timer:
    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], object]) -> None:
        """Begin to count, unless it counts already."""
        if self._handle is None:
            self._handle = loop.call_later(seconds, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
