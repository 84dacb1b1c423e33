"""A mistake that one rank sees: all ranks of a split module end with its message, at once.

The rank that fails leaves the message in the job's store and breaks its connections, so that no rank waits for it until
a timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.errors import UserError
from shardwise.runtime.transport.comms import Comms

MESSAGE, NOTICED = "message", "noticed"
"""Keys in the store: the first rank's message, and the number of ranks that have seen it or failed themselves."""
PATIENCE_S, NAP_S = 2.0, 0.01
"""Seconds that a rank which may have the store waits for others to read it."""


class _PeerFailed(UserError):
    """Another rank's message."""


class Failures:
    """The first failure of a split's ranks. Every rank makes one, in the same order of splits."""

    def __init__(self, comms: Comms) -> None:
        self._comms, self._rank, self._ranks = comms, dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"shardwise splits of rank {self._rank}", 1)
        self._store = dist.PrefixStore(f"shardwise split {number}", store)
        self._ended = ""
        if self._ranks > 1:
            comms.watch(self._look)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Around what all ranks do together. Raises a rank's own error there, and `UserError` with its message on all
        others."""
        if self._ended:
            raise UserError(f"this split has ended: {self._ended}; split the module again")
        try:
            yield
        except Exception as error:
            if self._ranks == 1 or self._ended:
                raise
            theirs = error if isinstance(error, _PeerFailed) else None
            if theirs is None and isinstance(error, RuntimeError) and (message := self._message()):
                theirs = _PeerFailed(message)  # a connection that the other rank broke
            self._end(error)
            if theirs is None:
                raise
            raise UserError(str(theirs)) from None

    def _message(self) -> str:
        return self._store.get(MESSAGE).decode() if self._store.check([MESSAGE]) else ""

    def _look(self) -> None:
        if message := self._message():
            raise _PeerFailed(message)

    def _end(self, error: Exception) -> None:
        """Leave the message, unless another rank was first, and let no rank wait."""
        words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        try:
            self._ended = self._store.compare_set(MESSAGE, "", f"rank {self._rank}: {words}").decode()
            self._comms.abort()
            self._store.add(NOTICED, 1)
            until = time.monotonic() + PATIENCE_S
            while self._store.add(NOTICED, 0) < self._ranks and time.monotonic() < until:
                time.sleep(NAP_S)
        except RuntimeError:  # the store has gone with its process
            self._ended = self._ended or words
