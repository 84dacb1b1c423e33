"""The routes, and what holds of all of them: the key, limits of bodies, errors in one form, counted answers."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from itertools import zip_longest
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.serving.http.answers import Answers, Chats, Completions, dump
from shardwise.serving.http.bodies import CHAT, COMPLETION, CompletionRequest, description
from shardwise.serving.http.chat import Chat
from shardwise.serving.http.connections import OVER_LIMIT
from shardwise.serving.http.generation import Front, Generation, Prompt
from shardwise.serving.http.metrics import CONTENT_TYPE
from shardwise.serving.http.problems import Problem
from shardwise.serving.http.schema import Schema, checked

T = TypeVar("T")

log = logging.getLogger(__name__)

BODY_BYTES = 4 << 20
"""Most bytes of a body; more where the context is so long that prompts need it."""
_BYTES_PER_TOKEN = 32
_BODY_SECONDS = 60.0
_INLINE_BYTES = 1 << 14
"""Bodies up to so many bytes are read on the event loop, larger ones in a thread beside it."""
_DEEP = "the body is nested too deeply"

_CLIENT_LEFT = 499
"""nginx's word for a response that nobody was there to read."""


def application(
    front: Front, model: str, chat: Chat, *, version: str, api_key: str | None = None, public: bool = False
) -> ASGIApp:
    """The ASGI application. model: the name that requests call it by. version: of shardwise, for the description.
    api_key: what /v1 asks for, None for nothing. public: whether other hosts reach it; /metrics then asks, too."""
    guarded = ("/v1/", "/metrics") if public else ("/v1/",)
    routes = _Routes(front, model, chat, description(version, guarded if api_key is not None else ()))
    app = Starlette(
        routes=[
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.model_named, methods=["GET"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chats, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/openapi.json", routes.openapi, methods=["GET"]),
        ],
        exception_handlers={
            Problem: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _left_alone,
            Exception: _defect,
        },
    )
    app.router.redirect_slashes = False
    return _Gate(app, front, api_key, guarded)


def answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(data), status, headers, "application/json")


