"""Bodies of completions and chats as JSON Schema (`schemas.json`), and `CompletionRequest`, their meaning.

Fields of OpenAI's interface that this server cannot honor are described with the values that ask for nothing, so that
anything else is rejected by name instead of being ignored in silence.
"""

import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardwise.serving.http.problems import Problem
from shardwise.serving.http.schema import Schema
from shardwise.serving.messages import Sampling

_COMPLETION_TOKENS = 16
_SEEDS = 1 << 63

_DESCRIBED = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
ERROR: Schema = _DESCRIBED["Error"]
REFUSALS: dict[str, str] = _DESCRIBED["refusals"]
"""Status of HTTP -> why requests for generation are rejected with it."""


def _body(title: str, required: str) -> Schema:
    return {
        "type": "object",
        "title": title,
        "additionalProperties": False,
        "required": [required],
        "properties": {**_DESCRIBED[title], **_DESCRIBED["common"]},
    }


def _messages() -> Schema:
    """A conversation. An answer that is handed back may be without content."""
    fields: dict[str, Schema] = _DESCRIBED["Message"]
    others = {"enum": ["system", "developer", "user"], "description": "or assistant; tools are not supported"}
    content = {"anyOf": [*fields["content"]["anyOf"], {"type": "null"}], "default": None}
    shape = {"type": "object", "title": "a message", "additionalProperties": False}
    kinds = [
        {**shape, "required": ["role", "content"], "properties": {"role": others, **fields}},
        {**shape, "required": ["role"], "properties": {"role": {"enum": ["assistant"]}, **fields, "content": content}},
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": kinds}, "description": "the conversation so far"}


COMPLETION = _body("CompletionRequest", "prompt")
CHAT = _body("ChatCompletionRequest", "messages")
CHAT["properties"]["messages"] = _messages()


@dataclass(frozen=True)
class CompletionRequest:
    """Settings of one request for completions. max_tokens: None where nothing was asked for: `usual` then, None for all
    that the context leaves. sampling: of the first choice, with any max_tokens; its stop tokens are the request's own.
    stop: texts. logprobs: whether log-probabilities are wanted. echo: answers begin with their prompt. ignore_eos: the
    model's ends end no answer."""

    max_tokens: int | None
    usual: int | None
    sampling: Sampling
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool
    ignore_eos: bool

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Request in a body that `schema.checked` has let pass. Raises `Problem` (400) for fields that contradict each
        other."""
        stop, options = body["stop"], body["stream_options"] or {}
        seed = secrets.randbelow(_SEEDS) if body["seed"] is None else body["seed"] % _SEEDS
        longest = body.get("max_completion_tokens")
        logprobs, echo = body["logprobs"] is not None and body["logprobs"] is not False, bool(body["echo"])
        top = body["top_logprobs"] if "top_logprobs" in body else int(body["logprobs"] or 0)
        if top and not logprobs:
            raise Problem(400, "top_logprobs are only given with logprobs: true", param="top_logprobs")
        if body["max_tokens"] == 0 and not echo:
            raise Problem(400, "max_tokens is at least 1 without echo", param="max_tokens")
        if options.get("include_usage") and not body["stream"]:
            raise Problem(400, "stream_options is only known with stream", param="stream_options")
        return cls(
            max_tokens=body["max_tokens"] if longest is None else longest,
            usual=_COMPLETION_TOKENS if "prompt" in body else None,
            sampling=Sampling(
                temperature=float(body["temperature"]),
                top_k=max(0, body["top_k"]),
                top_p=float(body["top_p"]),
                seed=seed,
                stop_tokens=tuple(body["stop_token_ids"]),
                logprobs=logprobs,
                top_logprobs=top,
                prompt_logprobs=logprobs and echo,
                min_tokens=body["min_tokens"],
            ),
            n=body["n"],
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stream=body["stream"],
            include_usage=bool(options.get("include_usage")),
            logprobs=logprobs,
            echo=echo,
            ignore_eos=body["ignore_eos"],
        )

    def sampling_of(self, choice: int, max_tokens: int, ends: tuple[int, ...]) -> Sampling:
        """The sampling of one choice of a prompt: the first has the seed that was asked for, the others' follow from
        it, so that neighbouring seeds share nothing. ends: the model's own."""
        seed = self.sampling.seed
        if choice:
            digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") % _SEEDS
        stops = self.sampling.stop_tokens + (() if self.ignore_eos else ends)
        return replace(self.sampling, seed=seed, max_tokens=max_tokens, stop_tokens=stops)


def description(version: str, guarded: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole description. guarded: beginnings of paths that need a key."""
    key = "/v1/" in guarded
    paths: dict[str, Any] = {
        "/v1/models": {"get": _reading("the served model", key)},
        "/v1/models/{model}": {"get": _reading("the served model, by its name", key, {"404": "no such model"})},
        "/v1/completions": {"post": _asking("continue prompts", COMPLETION, key)},
        "/v1/chat/completions": {"post": _asking("answer a conversation", CHAT, key)},
        "/health": {"get": _reading("whether requests are taken", False, {"503": REFUSALS["503"]})},
        "/metrics": {"get": _reading("counters, gauges and histograms", "/metrics" in guarded, kind="text/plain")},
        "/openapi.json": {"get": _reading("this description", False)},
    }
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    components: dict[str, Any] = {
        "schemas": {COMPLETION["title"]: COMPLETION, CHAT["title"]: CHAT, "Error": ERROR},
    }
    if key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shardwise", "version": version, "description": "A part of OpenAI's interface."},
        "paths": paths,
        "components": components,
    }


def _reading(
    summary: str, guarded: bool, refusals: dict[str, str] | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    return _operation(summary, guarded, {kind: {"schema": {}}}, refusals or {})


def _asking(summary: str, body: Schema, guarded: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    schema = {"$ref": f"#/components/schemas/{body['title']}"}
    asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return _operation(summary, guarded, content, REFUSALS) | asked


def _operation(summary: str, guarded: bool, content: dict[str, Any], refusals: dict[str, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if guarded:
        refusals = {"401": "the key is missing or wrong", **refusals}
    responses = {status: {"description": what, "content": error} for status, what in refusals.items()}
    return {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": content}, **responses},
        **({"security": [{"key": []}]} if guarded else {}),
    }
