"""Signs of life: what each rank is doing, in memory shared with the launcher, and which rank is to blame.

A rank notes every part that it computes and every collective that it enters: a few bytes in a mapped file, no system
call. Its launcher reads them and finds the rank that made no progress, also one that is stuck outside of any
collective, or that no longer runs Python code; without a launcher (under torchrun) a thread of the rank itself looks.

Imports no torch.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TRAINING, SAVING = 0, 1
"""The two threads of a rank that can be stuck: the training's, and that of a save under way."""

IDLE, WORKING, WAITING, SAVE_AWAITED = range(4)
"""Nothing to do; at work; in a collective that others must join; waiting for the rank's own save."""

STARTING = 120.0
"""Seconds that ranks get to start and to meet, and in the end to leave."""
MARGIN = 3.0
"""Seconds beyond the limit that collectives wait by themselves: the launcher knows better which rank to name."""

_HEAD = struct.Struct("<dqB")
_WORDS = 120
_LANE = 512
SIZE = 2 * _LANE
"""Bytes of a rank's file."""

Memory = mmap.mmap | bytearray


@dataclass(frozen=True)
class Sign:
    """The latest sign of one thread of a rank. time: on the monotonic clock, which all processes of a host share.

    step: from 1, 0 before the first one. doing: the part of the step; after: the collective that was entered last.
    """

    time: float
    step: int
    state: int
    doing: str
    after: str

    @property
    def place(self) -> str:
        """Place of the rank in its step, in words that follow "rank 2 ..."; empty before it has done anything."""
        if self.state == IDLE:
            return ""
        words = f" at step {self.step}" if self.step else ""
        if self.state == WAITING:
            return f"{words} in {self.after}"
        words += f" in {self.doing}" if self.doing else ""
        return words + (f", after {self.after}" if self.after else "")


class Pulse:
    """One thread's signs. Without shared memory they go to a private buffer.

    `collective` and `work` are called thousands of times a second. Nothing guards them against a reader in between, who
    may find new words beside an old moment, but never a moment that was not written.
    """

    def __init__(self, memory: Memory | None = None, lane: int = TRAINING) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self._at = lane * _LANE
        self._step = 0
        self.waited = 0.0
        """Seconds from each `wait` to the sign after it."""
        self._waiting_since: float | None = None

    def step(self, number: int) -> None:
        """A training step begins; counted from 1."""
        self._step = number
        self.work("the next batch")

    def work(self, doing: str | None = None) -> None:
        """The thread makes progress; `doing` says with what, None with what it did before it waited."""
        if doing is not None:
            self._write(_HEAD.size, doing)
        self._head(WORKING)

    def collective(self, words: str) -> None:
        self._write(_HEAD.size + _WORDS, words)
        self._head(WORKING)

    def wait(self, words: str | None = None) -> None:
        """From here until `work` it is for others to make progress, in a collective: the one that was entered last."""
        if words is not None:
            self._write(_HEAD.size + _WORDS, words)
        self._head(WAITING)

    def await_save(self) -> None:
        """From here until `work` the rank's own save is waited for."""
        self._head(SAVE_AWAITED)

    def idle(self) -> None:
        self._head(IDLE)

    def _head(self, state: int) -> None:
        now = time.monotonic()
        if self._waiting_since is not None:
            self.waited += now - self._waiting_since
        self._waiting_since = now if state == WAITING else None
        # In one copy: `pack_into` begins with zeros, which is what a rank that never began has there.
        self._memory[self._at : self._at + _HEAD.size] = _HEAD.pack(now, self._step, state)

    def _write(self, at: int, text: str) -> None:
        data = text.encode()[:_WORDS]
        self._memory[self._at + at : self._at + at + _WORDS] = data.ljust(_WORDS, b"\0")


def memory(path: Path) -> mmap.mmap:
    """The memory of a rank's signs: the file's that its launcher has made."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


def create(path: Path) -> mmap.mmap:
    """Make a rank's file, in the process that starts it, and map it."""
    path.write_bytes(bytes(SIZE))
    return memory(path)


