"""Requests of a closed loop: clients that each send a new one of equal length as soon as their last one is answered.

With c sequences of n tokens at a time in a replica, each of the other c - 1 has its prompt read once between a request
and its last token:

    answer = waiting + read + (c - 1) x prompt + (n - 1) decode(c)

Prompts that fit one pass come in groups, of which half is read before the mean client's; a group waits for the one
under way like customers of equal service times (M/D/1, Pollaczek and Khinchine), where prompts are read for a share u
of the time:

    first token = waiting + read + (g - 1) / 2 x prompt + u / (2 - 2 u) x g x prompt
    token       = (answer - first token) / (n - 1)

A front end streams the tokens of all sequences one by one, s seconds each. Where that takes longer than making them,
c x n x s seconds pass between a request and its last token. Of these more seconds, clients in step see all from token
to token, as they fall behind more and more; clients at random see all before their first token, as each of their tokens
is equally late. What is priced is the mean of both.

Where clients outnumber sequences, they wait for the others' answers, so that by Little's law clients x n = tokens/s x
seconds of an answer, waiting included.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from shardwise.arrays import Num

T = TypeVar("T")


class RequestSeconds(NamedTuple, Generic[T]):
    """Means over all clients, in seconds."""

    first: T
    """From a request to its first token, waiting included."""
    each: T
    """From one token to the next."""
    answer: T
    """From a request to its last token."""


def closed_loop(
    token: Num, read: Num, busy: Num, running: Num, clients: Num, output: int, together: Num = 1.0, stream: Num = 0.0
) -> RequestSeconds[Num]:
    """Means over `clients` of one replica, of which `running` are served at a time. token: seconds in which each of
    these has one more token; read: in which a prompt is read alone, up to its first token; busy: by which each further
    prompt makes that longer; output: tokens of an answer; together: prompts that one pass has room for; stream: of the
    front end for a token."""
    group, others = np.clip(together, 1.0, running), (running - 1) * busy
    served = read + (output - 1) * token + others
    reading = others / served
    queued: Num = (group - 1) / 2 * busy + reading / (2 - 2 * reading) * group * busy
    queued = np.minimum(queued, others) if output > 1 else others
    late = np.maximum(running * output * stream - served, 0.0)
    served = served + late
    queued = queued + (late / 2 if output > 1 else late)
    waiting = (clients / running - 1) * served
    each = (served - read - queued) / (output - 1) if output > 1 else token + others
    return RequestSeconds(waiting + read + queued, each, waiting + served)
