"""What is asked of a generation engine and what it answers: the messages between a front end and the ranks.

Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import UserError

Reason = Literal["stop", "length", "cancelled", "error"]
NOTHING = -1
"""In place of a token that could not be chosen."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when there is none.

    temperature: 0 takes the likeliest token. top_k: choose among so many likeliest, 0 for all. top_p: among the
    likeliest whose probabilities add up to this much (Holtzman et al. 2020). seed: of the request's own random numbers;
    equal seeds give equal ones, whatever else is being served and under any layout. stop_tokens: ids after which
    nothing follows (they are given out, too). logprobs: whether the probabilities of chosen tokens are wanted, which
    takes a pass over all others'. Raises `UserError` for values outside their range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    logprobs: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise UserError(f"temperature must lie between 0 and 100, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0: all tokens), not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must lie above 0 and not above 1, not {self.top_p}")


@dataclass(frozen=True)
class Request:
    """One sequence to be continued. id: unique within a service. prompt: token ids, at least one."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    """Nobody wants the rest of a request."""

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
