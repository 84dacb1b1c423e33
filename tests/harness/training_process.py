"""A training that runs on its own, as a user starts it, for tests that kill, stop or signal its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import shardwise
from harness import forked

LIMIT = 150
"""Seconds that a run has at most."""
SOURCES = str(Path(shardwise.__file__).parents[1])


def write_text(folder: Path) -> None:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (folder / "text").mkdir()
    for part in range(10):
        lines = (" ".join(words[int(d)] for d in str(n)) for n in range(part * 400, part * 400 + 400))
        (folder / "text" / f"{part}.txt").write_text("\n".join(lines))


def command(runs: Path, out: Path, layout: str, steps: int, *more: str) -> list[str]:
    return [
        *("train", "tiny-llama", "--vocab", "300", "--layout", layout, "--data", str(runs / "text")),
        *("--seq", "32", "--batch", "4", "--steps", str(steps), "--out", str(out), "--no-tensorboard"),
        *("--set", "layers=2,hidden=64,ffn=96", "--validate-batches", "1", *more),
    ]


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": SOURCES}


def shardwise(*words: object) -> subprocess.CompletedProcess[str]:
    """A command that ends well."""
    done = forked.shardwise(*map(str, words), environment=environment(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


class Process:
    """A training that runs on its own; killed at the end of its `with` block at the latest."""

    def __init__(
        self, arguments: list[str], out: Path, *launcher: str, variables: Mapping[str, str] | None = None,
        folder: Path | None = None, prepare: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """folder, prepare: as in `forked.Started`, for a process without a launcher of its own."""
        self.out = out
        self._process: Any
        around = environment() | dict(variables or {})
        if not launcher:
            self._process = forked.Started(arguments, around, merged=True, folder=folder, prepare=prepare)
            return
        self._process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "shardwise", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=around, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def written(self) -> str:
        """Output so far, of a process without a launcher of its own."""
        return str(self._process.written()[0])

    def workers(self) -> list[int]:
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> tuple[int, str]:
        """(exit code, output)"""
        output, _ = self._process.communicate(timeout=LIMIT)
        return self._process.returncode, output

    def wait_for(self, condition: Callable[[], Any], pause: float = 0.01) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(pause)

    def logged(self) -> list[int]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # being written
            if "loss" in event:
                found.append(event["step"])
        return found


def manifests(out: Path) -> dict[int, bool]:
    folder = out / "checkpoints"
    found = list(folder.iterdir()) if folder.is_dir() else []
    return {int(path.name.removeprefix("step-")): (path / "manifest.json").exists() for path in found}


def losses(out: Path, name: str = "loss") -> dict[int, float]:
    return {event["step"]: event[name] for event in events(out) if name in event}


def restarted(out: Path) -> int:
    path = out / "events.jsonl"
    return path.read_text().count('"restart"') if path.exists() else 0
