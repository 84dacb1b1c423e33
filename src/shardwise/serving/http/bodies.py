"""Bodies of completions and chats as JSON Schema (`schemas.json`), and `CompletionRequest`, their meaning.

Fields of OpenAI's interface that this server cannot honor are described with the values that ask for nothing, so that
anything else is rejected by name instead of being ignored in silence.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


COMPLETION = _body("CompletionRequest", "prompt")
CHAT = _body("ChatCompletionRequest", "messages")


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
        """Request in a body that `schema.checked` has let pass."""
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
