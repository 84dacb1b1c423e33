"""Requests to a generation engine and its answers: the messages between a front end and the ranks.

Between ranks, and between hosts, they are JSON of a fixed form: reading one runs no code. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.codec import plain, read
from shardwise.options import check_fields, option

Reason = Literal["stop", "length", "cancelled", "error"]
NOTHING = -1
"""In place of a token that could not be chosen."""
MOST_TOP = 20
"""Likeliest tokens that can be reported with each token."""

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens with the natural logarithms of their probabilities, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens, and for ending an answer. Raises `UserError` for values outside their range."""

    max_tokens: int = option(
        16, "tokens of each answer at most", metavar="N", least=0, shown="64", flag="--max-new-tokens"
    )
    """0 only scores the prompt."""
    temperature: float = option(0.0, "0 takes the likeliest token", metavar="X", least=0, most=100)
    top_k: int = option(0, "among the N likeliest, 0 for all", metavar="N", least=0)
    top_p: float = option(1.0, "among the likeliest tokens with this share", metavar="X", positive=True, most=1)
    """The likeliest tokens whose probabilities add up to this much (Holtzman et al. 2020)."""
    seed: int = option(0, "equal seeds give equal answers", metavar="N")
    """Seed of the request's own random numbers, whatever else is being served and under any layout."""
    stop_tokens: tuple[int, ...] = ()
    """Ids after which nothing follows; they are part of the answer."""
    logprobs: bool = True
    """Whether the probabilities of chosen tokens are computed, which takes a pass over all others'."""
    top_logprobs: int = option(0, "likeliest tokens that are reported with each token", least=0, most=MOST_TOP)
    prompt_logprobs: bool = False
    """Whether the probability of each token of the prompt but the first is reported."""
    min_tokens: int = option(0, "tokens of each answer at least", least=0)
    """Until then no token of `stop_tokens` is chosen."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Request:
    """One sequence to be continued. id: unique within a service. prompt: token ids, at least one."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    """Cancel the rest of a request."""

    id: int


@dataclass(frozen=True)
class Drain:
    """Nothing more will come: finish what is there, then end."""


@dataclass(frozen=True)
class Token:
    """The next token of a request. logprob: natural logarithm of its probability before any temperature or cut; NaN
    where it is not wanted."""

    id: int
    token: int
    logprob: float
    top: Top = ()
    prompt: bool = False
    """Whether it is the next token of the prompt, whose first one is left out."""


@dataclass(frozen=True)
class Finished:
    """A request is over. reused: prompt tokens whose keys and values were found in the cache."""

    id: int
    reason: Reason
    reused: int = 0
    error: str = ""


@dataclass(frozen=True)
class ReplicaLoad:
    """Load of a replica, reported from time to time. waiting, running: requests; pages: in use, of so many."""

    waiting: int
    running: int
    pages: int
    of_pages: int


Command = Request | Cancel | Drain
Answer = Token | Finished | ReplicaLoad


COMMANDS: dict[str, type] = {kind.__name__: kind for kind in (Request, Cancel, Drain)}


def encode(messages: Sequence[object]) -> bytes:
    """Messages as ranks send them to each other: a JSON list of [kind, fields]."""
    return json.dumps([(type(item).__name__, plain(item)) for item in messages], separators=(",", ":")).encode()


def decode(data: bytes, kinds: Mapping[str, type] = COMMANDS) -> list[Any]:
    """The messages of `encode`. Raises `ValueError`, `TypeError`, `KeyError` or `UserError` for anything else."""
    return [read(kinds[name], fields) for name, fields in json.loads(data)]
