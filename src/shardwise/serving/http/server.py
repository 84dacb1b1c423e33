"""Running the server: from a bound socket to an orderly end, whatever ends it."""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from shardwise.errors import UserError
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.job.signals import handled
from shardwise.serving.http.connections import ConnectionLimits, LimitedConfig
from shardwise.serving.http.generation import Front
from shardwise.serving.http.problems import Problem

GRACE = 30.0
"""Seconds that running requests get to finish after a signal."""
_LAST_BYTES = 1
"""Seconds that clients get to read what has been written."""
_WAITING = 1024
"""Connections that the kernel keeps until they are accepted."""
_LOOK = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which is its own from now on, though it does not listen yet; port 0 takes a free one.
    Raises `UserError`."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"port {port} does not exist; choose one between 1024 and 65535, or 0 for a free one")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of names that DNS cannot have
        reason = getattr(error, "strerror", None) or "no name that a host can have"
        raise UserError(f"{host} is no address of this host: {reason}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _in_use(host, port, error) from None
    # Lingering connections of an earlier server do not matter. But no other server may get the address while weights
    # are read: Linux lets several sockets have it until one of them listens, if all of them allow it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def _in_use(host: str, port: int, error: OSError) -> UserError:
    return UserError(f"{host}:{port} cannot be used ({os.strerror(error.errno or 0)}); choose another --port, or 0")


def is_public(sock: socket.socket) -> bool:
    return not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp,
    front: Front,
    sock: socket.socket,
    *,
    grace: float = GRACE,
    ready: Callable[[], object],
    echo: Callable[[str], object],
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then finish what runs, for at most `grace` seconds; a second signal ends
    it at once.

    ready: called when connections are taken; echo: gets lines. Raises `RunFailed` when the engine has failed, after
    every client has got the error, and `UserError` when the address is in use.
    """

    async def serve() -> None:
        server = listener(app)
        signals: list[int] = []
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        with handled(_SIGNALS, lambda number, frame: signals.append(number)):
            try:
                while not server.started and not serving.done():
                    await asyncio.sleep(_LOOK / 10)
                if not serving.done():
                    ready()
                    await _until_the_end(front, serving, signals, grace, echo)
            finally:
                server.should_exit = True
                await serving

    host, port = sock.getsockname()[:2]
    try:
        asyncio.run(serve())
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _in_use(host, port, error) from None
    if front.engine.failure is not None:
        raise RunFailed(front.engine.failure)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: it would refuse connections at once, and kill itself at the end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or []:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        # asyncio has one number for the kernel's queue of connections and for how many it accepts per pass.
        for sock in sockets or []:
            sock.listen(_WAITING)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listener(app: ASGIApp, limits: ConnectionLimits | None = None) -> uvicorn.Server:
    """The HTTP server of an application, not started yet. limits: of connections; by default as descriptors allow."""
    config = LimitedConfig(
        app,
        limits or ConnectionLimits(),
        # Defects are logged by the application; uvicorn would add tracebacks for clients that it stops waiting for.
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_LAST_BYTES,
    )
    return _Uvicorn(config)


async def _until_the_end(
    front: Front, serving: asyncio.Task[None], signals: list[int], grace: float, echo: Callable[[str], object]
) -> None:
    while not signals and not serving.done():
        if front.engine.failure is not None:
            # Its requests have their errors already; those that come meanwhile get one.
            await _until(lambda: not front.live, _LAST_BYTES)
            return
        await asyncio.sleep(_LOOK)
    front.stopping = True
    name = signal.Signals(signals[0]).name if signals else "the end"
    echo(f"{name}: {len(front.live)} running request(s) finish within {grace:g} s, no new ones are taken")
    await _until(
        lambda: not (front.live or front.readers) or len(signals) > 1 or front.engine.failure is not None, grace
    )
    for reader in list(front.readers):
        reader.cancel()
    for generation in list(front.live):
        generation.abort(Problem(503, "the server was stopped before the answer was complete", code="stopping"))
    # The answers that have just been finished or broken off are still to be written.
    await asyncio.sleep(_LOOK)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK)
