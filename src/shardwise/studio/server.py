"""The server: this machine, this user and this page only. Every answer is made by a function of `data/`."""

import json
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from shardwise.errors import UserError
from shardwise.studio.columns import encode
from shardwise.studio.data.registry import answer
from shardwise.studio.page import TYPES, document, files

HOST = "127.0.0.1"
MOST_UPLOADED = 1 << 28
"""Bytes of a file that may be dropped on the page."""


class Studio(ThreadingHTTPServer):
    """Listens on 127.0.0.1. runs: the folder whose runs the page shows."""

    daemon_threads = True

    def __init__(self, port: int = 0, runs: Path = Path("runs")) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "a port is 0 to 65535"
            raise UserError(f"cannot listen on port {port}: {reason}; leave --port out for a free one") from None
        self.runs = runs
        self.token = secrets.token_hex(24)

    @property
    def origin(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    @property
    def address(self) -> str:
        """What a browser opens: other users of this machine do not know the token."""
        return f"{self.origin}?token={self.token}"

    @property
    def cookie(self) -> str:
        """Name of the cookie that keeps the token; cookies are shared by all ports of a host."""
        return f"shardwise-{self.server_port}"

    def warm(self, view: str) -> None:
        """Compute a view's first state beside the browser's start: what it imports and caches is there when asked."""

        def computed() -> None:
            with suppress(Exception):
                answer(view, {}, self.runs)

        threading.Thread(target=computed, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Studio

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, query = unquote(address.path), dict(parse_qsl(address.query, keep_blank_values=True))
        if not self._ours():
            return
        if path == "/" and self._known(query.get("token", "")):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(302, "text/plain", b"", more={"Location": "/", "Set-Cookie": cookie})
            return
        if not self._allowed():
            return
        if path == "/":
            text, policy = document()
            self._send(200, "text/html; charset=utf-8", text.encode(), policy)
        elif path.startswith("/static/") and path.removeprefix("/static/") in files():
            name = path.removeprefix("/static/")
            self._send(200, TYPES["." + name.rpartition(".")[2]] + "; charset=utf-8", files()[name])
        elif path.startswith("/api/"):
            self._answer(path.removeprefix("/api/"), query)
        else:
            self._refuse(404, "there is nothing here")

    def do_POST(self) -> None:
        """A file that was dropped on the page."""
        if not self._ours() or not self._allowed():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/api/open" or not length.isdecimal() or self.headers.get("X-Studio") != "open":
            self._refuse(404, "there is nothing here")
            return
        if int(length) > MOST_UPLOADED:
            self.close_connection = True
            self._refuse(413, f"the file is larger than {MOST_UPLOADED} bytes")
            return
        content = self.rfile.read(int(length))

        def opened() -> Any:
            from shardwise.studio.data.opened import opened

            return opened(content)

        self._reply(opened)

    def _answer(self, view: str, params: dict[str, str]) -> None:
        def asked() -> Any:
            if view == "runs/events":
                from shardwise.studio.data.runs import events

                return events(params, self.server.runs)
            return answer(view, params, self.server.runs)

        self._reply(asked)

    def _reply(self, made: Any) -> None:
        try:
            result = made()
            body = encode(result)
        except UserError as error:
            self._refuse(400, str(error))
            return
        except Exception as error:
            self._refuse(500, f"{type(error).__name__}: {error}; this is a bug in shardwise")
            return
        self._send(200, "application/json", body)

    def _ours(self) -> bool:
        """Whether the browser meant this server: a page elsewhere could otherwise reach it by a name that points
        here. The address without a port is for ports that a browser leaves out."""
        names = (HOST, "localhost")
        hosts = {f"{name}:{self.server.server_port}" for name in names} | set(names)
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in hosts or not (origin is None or urlsplit(origin).netloc in hosts):
            return self._not_ours("this server answers to 127.0.0.1 only")
        # Every current browser sends it; curl and older browsers do not.
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return self._not_ours("another site may not ask this server: paste the address into the browser instead")
        return True

    def _allowed(self) -> bool:
        """Whether the request has the token that the printed address has, which became a cookie."""
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            kept = None
        if kept and self._known(kept.value):
            return True
        return self._not_ours("this page is another user's, or older: open the address that shardwise studio printed")

    def _known(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.server.token.encode())

    def _not_ours(self, line: str) -> bool:
        self.close_connection = True
        self._refuse(403, line)
        return False

    def _refuse(self, code: int, line: str) -> None:
        self._send(code, "application/json", json.dumps({"error": " ".join(line.split())}).encode())

    def _send(
        self,
        code: int,
        kind: str,
        body: bytes,
        policy: str = "default-src 'none'",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the page shows what goes wrong."""
