"""Command lines and ranks in processes that are forked where torch is loaded already: an import costs more than a run.

A command line runs in a child of a server that has imported what ranks import, and the launcher in it forks its ranks
instead of executing Python anew. All else is as it is for a user: real processes with signals, sessions and files of
their own, which run the same `__main__`. What forked processes share, and executed ones do not, is the seed of hashes:
the README's program, the demo, torchrun's ranks and the tests of the launcher alone execute theirs.
"""

import atexit
import ctypes
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

LOADED = (
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "shardwise.cli.main",
    "shardwise.runtime.job.restart",
    "shardwise.runtime.measure.memory",
    "shardwise.runtime.job.trainer",
)
ENTER = ["ip", "netns", "exec"]
_PROCESSES = threading.Lock()
"""Held while a process is started or looked at: `multiprocessing` does both for all of them, without a lock."""
Stream = int | IO[Any] | None


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(LOADED))
    return made


class Started:
    """A command line that runs on its own: `python -m shardwise WORDS`. It ends at `kill` or with the tests.

    merged: standard error goes where standard output goes. folder: where it runs, if not here. prepare: called in the
    process first.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], *, merged: bool = False, folder: Path | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="started-")
        out, err = (Path(self._folder.name, name) for name in ("out", "err"))
        self._files = out, err
        command = [sys.executable, "-m", "shardwise", *words]
        # Whoever works on tokens in several threads must not be forked afterwards.
        quiet = {**environment, "TOKENIZERS_PARALLELISM": "false"}
        arguments = (command, quiet, str(folder or Path.cwd()), str(out), str(out if merged else err), prepare)
        self._process = context().Process(target=_start, args=arguments, daemon=True)
        with _PROCESSES:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _PROCESSES:
            return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> str:
        return self._files[0].read_text() if self._files[0].exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(standard output, standard error) when it has ended. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired("shardwise", timeout or 0)
            time.sleep(0.005)
        return self.written()

    def written(self) -> tuple[str, str]:
        """(standard output, standard error) so far."""
        out, err = (file.read_text() if file.exists() else "" for file in self._files)
        return out, err


def shardwise(
    *words: str, environment: Mapping[str, str], timeout: float, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    started = Started(words, environment, folder=folder)
    out, err = started.communicate(timeout)
    assert started.returncode is not None
    return subprocess.CompletedProcess(list(words), started.returncode, out, err)


def give(pipe: Connection, value: Any) -> None:
    """Send a value whole: `Connection.send` sends tensors as open files, and caches of results would keep thousands."""
    pipe.send_bytes(pickle.dumps(value))


def take(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def call(target: str, *arguments: Any, timeout: float) -> Any:
    """What `module:function` gives for `arguments`, or raises, in a process whose launches are forked."""
    ours, theirs = context().Pipe()
    process = context().Process(target=_call, args=(theirs, target, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout), f"{target} did not end within {timeout:.0f} s"
        fine, value = take(ours)
    finally:
        process.kill()
        process.join()
        ours.close()
    if not fine:
        raise value
    return value


def _call(pipe: Any, target: str, arguments: tuple[Any, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _fork_ranks()
    module, _, function = target.partition(":")
    try:
        give(pipe, (True, getattr(importlib.import_module(module), function)(*arguments)))
    except BaseException as error:
        give(pipe, (False, error))
    pipe.recv()  # until the other end closes, so that all that was sent is read


def _start(
    command: list[str], environment: Mapping[str, str], folder: str, out: str, err: str,
    prepare: Callable[[], object] | None,
) -> NoReturn:  # fmt: skip
    _fork_ranks()
    os.chdir(folder)
    if prepare is not None:
        prepare()
    with open(out, "a") as first, open(err, "a") as second:
        _become(command, environment, (subprocess.DEVNULL, first, second))


def _fork_ranks() -> None:
    from shardwise.runtime.job import launch

    launch.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class Forked:
    """What `subprocess.Popen` is to the launcher, for a command that runs Python."""

    def __init__(
        self, command: list[str], *, env: Mapping[str, str], stdin: Stream, stdout: Stream, stderr: Stream,
        start_new_session: bool,
    ) -> None:  # fmt: skip
        namespace, command = (command[3], command[4:]) if command[:3] == ENTER else ("", command)
        assert start_new_session and command[0] == sys.executable
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            if namespace:
                _enter(namespace)
            _become(command, env, (stdin, stdout, stderr))

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _enter(namespace: str) -> None:
    network = 0x40000000
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), network):
            raise OSError(ctypes.get_errno(), "setns")


def _become(command: list[str], environment: Mapping[str, str], streams: Sequence[Stream]) -> NoReturn:
    """Run the command in this process as if it had been executed: what it inherits is what a new program inherits."""
    code = 1
    try:
        os.setsid()
        atexit._clear()
        _inherit(streams)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # A shell that runs the tests in its background has them ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        _interpret(command[1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _inherit(streams: Sequence[Stream]) -> None:
    for number, stream in enumerate(streams):
        if stream is not None:
            given = os.open(os.devnull, os.O_RDWR) if stream == subprocess.DEVNULL else stream
            os.dup2(given if isinstance(given, int) else given.fileno(), number)
    os.closerange(3, 1024)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[attr-defined, union-attr]


def _interpret(words: list[str]) -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