class _Routes:
    def __init__(self, front: Front, model: str, chat: Chat, described: dict[str, Any]) -> None:
        self._front, self._model, self._chat, self._described = front, model, chat, described
        self._most = max(BODY_BYTES, _BYTES_PER_TOKEN * front.context)
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return answer({"object": "list", "data": [self._card()]})

    async def model_named(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return answer(self._card())

    def _card(self) -> dict[str, Any]:
        front = self._front
        about = {"max_model_len": front.context, "chat": self._chat.known}
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "shardwise", **about}

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self._model:
            shown = name if len(name) < 100 else name[:100] + "..."
            message = f"no model {shown!r} is served here: there is {self._model!r}"
            raise Problem(404, message, param="model", code="model_not_found")

    async def health(self, request: Request) -> Response:
        self._front.refuse_if_closed()
        return answer({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.metrics.text(self._front.gauges()), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return answer(self._described)

    async def completions(self, request: Request) -> ASGIApp:
        arrived = time.monotonic()
        with self._front.reading():
            body, wanted = await self._asked(request, COMPLETION)
            prompts = await asyncio.to_thread(self._prompts, body["prompt"], wanted)
        return await self._answered(request, Completions, prompts, wanted, arrived)

    async def chats(self, request: Request) -> ASGIApp:
        arrived = time.monotonic()
        with self._front.reading():
            body, wanted = await self._asked(request, CHAT)
            self._front.check_length(_texts(body["messages"]), "messages")
            tokens = await asyncio.to_thread(self._chat.encode, body["messages"], body["chat_template_kwargs"])
        return await self._answered(request, Chats, [Prompt(tokens)], wanted, arrived)

    def _prompts(self, prompt: Any, wanted: CompletionRequest) -> list[Prompt]:
        front, n = self._front, wanted.n
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        front.check_count(len(several) * n, "n" if n > 1 else "prompt")
        texts = several if isinstance(several[0], str) else []
        for text in texts:
            front.check_length([text], "prompt")
        prompts = front.text.encode_all(texts) if texts else several
        if not wanted.echo:
            return [Prompt(tokens) for tokens in prompts]
        for tokens in prompts:
            front.max_tokens(tokens, wanted, "prompt")
        return [self._echoed(tokens, given) for tokens, given in zip_longest(prompts, texts)]

    def _echoed(self, tokens: list[int], given: str | None) -> Prompt:
        text, offsets = self._front.text.echo(tokens, given)
        return Prompt(tokens, text, tuple(offsets))

    async def _answered(
        self, request: Request, kind: type[Answers], prompts: list[Prompt], wanted: CompletionRequest, arrived: float
    ) -> ASGIApp:
        # The front may have been closed while the prompt was read.
        self._front.refuse_if_closed()
        generation = Generation(self._front, prompts, wanted, kind.param, arrived, continues=kind.continues)
        answers = kind(self._model, wanted, self._front.text)
        if wanted.stream:
            return _EventStream(answers.events(generation), generation)
        try:
            whole = await _while_connected(request.receive, answers.whole(generation))
        finally:
            generation.cancel()
        return Response(status_code=_CLIENT_LEFT) if whole is None else answer(whole)

    async def _asked(self, request: Request, schema: Schema) -> tuple[dict[str, Any], CompletionRequest]:
        """The checked body of a request for generation."""
        self._front.refuse_if_closed()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            said = f"is said to be {kind}" if kind else "is not said to be JSON"
            raise Problem(415, f"the body {said}: send it with the header Content-Type: application/json")
        data = await self._bytes(request)
        body = await asyncio.to_thread(_read, data, schema) if len(data) > _INLINE_BYTES else _read(data, schema)
        self._check_name(body["model"])
        return body, CompletionRequest.of(body)

    async def _bytes(self, request: Request) -> bytes:
        """The body. One that is too large is read to its end, or at most as long again, and thrown away: a client that
        is still writing reads no answer."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size <= self._most:
                        parts.append(part)
                    elif size > 8 * self._most:
                        break
        except TimeoutError:
            raise Problem(408, f"the body did not come within {_BODY_SECONDS:.0f} s") from None
        if size > self._most:
            raise Problem(413, f"the body has more than the {self._most:,} bytes that are read at most")
        return b"".join(parts)


def _texts(messages: list[dict[str, Any]]) -> Iterable[str]:
    for message in messages:
        content = message["content"] or ""
        yield from [content] if isinstance(content, str) else [part["text"] for part in content]


def _read(data: bytes, schema: Schema) -> dict[str, Any]:
    """The body that the bytes spell. Raises `Problem` (400)."""
    try:
        body = json.loads(data, parse_constant=_no_number)
        if not isinstance(body, dict):
            raise Problem(400, "the body must be a JSON object")
        return checked(schema, body)
    except RecursionError:
        raise Problem(400, _DEEP) from None
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number of JSON")


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of `work`; None, and `work` is cancelled, when the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream:
    """A response of server-sent events; whatever ends it ends its generation."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        self._events, self._generation = events, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._send(send))
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        # Proxies such as nginx gather answers otherwise.
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Gate:
    """Before all routes: rejects requests that two readers could take for different ones, asks for the key, counts
    answers by path and status, and logs defects. guarded: beginnings of paths that need the key."""

    def __init__(self, app: ASGIApp, front: Front, api_key: str | None, guarded: tuple[str, ...]) -> None:
        self._app, self._front, self._guarded = app, front, guarded
        self._key = api_key.encode() if api_key is not None else None
        self._known = {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics", "/openapi.json"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, status = scope["path"], 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app
        if ambiguous := _ambiguous(scope["headers"]):
            app = _response(Problem(400, ambiguous, headers={"connection": "close"}))
        elif path.startswith(self._guarded) and not self._knows(scope["headers"]):
            app = _response(Problem(401, "the API key is missing or wrong: Authorization: Bearer KEY",
                                    code="invalid_api_key", headers={"www-authenticate": "Bearer"}))  # fmt: skip
        elif OVER_LIMIT in scope.get("state", {}) and path != "/health":
            app = _response(Problem(503, "too many connections are open: try again later", code="too_many_connections",
                                    headers={"connection": "close", "retry-after": "1"}))  # fmt: skip
        try:
            await app(scope, receive, counted)
        except Exception:
            log.exception("%s %s failed", scope["method"], path)
        finally:
            labels = ("path", path if path in self._known else "other"), ("status", str(status or _CLIENT_LEFT))
            self._front.metrics.requests[labels] += 1

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if self._key is None:
            return True
        given = dict(headers).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # A comparison that stops at the first difference would tell how much of a guess was right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _ambiguous(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a proxy before this server could have read another request, or another key; None for a clear one."""
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "the request has both Content-Length and Transfer-Encoding: send one of them"
    if names.count(b"authorization") > 1:
        return "the request has several Authorization headers: send one"
    return None


def _response(problem: Problem) -> Response:
    return answer(problem.to_json(), problem.status, problem.headers)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return _response(problem)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    words = {404: f"there is no {where}: see /openapi.json", 405: f"{where} is not allowed"}
    message = words.get(error.status_code, error.detail)
    return _response(Problem(error.status_code, message, headers=dict(error.headers or {})))


async def _left_alone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _defect(request: Request, error: Exception) -> Response:
    return _response(Problem(500, f"{type(error).__name__} in the server, whose log says where"))
