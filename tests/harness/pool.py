"""One helper that runs a function on n ranks. Ranks live on between tests: starting one costs an import of torch.

A job that exceeds its time limit kills the whole pool, which the next job starts anew; no process outlives the tests.
"""

from __future__ import annotations

import atexit
import importlib
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.forked import context

LIMIT = float(os.environ.get("SHARDWISE_TEST_LIMIT", "180"))
"""Seconds that a job may take."""


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def _serve(pipe: Connection, index: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    import torch.distributed as dist

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        target, world, store, payload = job
        try:
            module, _, function = target.partition(":")
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world)
            try:
                result = getattr(importlib.import_module(module), function)(index, payload)
                # A rank that is done must not take back what another still reads. Who lost a peer has left by himself.
                if dist.is_initialized():
                    dist.barrier()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        job = payload = result = None


class Pool:
    """Up to `size` ranks; `run` uses the first `world` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def _grow(self, count: int) -> None:
        made = context()
        while len(self.workers) < count:
            ours, theirs = made.Pipe()
            process = made.Process(target=_serve, args=(theirs, len(self.workers)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, target: str, world: int, payload: Any = None, limit: float = LIMIT) -> list[Any]:
        """Call `module:function(rank, payload)` on `world` ranks inside a gloo process group; results by rank.

        Raises `RankFailed` with the first failing rank's traceback, or when the time limit passes.
        """
        self._grow(world)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            job = (target, world, str(Path(folder, "store")), payload)
            for _, pipe in self.workers[:world]:
                pipe.send(job)
            results, failures, silent = self._answers(world, limit)
            if silent or failures:
                self.close()
        if failures:
            rank = min(failures)
            which = f"rank {rank} of {world} (failed: {sorted(failures)}, silent: {silent})"
            raise RankFailed(f"{which}:\n{failures[rank]}")
        if silent:
            raise RankFailed(f"ranks {silent} of {world} did not answer within {limit:.0f} s")
        return [results[rank] for rank in range(world)]

    def _answers(self, world: int, limit: float) -> tuple[dict[int, Any], dict[int, str], list[int]]:
        """(results by rank, tracebacks by rank, ranks that have not answered)."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + limit
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
        while waiting and time.monotonic() < deadline:
            # After a first failure the others are likely to wait for a lost peer: give them a moment, no more.
            for ready in wait(list(waiting), timeout=0.5):
                rank = waiting.pop(ready)  # type: ignore[arg-type]
                try:
                    fine, value = ready.recv()  # type: ignore[union-attr]
                except EOFError:
                    fine, value = False, "the process died"
                (results if fine else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + 3)
        return results, failures, sorted(waiting.values())

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []


_pool = Pool(8)


def run_ranks(target: str, world: int, payload: Any = None, limit: float = LIMIT) -> list[Any]:
    """Run `module:function(rank, payload)` on the shared pool."""
    return _pool.run(target, world, payload, limit)
