"""`Service`: a running engine as its front end sees it. It starts the ranks, hands requests to the replica that has
least to do, and answers to whoever asked; when a rank dies, it says so to everybody. Imports no torch.

The command's process owns it. The first rank of each replica connects to a Unix socket in a folder that is nobody
else's: lists of `Command` go down, lists of `Answer` come up.
"""

import itertools
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn, Self

from shardwise.errors import UserError
from shardwise.runtime.job.launch import RANK_FAILED, USER_MISTAKE, Ending, RunFailed, supervise
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.signals import handled
from shardwise.serving.job import Loading, Ready, ServingJob
from shardwise.serving.messages import Answer, Cancel, Command, Drain, Finished, ReplicaLoad, Request, Sampling, Token
from shardwise.serving.remote import MessageChannel, MessageListener

Sink = Callable[[Token | Finished], object]

JOB, SOCKET, KEY = "job.json", "socket", "key"
"""Files of the folder that a service shares with its ranks."""
PRIMITIVES, _KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 128
"""Number of products of different shapes that stay compiled, in oneDNN's own cache and in that of torch's layer above
it (ideep), which holds on to what the first one lets go. As many are possible as numbers of tokens in a step, each
takes 0.3 MB, and the 1,024 that both keep by themselves fill a rank's memory. A user's own setting counts."""
TUNABLES, MEMORY = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.mxfast=0:glibc.malloc.tcache_count=200"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 1.0
"""Seconds that ranks get to end when the service is closed."""
_LONGEST = 70
"""Characters of a folder for temporary files: a socket's path has 26 more, and 104 on some systems at most."""


def silent(line: str) -> None:
    """Say nothing."""


_RANK, _EMULATED = "shardwise.serving.rank", "shardwise.emulate.serving"
"""Modules that are run as ranks; this room imports neither."""


