"""The shapes of OpenAI's answers: whole ones, and the events of a stream."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any

from shardwise.serving.http.bodies import CompletionRequest
from shardwise.serving.http.generation import Chosen, Generation, TextDelta
from shardwise.serving.http.problems import Problem
from shardwise.serving.text import Text

_IMPOSSIBLE = -9999.0
"""OpenAI's value for the logarithm of probability 0, which JSON cannot say."""

DONE = b"data: [DONE]\n\n"


def dump(data: Any) -> bytes:
    """JSON as it is sent. Halves of surrogate pairs, which UTF-8 does not have, are written as JSON's escapes."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def event(data: Any) -> bytes:
    return b"data: " + dump(data) + b"\n\n"


class Answers(ABC):
    """The answers to one request."""

    prefix: str
    whole_kind: str
    chunk_kind: str
    param: str
    """Field of the body that has the prompt."""
    continues = False
    """Whether answers go on with their prompt's text."""

    def __init__(self, model: str, wanted: CompletionRequest, text: Text) -> None:
        self._wanted, self._text = wanted, text
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    @abstractmethod
    def _whole(self, choice: int, pieces: list[TextDelta]) -> dict[str, Any]:
        """A choice, complete."""

    @abstractmethod
    def _chunk(self, piece: TextDelta) -> dict[str, Any]:
        """A choice's part of an event."""

    def _first(self, choice: int) -> dict[str, Any] | None:
        return None

    @abstractmethod
    def _logprobs(self, tokens: Iterable[Chosen]) -> dict[str, Any]: ...

    def _known(self, tokens: Iterable[Chosen]) -> dict[str, Any] | None:
        return self._logprobs(tokens) if self._wanted.logprobs else None

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The one answer, when all choices are complete. Raises `Problem` when the engine fails."""
        pieces: dict[int, list[TextDelta]] = {choice: [] for choice in range(generation.choices)}
        async for piece in generation.pieces():
            pieces[piece.choice].append(piece)
        await generation.settled()
        choices = [self._whole(choice, its) for choice, its in pieces.items()]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage(generation)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer in pieces, as server-sent events; a failing engine's last event says so."""
        head = {**self._head, "object": self.chunk_kind}
        counts: dict[str, Any] = {"usage": None} if self._wanted.include_usage else {}
        try:
            for choice in range(generation.choices):
                if first := self._first(choice):
                    yield event({**head, "choices": [first], **counts})
            async for piece in generation.pieces():
                yield event({**head, "choices": [self._chunk(piece)], **counts})
        except Problem as problem:
            yield event(problem.to_json())
            return
        if self._wanted.include_usage:
            await generation.settled()
            yield event({**head, "choices": [], "usage": usage(generation)})
        yield DONE


class Completions(Answers):
    """Answers of /v1/completions."""

    prefix, whole_kind, chunk_kind, param = "cmpl", "text_completion", "text_completion", "prompt"
    continues = True

    def _whole(self, choice: int, pieces: list[TextDelta]) -> dict[str, Any]:
        return self._chunk(_joined(choice, pieces))

    def _chunk(self, piece: TextDelta) -> dict[str, Any]:
        known = self._known(piece.tokens)
        return {"index": piece.choice, "text": piece.text, "logprobs": known, "finish_reason": piece.reason}

    def _logprobs(self, tokens: Iterable[Chosen]) -> dict[str, Any]:
        tokens = list(tokens)
        return {
            "tokens": [self._text.spelled(chosen.token) for chosen in tokens],
            "token_logprobs": [None if chosen.logprob is None else _possible(chosen.logprob) for chosen in tokens],
            "top_logprobs": [self._top(chosen) for chosen in tokens] if self._wanted.sampling.top_logprobs else None,
            "text_offset": [chosen.offset for chosen in tokens],
        }

    def _top(self, chosen: Chosen) -> dict[str, float] | None:
        """Log-probabilities of the likeliest tokens, and of the token itself; the highest among tokens with
        equal spelling, as parts of characters have."""
        if chosen.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*chosen.top, (chosen.token, chosen.logprob)):
            top.setdefault(self._text.spelled(token), _possible(logprob))
        return top


class Chats(Answers):
    """Answers of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind, param = "chatcmpl", "chat.completion", "chat.completion.chunk", "messages"

    def _whole(self, choice: int, pieces: list[TextDelta]) -> dict[str, Any]:
        whole = _joined(choice, pieces)
        return {
            "index": choice,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._known(whole.tokens),
            "finish_reason": whole.reason,
        }

    def _first(self, choice: int) -> dict[str, Any]:
        return _delta(choice, {"role": "assistant", "content": ""})

    def _chunk(self, piece: TextDelta) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        known = self._known(piece.tokens) if any(not chosen.ends for chosen in piece.tokens) else None
        return _delta(piece.choice, delta, known, piece.reason)

    def _logprobs(self, tokens: Iterable[Chosen]) -> dict[str, Any]:
        content = []
        for chosen in tokens:
            if chosen.logprob is not None and not chosen.ends:
                top = [self._entry(token, logprob) for token, logprob in chosen.top]
                content.append(self._entry(chosen.token, chosen.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, known = self._text.spelled_in_bytes(token)
        return {"token": text, "logprob": _possible(logprob), "bytes": list(known)}


def _possible(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


def _delta(
    choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _joined(choice: int, pieces: list[TextDelta]) -> TextDelta:
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(chosen for piece in pieces for chosen in piece.tokens)
    return TextDelta(choice, text, tokens, pieces[-1].reason)


def usage(generation: Generation) -> dict[str, Any]:
    """Counts of tokens, of a generation that has settled."""
    asked, made = generation.prompt_tokens, generation.generated
    return {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
        "prompt_tokens_details": {"cached_tokens": generation.reused},
    }