def read(memory: Memory, lane: int = TRAINING) -> Sign:
    """The latest sign."""
    at = lane * _LANE
    moment, step, state = _HEAD.unpack_from(memory, at)
    starts = at + _HEAD.size, at + _HEAD.size + _WORDS
    words = (bytes(memory[start : start + _WORDS]).rstrip(b"\0").decode(errors="replace") for start in starts)
    return Sign(moment, step, state, *words)


def signs_in(memory: Memory) -> tuple[Sign, Sign]:
    return read(memory, TRAINING), read(memory, SAVING)


Signs = Mapping[int, tuple[Sign, Sign]]
"""Rank -> the signs of its training and of its saving."""


def stuck(signs: Signs, limit: float, now: float) -> tuple[int, str] | None:
    """The rank that has kept the others up for `limit` seconds, and a line that says so. None when all is well.

    A rank that waits in a collective waits for another one: that other one is named, and who waits for it. When all
    wait, collectives do not match, or the network has lost something; the line then tells where each of them is.
    """
    return _silent(signs, limit, now) or _deadlocked(signs, limit, now)


def _silent(signs: Signs, limit: float, now: float) -> tuple[int, str] | None:
    working = [(sign.time, rank, sign) for rank, lanes in signs.items() for sign in lanes if sign.state == WORKING]
    if not working:
        return None
    moment, rank, sign = min(working, key=lambda entry: entry[:2])
    if now - moment <= limit:
        return None
    return rank, f"rank {rank} made no progress for {now - moment:.0f} s{sign.place}{waiters(signs, rank)}"


def _deadlocked(signs: Signs, limit: float, now: float) -> tuple[int, str] | None:
    training = {rank: lanes[TRAINING] for rank, lanes in signs.items()}
    # Somebody who still works, or is not there yet, may join those who wait.
    if not training or any(sign.state != WAITING or now - sign.time <= limit for sign in training.values()):
        return None
    first = min(training, key=lambda rank: (training[rank].step, training[rank].time, rank))
    places: dict[str, list[int]] = {}
    for rank, sign in training.items():
        places.setdefault(sign.place, []).append(rank)
    where = ", ".join(ranks_in_words(ranks) + place for place, ranks in places.items())
    return first, f"no rank made progress for {now - training[first].time:.0f} s: each waits for others, {where}"


def waiters(signs: Signs, rank: int) -> str:
    """Ranks that wait for `rank`, with the collective, in words that follow on a line about it."""
    results: dict[str, list[int]] = {}
    for other, lanes in signs.items():
        if other != rank:
            for sign in lanes:
                if sign.state == WAITING:
                    results.setdefault(sign.after, []).append(other)
    if not results:
        return ""
    return "; " + ", ".join(f"{ranks_in_words(ranks)} waited for it in {what}" for what, ranks in results.items())


def ranks_in_words(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`."""
    ranks = sorted(set(ranks))
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def watch_over(memory: Memory, rank: int, limit: float, act: Callable[[str], object]) -> None:
    """Have a thread call `act` with a line when this process's own rank is stuck; for ranks without a launcher.

    A rank that is stuck in code that holds Python's lock is found by its peers instead, when their collectives end.
    """

    def look() -> None:
        while True:
            time.sleep(min(1.0, limit / 10))
            # Alone it cannot know whether all ranks wait; their collectives have a limit of their own.
            if verdict := _silent({rank: signs_in(memory)}, limit, time.monotonic()):
                act(verdict[1])
                return

    threading.Thread(target=look, name="pulse", daemon=True).start()


def watched() -> bool:
    """Whether a launcher looks at this rank's signs."""
    return "SHARDWISE_PULSE" in os.environ


def from_environment() -> Memory:
    """The memory that this rank's launcher has made for it, or its own."""
    name = os.environ.get("SHARDWISE_PULSE")
    return memory(Path(name)) if name else bytearray(SIZE)
