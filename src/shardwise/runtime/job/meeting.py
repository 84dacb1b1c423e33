"""Rendezvous of the ranks of a job: a store that all of them see, and what rank 0 has to say to all.

torchrun keeps one store for all attempts, with what earlier ones left in it. So nothing in it is trusted: each rank
leaves a new token and waits for rank 0's answer to that very token, which names the round. What follows happens in a
part of the store that belongs to the round.
"""

import json
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from shardwise.runtime.job.pulse import ranks_in_words

_PAUSE = 0.01


def meet(rank: int, world: int, words: str, limit: float) -> tuple[dist.Store, str]:
    """(the job's store of this round, rank 0's `words`), once all ranks are there.

    Raises `RuntimeError` naming who has not come within `limit` seconds, and what torch raises for a store that cannot
    be reached.
    """
    where = os.environ.get("SHARDWISE_RENDEZVOUS", "env://")
    store, _, _ = next(dist.rendezvous(where, rank, world, timeout=timedelta(seconds=limit)))
    store = dist.PrefixStore("shardwise", store)
    number, message = _receive(store, world, words, limit) if rank == 0 else _come(store, rank, limit)
    return dist.PrefixStore(f"round-{number}", store), message


def _receive(store: dist.Store, world: int, words: str, limit: float) -> tuple[int, str]:
    number = store.add("rounds", 1)
    answer = json.dumps([number, words])
    missing = set(range(1, world))
    deadline = time.monotonic() + limit
    while missing:
        for item in sorted(missing):
            if store.check([f"seen/{number}/{item}"]):
                missing.discard(item)
            elif store.check([f"here/{item}"]):
                store.set(f"answer/{item}/{store.get(f'here/{item}').decode()}", answer)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"{ranks_in_words(list(missing))} did not start within {limit:.0f} s")
        time.sleep(_PAUSE)
    return number, words


def _come(store: dist.Store, rank: int, limit: float) -> tuple[int, str]:
    token = secrets.token_hex(8)
    store.set(f"here/{rank}", token)
    key = f"answer/{rank}/{token}"
    try:
        store.wait([key], timedelta(seconds=limit))
    except RuntimeError:
        raise RuntimeError(f"rank 0 did not start within {limit:.0f} s") from None
    number, message = json.loads(store.get(key))
    store.set(f"seen/{number}/{rank}", "")
    return number, message