class Service:
    """A generation engine on the ranks of this host; may be used from any thread.

    `start` it, `submit` requests, and `close` it, or use it as a context manager. echo: gets lines about loading.
    joined: another launcher has started the ranks, this process as rank 0, which it starts as its child.
    """

    def __init__(self, job: ServingJob, *, echo: Callable[[str], object] = silent, joined: bool = False) -> None:
        self.job = job
        self._echo = echo
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._sinks: dict[int, tuple[int, Sink]] = {}
        """Request -> (its replica, who wants its answers)."""
        self._load: dict[int, ReplicaLoad] = {}
        self._ready: dict[int, Ready] = {}
        self._ways: dict[int, Connection | MessageChannel] = {}
        self._ending: Ending | None = None
        self._closing = False
        self._stop: list[int] = []
        self._threads: list[threading.Thread] = []
        self._folder: Path | None = None
        self._joined = joined
        self._lost = ""
        self._folders = ExitStack()

    # -- its life

    def start(self) -> Ready:
        """Start the ranks; returns when every replica has its weights, with what the first one says of itself.

        Raises `UserError` for what the user has asked for in vain, and `RunFailed` when a rank dies.
        """
        # a folder in which the name of a socket is not too long
        usual = Path(tempfile.gettempdir())
        self._folder = self._folders.enter_context(
            temporary_folder(usual if len(str(usual)) < _LONGEST else Path("/tmp"))
        )
        key = secrets.token_bytes(32)
        listener: _LocalListener | MessageListener
        if self._joined:
            listener = MessageListener(self._folder, self.job, key)
        else:
            listener = _LocalListener(self._folder, self.job, key)
        try:
            self._thread(self._supervise, listener.wake)
            for _ in range(self.job.replicas):
                way = listener.accept()
                try:
                    replica = way.recv()
                except EOFError:
                    break  # it was `_supervise`: the ranks have ended
                self._ways[replica] = way
                self._thread(self._listen, replica, way)
        finally:
            listener.close()
        with self._changed:
            self._changed.wait_for(lambda: self._ending is not None or len(self._ready) == self.job.replicas)
            if self._ending is None:
                return self._ready[0]
        raise self._ending.error() or RunFailed("the ranks have ended before they were ready")

    def _thread(self, target: Callable[..., object], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True, name=target.__name__.strip("_"))
        self._threads.append(thread)
        thread.start()

    def _supervise(self, wake: Callable[[], object]) -> None:
        """Run the ranks to their end, whatever it is. They live as long as this thread. wake: ends `accept`."""
        assert self._folder is not None
        try:
            ending = supervise(
                [sys.executable, "-m", _EMULATED if self.job.emulate else _RANK, str(self._folder)],
                1 if self._joined else self.job.layout.ranks,
                joined=self._joined,
                threads=self.job.threads,
                loopback=self.job.device == "cpu",
                rank0_stdout=2,
                patience=_PATIENCE,
                hang=self.job.hang,
                env=rank_variables(),
                stop=self._stop,
            )
        except UserError as error:
            ending = Ending(USER_MISTAKE, str(error))
        except BaseException as error:
            ending = Ending(1, f"the ranks could not be started: {error}")
        if self._lost:
            ending = Ending(RANK_FAILED, self._lost)
        with self._changed:
            self._ending = ending
            lost, self._sinks = list(self._sinks.items()), {}
            self._changed.notify_all()
        for number, (_, sink) in lost:
            with suppress(Exception):
                sink(Finished(number, "error", error=self.failure or "the engine has been closed"))
        # Whoever waits for a replica to connect waits for nobody.
        with suppress(OSError, EOFError):
            wake()

    def drain(self) -> None:
        """Let every request end, then the ranks; returns when they have ended. Nothing may be submitted any more."""
        with self._changed:
            self._closing = True
            for way in self._ways.values():
                _send(way, [Drain()])
            self._changed.wait_for(lambda: self._ending is not None or not self._ways)
        self.close()

    def close(self) -> None:
        """End the ranks at once, and leave nothing behind. May be called again."""
        # A second or two that must not be left half done.
        with handled(_ENDING, signal.SIG_IGN):
            with self._changed:
                self._closing = True
            self._stop.append(signal.SIGTERM)
            if self._joined:
                # Ranks of another launcher end when their channel does.
                self._close_ways()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
            self._close_ways()
            self._folders.close()

    def _close_ways(self) -> None:
        for way in self._ways.values():
            way.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def failure(self) -> str | None:
        """Why the engine has ended, in a line, where nobody has closed it; None while it runs."""
        if self._ending is None or self._closing:
            return None
        return self._ending.line or "the engine has ended"

    # -- requests

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """Have a prompt continued by the replica that has fewest requests; returns the request's number.

        sink: called with every `Token`, and at last with `Finished`, from a thread of the service; it must not wait.
        Raises `UserError` for a prompt that is empty, longer than the context allows or of unknown tokens, and
        `RunFailed` when the engine has ended.
        """
        self.check(prompt, sampling)
        with self._changed:
            if self._ending is not None or self._closing:
                raise RunFailed(self.failure or "the engine has been closed")
            number, replica = next(self._numbers), self._least_loaded()
            self._sinks[number] = replica, sink
            _send(self._ways[replica], [Request(number, tuple(prompt), sampling)])
        return number

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise `UserError` where `submit` would."""
        if not prompt:
            raise UserError("an empty prompt has nothing to continue: give at least one token")
        if not sampling.max_tokens and not (sampling.prompt_logprobs and len(prompt) > 1):
            raise UserError("max_tokens must be at least 1: there is nothing else to compute")
        most = self.job.context - sampling.max_tokens
        if len(prompt) > most:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} more exceed the context of "
                f"{self.job.context}; at most {max(0, most)} tokens of prompt, or "
                f"{max(0, self.job.context - len(prompt))} more"
            )
        vocab = self.job.model.vocab
        if wrong := next((token for token in prompt if not 0 <= token < vocab), None):
            raise UserError(f"token {wrong} does not exist: {self.job.model.name} has {vocab}, counted from 0")

    def cancel(self, number: int) -> None:
        """Cancel the rest of a request: its last answer is `Finished`. Does nothing for one that is over."""
        with self._changed:
            if number in self._sinks:
                _send(self._ways[self._sinks[number][0]], [Cancel(number)])

    def load(self) -> dict[int, ReplicaLoad]:
        with self._changed:
            empty = ReplicaLoad(0, 0, 0, self.job.pages)
            return {replica: self._load.get(replica, empty) for replica in range(self.job.replicas)}

    def _least_loaded(self) -> int:
        counts = dict.fromkeys(range(self.job.replicas), 0)
        for replica, _ in self._sinks.values():
            counts[replica] += 1
        return min(counts, key=lambda replica: (counts[replica], replica))

    # -- answers

    def _listen(self, replica: int, way: Connection | MessageChannel) -> None:
        with suppress(EOFError, OSError):
            while True:
                for answer in way.recv():
                    self._take(replica, answer)
        if self._joined and replica and not self._closing:
            # Its first rank is not this process's child, as rank 0 is: no other process sees its end.
            self._lost = self._lost or f"replica {replica} has ended"
            self._stop.append(signal.SIGTERM)

    def _take(self, replica: int, answer: Answer | Loading | Ready) -> None:
        if isinstance(answer, Loading):
            self._echo(f"reading weights: {answer.done / max(1, answer.of):4.0%}")
        elif isinstance(answer, ReplicaLoad):
            with self._changed:
                self._load[replica] = answer
        elif isinstance(answer, Ready):
            with self._changed:
                self._ready[replica] = answer
                self._changed.notify_all()
        else:
            with self._changed:
                _, sink = self._sinks.get(answer.id, (0, silent))
                if isinstance(answer, Finished):
                    self._sinks.pop(answer.id, None)
            sink(answer)  # type: ignore[arg-type]


class _LocalListener:
    """Where a service takes the sockets of its replicas, whose ranks are of this host."""

    def __init__(self, folder: Path, job: ServingJob, key: bytes) -> None:
        (folder / KEY).write_bytes(key)
        job.write(folder / JOB)
        self._path, self._key = str(folder / SOCKET), key
        self._listener = Listener(self._path, "AF_UNIX", backlog=job.replicas + 1, authkey=key)

    def accept(self) -> Connection:
        return self._listener.accept()

    def wake(self) -> None:
        """Have a waiting `accept` return, with a connection at its end."""
        Client(self._path, "AF_UNIX", authkey=self._key).close()

    def close(self) -> None:
        self._listener.close()


def rank_variables() -> dict[str, str]:
    """Variables of a rank's process, which must be there when it starts."""
    return {name: os.environ.get(name, str(_KEPT)) for name in PRIMITIVES} | _memory()


def become_rank() -> NoReturn:
    """Replace this process by a rank that another launcher has started: it learns its job from rank 0."""
    os.execve(sys.executable, [sys.executable, "-m", _RANK], {**os.environ, **rank_variables()})


def _memory() -> dict[str, str]:
    """Have glibc ask for pages of 2 MB, and keep small blocks at hand, unless the user has settings of his own. A token
    reads all weights, and with pages of 4 kB looking up where they are takes its time; and every operation asks for
    some dozens of small blocks (docs/generation.md)."""
    return {} if TUNABLES in os.environ else {TUNABLES: MEMORY}


def _send(way: Connection | MessageChannel, asked: list[Command]) -> None:
    """A rank that has gone is found by who supervises it."""
    with suppress(OSError, ValueError):
        way.send(asked)


def connect(folder: Path, replica: int) -> Connection:
    """The way of a replica's first rank to its service, which has written its folder's files."""
    way = Client(str(folder / SOCKET), "AF_UNIX", authkey=(folder / KEY).read_bytes())
    way.send(replica)
    return way
