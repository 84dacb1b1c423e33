"""A double of the engine, which answers from a thread; a tokenizer whose tokens are bytes; and a server on both.

An answer repeats its prompt, so that a test knows which tokens belong to whom.
"""

import asyncio
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.data.tokenizer import load
from shardwise.errors import UserError
from shardwise.runtime.job.launch import RunFailed
from shardwise.serving.http import server
from shardwise.serving.http.app import application
from shardwise.serving.http.chat import Chat
from shardwise.serving.http.connections import ConnectionLimits
from shardwise.serving.http.generation import Front
from shardwise.serving.messages import Finished, ReplicaLoad, Request, Sampling, Token
from shardwise.serving.text import Text

END = 256
MODEL = "double"
CONTEXT = 200

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'forbidden' %}{{ raise_exception('not that') }}"
    "{% endif %}[-{{ m.role }}-]{{ m.content }}[-end-]{% endfor %}"
    "{% if add_generation_prompt %}[-assistant-]{% endif %}"
)


@dataclass
class _Running:
    request: Request
    sink: Any
    made: int = 0


class EngineDouble:
    """Answers `slots` requests at a time, one token each in turn; `pause` between turns in seconds.

    A prompt that ends with a zero byte ends after its own length. A scored prompt's tokens have minus their place as
    log-probability, and the byte before them is half as likely. hold: no turn is taken while it is set.
    """

    def __init__(self, slots: int = 4, pause: float = 0.0) -> None:
        self._slots, self._pause = slots, pause
        self._numbers = itertools.count(1)
        self._lock = threading.Condition()
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._cancelled: set[int] = set()
        self._closed = False
        self.failure: str | None = None
        self.hold = False
        self.submitted: list[Request] = []
        self.cancels: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Any) -> int:
        with self._lock:
            if self.failure or self._closed:
                raise RunFailed(self.failure or "closed")
            if not prompt:
                raise UserError("an empty prompt has nothing to continue: give at least one token")
            if max(prompt) > END + 2:
                raise UserError(f"token {max(prompt)} does not exist")
            request = Request(next(self._numbers), tuple(prompt), sampling)
            self.submitted.append(request)
            self._waiting.append(_Running(request, sink))
            self._lock.notify_all()
        return request.id

    def cancel(self, number: int) -> None:
        with self._lock:
            self.cancels.append(number)
            self._cancelled.add(number)
            self._lock.notify_all()

    def load(self) -> dict[int, ReplicaLoad]:
        with self._lock:
            return {0: ReplicaLoad(len(self._waiting), len(self._running), 3 * len(self._running), 64)}

    def fail(self, line: str) -> None:
        with self._lock:
            self.failure = line
            lost = self._waiting + self._running
            self._waiting, self._running = [], []
        for each in lost:
            each.sink(Finished(each.request.id, "error", error=line))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                if not self._waiting and not self._running:
                    self._lock.wait(0.05)
                while self._waiting and len(self._running) < self._slots:
                    self._running.append(self._waiting.pop(0))
                answers = [] if self.hold else [self._turn(each) for each in list(self._running)]
                gone = [each for each in self._waiting if each.request.id in self._cancelled]
                self._waiting = [each for each in self._waiting if each not in gone]
                if self.hold:
                    gone += [each for each in self._running if each.request.id in self._cancelled]
                    self._running = [each for each in self._running if each not in gone]
                answers += [(each.sink, [Finished(each.request.id, "cancelled")]) for each in gone]
            for sink, said in answers:
                for answer in said:
                    sink(answer)
            time.sleep(self._pause or (0.002 if self.hold else 0))

    def _turn(self, each: _Running) -> tuple[Any, list[Token | Finished]]:
        request, prompt = each.request, each.request.prompt
        if request.id in self._cancelled:
            self._running.remove(each)
            return each.sink, [Finished(request.id, "cancelled", reused=1)]
        sampling, scores = request.sampling, self._scores(each)
        if not sampling.max_tokens:
            self._running.remove(each)
            return each.sink, [*scores, Finished(request.id, "length")]
        ends = prompt[-1] == 0 and each.made == len(prompt) - 1
        token = END if ends else prompt[each.made % len(prompt)]
        each.made += 1
        top = ((token, -0.5), (64, -1.5))[: sampling.top_logprobs]
        said: list[Token | Finished] = [*scores, Token(request.id, token, -0.5, top)]
        stops = token in sampling.stop_tokens and each.made > sampling.min_tokens
        if stops or each.made == sampling.max_tokens:
            self._running.remove(each)
            said.append(Finished(request.id, "stop" if stops else "length", reused=each.made % 2))
        return each.sink, said

    def _scores(self, each: _Running) -> list[Token | Finished]:
        request = each.request
        if each.made or not request.sampling.prompt_logprobs:
            return []
        places = list(enumerate(request.prompt))[1:]
        tops = [((token, -float(place)), (token - 1, -place - 0.5)) for place, token in places]
        most = request.sampling.top_logprobs
        return [
            Token(request.id, token, -float(place), top[:most], prompt=True)
            for (place, token), top in zip(places, tops, strict=True)
        ]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer.json whose tokens are bytes, and three control tokens; and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(_letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<|end|>", "<|user|>", "<|assistant|>")])
    assert tokenizer.token_to_id("<|end|>") == END
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"


def _letters() -> list[str]:
    """What byte-level tokenizers write for each byte: itself where it can be seen, else a letter from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]


def front_of(engine: EngineDouble, folder: Path, *, slots: int = 4, queue: int = 4,
             template: str | None = TEMPLATE, api_key: str | None = None,
             public: bool = False) -> tuple[Front, Any]:  # fmt: skip
    file = write_tokenizer(folder, template)
    text = Text(load(file), [END])
    front = Front(engine, text, context=CONTEXT, places=slots, queue=queue)
    return front, application(front, MODEL, Chat(file), version=__version__, api_key=api_key, public=public)


@dataclass
class Running:
    """A server in a thread. finish: end it as a signal would, within so many seconds."""

    url: str
    port: int
    engine: EngineDouble
    front: Front

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, body, headers) of one request; body: bytes as they are, anything else as JSON."""
        way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            way.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            response = way.getresponse()
            text = response.read()
            kind = response.headers.get("content-type", "")
            answer = json.loads(text) if text and kind.startswith("application/json") else text.decode()
            return response.status, answer, {name.lower(): value for name, value in response.headers.items()}
        finally:
            way.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any, dict[str, str]]:
        return self.ask("POST", path, body)

    def events(self, path: str, **body: Any) -> list[Any]:
        status, text, headers = self.post(path, stream=True, **body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        assert text.endswith("\n\n")
        said = [line.removeprefix("data: ") for line in text.removesuffix("\n\n").split("\n\n")]
        return [line if line == "[DONE]" else json.loads(line) for line in said]


@contextmanager
def serving(folder: Path, *, queue: int = 8, slots: int = 4, pause: float = 0.0, template: str | None = TEMPLATE,
            api_key: str | None = None, limits: ConnectionLimits | None = None,
            public: bool = False) -> Iterator[Running]:  # fmt: skip
    """A server on a double of the engine, in a thread."""
    engine = EngineDouble(slots, pause)
    front, app = front_of(engine, folder, slots=slots, queue=queue, template=template, api_key=api_key, public=public)
    sock = server.bind("127.0.0.1", 0)
    ready = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def life() -> None:
        end = asyncio.Event()
        loops.append((asyncio.get_running_loop(), end))
        uvicorn_server = server.listener(app, limits)
        task = asyncio.create_task(uvicorn_server.serve(sockets=[sock]))
        while not uvicorn_server.started:
            await asyncio.sleep(0.005)
        ready.set()
        await end.wait()
        uvicorn_server.should_exit = True
        await task

    url = server.url_of(sock)
    thread = threading.Thread(target=lambda: asyncio.run(life()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield Running(url, int(url.rpartition(":")[2]), engine, front)
    finally:
        loop, end = loops[0]
        loop.call_soon_threadsafe(end.set)
        thread.join(10)
        engine.close()
