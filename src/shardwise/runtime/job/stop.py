"""Ending early and in order: a signal to any rank stops all of them after the same step.

SIGTERM and SIGINT are noted, not obeyed at once. The rank that was told writes "stop after step n" into the job's
store, and every rank looks there before each step. Ranks cannot be more than a step apart, since each step has a
collective over all of them at its end, so no rank has begun a step two ahead. Where replicas train apart from each
other, only an outer step has one: they stop after the next of these.
"""

import shlex
import signal
import threading
from types import FrameType

import torch.distributed as dist

from shardwise.runtime.sync.outer_step import Rounds

_KEY = "shardwise/stop-before"


class Stopped(Exception):
    """No error: the run was told to end. step: steps done, all of them saved. out: its run directory."""

    def __init__(self, step: int, out: str) -> None:
        super().__init__(f"stopped after step {step}; resume with: shardwise train --resume {shlex.quote(out)}")
        self.step, self.out = step, out


class StopRequest:
    """Whether this job was told to stop. Installs signal handlers where it may (the main thread)."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._noted = False
        self._told = False
        self._store = dist.distributed_c10d._get_default_store()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C means it. SIGTERM may come twice: from a cluster to every process, and passed on by torchrun.
        if self._noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = True

    @property
    def noted(self) -> bool:
        return self._noted

    def agreed(self, step: int) -> bool:
        """Called by every rank before `step`: whether all end here. All are told the same, whenever each has seen what
        was written."""
        if self._noted and not self._told:
            self._told = True
            # The first to write wins: a store has no other way to agree.
            self._store.compare_set(_KEY, "", str(self._rounds.ends_after(step)))
        if not self._rounds.begins(step):
            return False  # the store may be far away
        return self._store.check([_KEY]) and step >= int(self._store.get(_KEY))
