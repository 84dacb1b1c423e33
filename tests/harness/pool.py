"""One helper that runs a function on n ranks. Ranks live on between tests: starting one costs an import of torch.

A job that exceeds its time limit kills the whole pool, which the next job starts anew; no process outlives the tests.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.forked import context, give, take

LIMIT = float(os.environ.get("SHARDWISE_TEST_LIMIT", "180"))
"""Seconds that a job may take."""
_TICK = 0.5


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def _serve(pipe: Connection, index: int, port: int, stack: Path) -> None:
    # The file must stay open as long as the process lives. The handler needs none of Python's locks.
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"), all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    import torch.distributed as dist

    # One for all jobs, and no file: a `FileStore` looks only every 10 ms, and one that goes while somebody removes its
    # folder waits half an hour for the folder to come back.
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    while True:
        try:
            job = take(pipe)
        except EOFError:
            return
        target, world, number, limit, payload = job
        try:
            module, _, function = target.partition(":")
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"job-{number}", store),
                rank=index,
                world_size=world,
                timeout=timedelta(seconds=max(limit, LIMIT)),
            )
            try:
                result = getattr(importlib.import_module(module), function)(index, payload)
                # A rank that is done must not take back what another still reads. Who lost a peer has left by himself.
                if dist.is_initialized():
                    dist.barrier()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            give(pipe, (True, result))
        except BaseException:
            give(pipe, (False, traceback.format_exc()))
        job = payload = result = None
        # Its process groups hang in circles, and each has threads that wake a hundred times a second. What is left is
        # caches: nothing looks at them again.
        gc.collect()
        gc.freeze()


class Pool:
    """Up to `size` ranks; `run` uses the first `world` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = 0
        atexit.register(self.close)

    def _grow(self, count: int) -> None:
        from torch.distributed import TCPStore

        made = context()
        self._store = self._store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = self._stacks or tempfile.TemporaryDirectory(prefix="stacks-")
        while len(self.workers) < count:
            ours, theirs = made.Pipe()
            index = len(self.workers)
            arguments = theirs, index, self._store.port, self._stack(index)
            process = made.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, target: str, world: int, payload: Any = None, limit: float = LIMIT) -> list[Any]:
        """Call `module:function(rank, payload)` on `world` ranks inside a gloo process group; results by rank.

        Raises `RankFailed` with the first failing rank's traceback, or when the time limit passes; the message tells
        where the ranks that are silent stand.
        """
        self._grow(world)
        self._jobs += 1
        for _, pipe in self.workers[:world]:
            give(pipe, (target, world, self._jobs, limit, payload))
        results, failures, silent = self._answers(world, limit)
        where = self._where(silent)
        if silent or failures:
            self.close()
        if failures:
            rank = min(failures)
            which = f"rank {rank} of {world} (failed: {sorted(failures)}, silent: {silent})"
            raise RankFailed(f"{which}:\n{failures[rank]}{where}")
        if silent:
            raise RankFailed(f"ranks {silent} of {world} did not answer within {limit:.0f} s{where}")
        return [results[rank] for rank in range(world)]

    def _answers(self, world: int, limit: float) -> tuple[dict[int, Any], dict[int, str], list[int]]:
        """(results by rank, tracebacks by rank, ranks that have not answered)."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        left = limit
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
        while waiting and left > 0:
            started = time.monotonic()
            for ready in wait(list(waiting), timeout=_TICK):
                rank = waiting.pop(ready)  # type: ignore[arg-type]
                try:
                    fine, value = take(ready)  # type: ignore[arg-type]
                except EOFError:
                    fine, value = False, "the process died"
                (results if fine else failures)[rank] = value
            # While this process is stopped its ranks are likely to be, too: that is not their time.
            left -= min(time.monotonic() - started, 2 * _TICK)
            if failures:
                # The others are likely to wait for a lost peer: give them a moment, no more.
                left = min(left, 3)
        return results, failures, sorted(waiting.values())

    def _stack(self, rank: int) -> Path:
        assert self._stacks is not None
        return Path(self._stacks.name, f"rank-{rank}")

    def _where(self, silent: list[int]) -> str:
        """Where every thread of these ranks stands, in lines that follow on a message."""
        for rank in silent:
            os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)
        return "".join(f"\n\nrank {rank} stands here:\n{_read(self._stack(rank))}" for rank in silent)

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers, self._store = [], None
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None


def _read(stack: Path) -> str:
    return stack.read_text() if stack.exists() else "it has not begun"


_pool = Pool(8)


def run_ranks(target: str, world: int, payload: Any = None, limit: float = LIMIT) -> list[Any]:
    return _pool.run(target, world, payload, limit)
