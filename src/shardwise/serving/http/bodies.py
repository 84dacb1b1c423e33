"""What may be asked for: the bodies of completions and chats as JSON Schema, and `CompletionRequest`, what they come
down to.

Fields of OpenAI's interface that this server cannot honour are described with the values that ask for nothing, so that
anything else is refused by name instead of being ignored in silence.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Any

from shardwise.serving.http.schema import Schema
from shardwise.serving.messages import Sampling

MOST_CHOICES = 128
_COMPLETION_TOKENS = 16
_SEEDS = 1 << 63
_MOST_TOKENS = 1 << 31


def _only(*values: Any, why: str) -> Schema:
    return {"enum": list(values), "default": values[0], "description": why}


def _field(kind: str, default: Any, about: str, **words: Any) -> Schema:
    """A field that may be null."""
    return {"type": [kind, "null"], "default": default, "description": about, **words}


_IGNORED: Schema = {"description": "accepted, and not used"}

_TOKENS = {"type": "array", "title": "an array of token ids", "minItems": 1, "items": {"type": "integer", "minimum": 0}}

_COMMON: dict[str, Schema] = {
    "model": _field("string", None, "the served model's name; left out, it is meant"),
    "temperature": _field("number", 1.0, "0 takes the likeliest token", minimum=0, maximum=2),
    "top_p": _field(
        "number",
        1.0,
        "choose among the likeliest tokens whose probabilities add up to so much",
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": _field("integer", 0, "choose among so many likeliest tokens, 0 for all", minimum=0, maximum=_MOST_TOKENS),
    "n": _field("integer", 1, "choices for each prompt", minimum=1, maximum=MOST_CHOICES),
    "seed": _field("integer", None, "equal seeds give equal random numbers", minimum=-_SEEDS, maximum=_SEEDS - 1),
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {
                "type": "array",
                "title": "an array of at most 4 strings",
                "maxItems": 4,
                "items": {"type": "string", "minLength": 1},
            },
            {"type": "null"},
        ],
        "description": "texts that end the answer, and are not part of it",
    },
    "stream": _field("boolean", False, "server-sent events instead of one answer"),
    "stream_options": {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            "include_usage": _field("boolean", False, "a last event with the counts of tokens"),
            "include_obfuscation": _only(None, False, why="events are not padded"),
        },
        "description": "only with stream",
    },
    "frequency_penalty": _only(None, 0, why="penalties are not supported"),
    "presence_penalty": _only(None, 0, why="penalties are not supported"),
    "logit_bias": _only(None, {}, why="biased logits are not supported"),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), _IGNORED),
}

COMPLETION: Schema = {
    "type": "object",
    "title": "CompletionRequest",
    "additionalProperties": False,
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "title": "an array of strings", "minItems": 1, "items": {"type": "string"}},
                _TOKENS,
                {"type": "array", "title": "an array of arrays of token ids", "minItems": 1, "items": _TOKENS},
            ],
            "description": "what is continued: one or several texts, or their tokens",
        },
        "max_tokens": _field(
            "integer",
            None,
            f"the longest answer in tokens; {_COMPLETION_TOKENS}, or what the context leaves",
            minimum=1,
            maximum=_MOST_TOKENS,
        ),
        "logprobs": _only(None, 0, why="only those of the chosen tokens are known: 0"),
        "echo": _only(None, False, why="the prompt is not given back"),
        "suffix": _only(None, "", why="text is not filled in before a suffix"),
        "best_of": _only(None, 1, why="choices are not ranked"),
        **_COMMON,
    },
}

_PARTS: Schema = {
    "type": "array",
    "title": "an array of parts",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "additionalProperties": False,
        "properties": {
            "type": {"enum": ["text"], "description": "the model reads nothing but text"},
            "text": {"type": "string"},
        },
    },
}

_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"], "description": "tools are not supported"},
        "content": {"anyOf": [{"type": "string"}, _PARTS]},
        "name": _field("string", None, "of who speaks, where the chat template knows names"),
        "annotations": _only(None, [], why="of an answer that is given back"),
        **dict.fromkeys(("refusal", "audio"), _only(None, why="of an answer that is given back")),
        "function_call": _only(None, why="functions are not supported"),
        "tool_calls": _only(None, [], why="tools are not supported"),
    },
}

CHAT: Schema = {
    "type": "object",
    "title": "ChatCompletionRequest",
    "additionalProperties": False,
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE, "description": "the conversation so far"},
        "max_completion_tokens": _field(
            "integer", None, "the longest answer in tokens; what the context leaves", minimum=1, maximum=_MOST_TOKENS
        ),
        "max_tokens": _field("integer", None, "the same, by its old name", minimum=1, maximum=_MOST_TOKENS),
        "logprobs": _field("boolean", False, "give the probabilities of the chosen tokens"),
        "top_logprobs": _only(None, 0, why="only the probabilities of the chosen tokens are known"),
        "response_format": _only(None, {"type": "text"}, why="answers are text, in no prescribed form"),
        "tools": _only(None, [], why="tools are not supported"),
        "tool_choice": _only(None, "none", "auto", why="tools are not supported"),
        "parallel_tool_calls": _IGNORED,
        "functions": _only(None, [], why="functions are not supported"),
        "function_call": _only(None, "none", "auto", why="functions are not supported"),
        "modalities": _only(None, ["text"], why="answers are text"),
        **_COMMON,
    },
}


@dataclass(frozen=True)
class CompletionRequest:
    """Settings of one request for completions. max_tokens: None where nothing was asked for: `usual` then, None for all
    that the context leaves. sampling: of the first choice, with any max_tokens. stop: texts. logprobs: whether those of
    the chosen tokens are wanted."""

    max_tokens: int | None
    usual: int | None
    sampling: Sampling
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    @classmethod
    def of(cls, body: dict[str, Any]) -> CompletionRequest:
        """What a body asks for that `schema.checked` has let pass."""
        stop, options = body["stop"], body["stream_options"] or {}
        seed = secrets.randbelow(_SEEDS) if body["seed"] is None else body["seed"] % _SEEDS
        longest = body.get("max_completion_tokens")
        logprobs = body["logprobs"] is True or (body["logprobs"] == 0 and body["logprobs"] is not False)
        return cls(
            max_tokens=body["max_tokens"] if longest is None else longest,
            usual=_COMPLETION_TOKENS if "prompt" in body else None,
            sampling=Sampling(
                temperature=float(body["temperature"]),
                top_k=body["top_k"],
                top_p=float(body["top_p"]),
                seed=seed,
                logprobs=logprobs,
            ),
            n=body["n"],
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stream=body["stream"],
            include_usage=bool(options.get("include_usage")),
            logprobs=logprobs,
        )

    def sampling_of(self, choice: int, max_tokens: int, stop_tokens: tuple[int, ...]) -> Sampling:
        """The sampling of one choice of a prompt: the first has the seed that was asked for, the others' follow from
        it, so that neighbouring seeds share nothing."""
        seed = self.sampling.seed
        if choice:
            digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") % _SEEDS
        return replace(self.sampling, seed=seed, max_tokens=max_tokens, stop_tokens=stop_tokens)
