"""A training through one fault, and what must hold in the end.

Lost: the newest whole checkpoint is gone or unreadable, or a loss or the last checkpoint differs from the undisturbed
run's in any bit. Hung: a process has not ended within its limit. Leaked: processes, temporary files, locks or parts of
checkpoints remain. Unclear: a traceback, an unexpected exit code, or an end that is not one line of the command.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from faults.draw import BATCH, SIZES, Fault, model_of
from harness.processes import children
from harness.training_process import Process, command, manifests, write_text
from shardwise.checkpoint import Checkpoint, diff, latest
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.report.run_directory import occupied

STEPS, EVERY = 24, 3
KEPT = {"errors"}
"""What a run's directory may hold that an undisturbed one does not."""
PROBLEMS = ("lost", "hung", "leaked", "unclear")
GONE_WITHIN = 10.0
"""Seconds in which ranks end whose launcher was killed."""


class Problem(NamedTuple):
    """Something that must not happen. what: one of `PROBLEMS`."""

    what: str
    text: str


class Ended(NamedTuple):
    """End of a command. line: the last one that it printed."""

    code: int
    line: str


class Space:
    """The folder of all trials, with the undisturbed run of each layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder)
        self._plain: dict[str, Path] = {}

    def words(self, layout: str, out: Path) -> list[str]:
        parsed = Layout.parse(layout)
        sizes = ",".join(f"{key}={value}" for key, value in SIZES.items() if key != "vocab")
        words = command(self.folder, out, layout, STEPS, "--save-every", str(EVERY), "--batch", str(BATCH))
        return ["train", model_of(parsed), *words[2:], "--set", sizes]

    def run_undisturbed(self, layout: str) -> None:
        """Run a layout that has not run yet. Raises `RuntimeError` when that fails."""
        if layout not in self._plain:
            out = self.folder / f"plain-{re.sub('[^a-z0-9]+', '-', layout)}"
            with Process(self.words(layout, out), out) as process:
                code, output = process.end()
            if code:
                raise RuntimeError(f"the undisturbed run of {layout} ended with {code}: {output}")
            self._plain[layout] = out

    def plain(self, layout: str) -> Path:
        return self._plain[layout]


class Trial:
    """One fault: a folder in which its processes run, and another one for the run."""

    def __init__(self, fault: Fault, space: Space) -> None:
        self.fault, self.space = fault, space
        self.random = random.Random(fault.seed)
        self.folder, self.tmp = space.folder / f"fault-{fault.number}", space.folder / f"fault-{fault.number}" / "tmp"
        self.tmp.mkdir(parents=True)
        self.out = space.folder / f"run-{fault.number}"
        self.outs = [self.out]
        self.plain = space.folder if fault.kind.startswith("server") else space.plain(fault.layout)
        self.problems: list[Problem] = []
        self.told: list[str] = []
        """What was done, in order, for whoever looks into a problem."""
        self.killed = False
        """Whether a launcher was killed, which then cannot remove its files: the next one does."""
        self.whole_log = True
        """Whether the log of the run has not been damaged on purpose."""

    # -- starting and waiting

    def start(
        self, *more: str, out: Path | None = None, words: list[str] | None = None,
        variables: Mapping[str, str] | None = None, prepare: Callable[[], object] | None = None,
    ) -> Process:  # fmt: skip
        out = out or self.out
        around = {"TMPDIR": str(self.tmp), **(variables or {})}
        arguments = words or [*self.space.words(self.fault.layout, out), *more]
        self.told.append("shardwise " + shlex.join(arguments))
        return Process(arguments, out, variables=around, folder=self.folder, prepare=prepare)

    def until(self, process: Process, condition: Callable[[], Any], pause: float = 0.005) -> bool:
        deadline = time.monotonic() + 60
        while not condition():
            if not process.running or time.monotonic() > deadline:
                return False
            time.sleep(pause)
        return True

    def moment(self, process: Process, *, first: int = 1, started: bool = False) -> None:
        """Wait for a random moment: at the start, some milliseconds after a step, or in the middle of a save.

        first: steps that are done by then. started: not at the start.
        """
        where = self.random.choice(["step", "step", "save", "save"] + ["start"] * (not started))
        step, wait = self.random.randint(first, STEPS - 6), self.random.uniform(0, 0.1)
        if where == "start":
            time.sleep(wait * 8)
        else:
            self.until(process, lambda: len(set(process.logged())) >= step)
            time.sleep(wait if where == "step" else 0)
        if where == "save":
            self.until(process, lambda: not all(manifests(process.out).values()), pause=0)
        self.told.append(f"{where} {step} +{wait:.3f} s")

    def ranks(self, process: Process) -> list[int]:
        """Process ids of the ranks once all have been started, fewer when the command ends before."""
        count, found = Layout.parse(self.fault.layout).ranks, list[int]()

        def started() -> bool:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[:] = sorted(children(process.pid))
            return len(found) == count

        self.until(process, started)
        return found

    def send(self, pids: list[int], number: int) -> None:
        """Signal processes that may have ended."""
        self.told.append(f"{signal.Signals(number).name} to {len(pids)} process(es)")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- judging

    def problem(self, what: str, text: str) -> None:
        self.problems.append(Problem(what, text))

    def ended(self, process: Process, allowed: Mapping[int, str]) -> Ended:
        """Wait for the end of a command, and judge it. allowed: exit code -> pattern of its last line."""
        try:
            with process:
                code, output = process.end()
        except subprocess.TimeoutExpired:
            self.problem("hung", "the command has not ended")
            return Ended(-1, "")
        line = (output.strip().splitlines() or [""])[-1]
        if line.startswith('{"error"'):  # of a server, which prints JSON
            line = f"shardwise: error: {json.loads(line)['error']}"
        self.told.append(f"ended with {code}: {line}")
        if "Traceback" in output:
            self.problem("unclear", f"a traceback: {line}")
        if code not in allowed:
            self.problem("unclear", f"exit code {code}: {line}")
        elif code > 0 and not (line.startswith("shardwise: ") and re.search(allowed[code], line)):
            self.problem("unclear", f"the last line does not say {allowed[code]!r}: {line}")
        return Ended(code, line)

    def whole(self) -> int:
        return max((step for step, there in manifests(self.out).items() if there), default=0)

    def check_kept(self, least: int) -> None:
        """See that the newest checkpoint is as new as one that was whole before, and can be read."""
        newest = latest(self.out / "checkpoints")
        if (newest.manifest.step if newest else 0) < least:
            self.problem("lost", f"the checkpoint of step {least} was whole and is gone")
        elif newest:
            try:
                newest.verify()
            except UserError as error:
                self.problem("lost", str(error))

    def continue_to_the_end(self, ended: Ended) -> None:
        """Follow what the last line says, or the documentation where it says nothing, until the run has finished."""
        for attempt in range(3):
            if ended.code == 0 or any(problem.what == "hung" for problem in self.problems):
                break
            words = self._way_on(ended, refused=attempt > 0)
            ended = self.ended(self.start(words=words), {0: "", 2: ""})
        if ended.code:
            self.problem("lost", f"no way on from here: {ended.line}")

    def _way_on(self, ended: Ended, *, refused: bool) -> list[str]:
        """The command that continues a run. refused: the usual one has been."""
        new = self.out.with_name(f"{self.out.name}-{len(self.outs)}")
        found = re.search(r"shardwise (train .*--resume .*)$", ended.line)
        newest = latest(self.out / "checkpoints")
        if found:
            words = shlex.split(found[1].replace("NEW_RUN", str(new)))
        elif newest and refused:
            # The line was about the run's own files: its checkpoints are sound.
            words = ["train", "--resume", str(newest.folder), "--out", str(new)]
        elif newest:
            words = ["train", "--resume", str(self.out)]
        else:
            out = new if self.out.exists() and occupied(self.out) else self.out
            words = self.space.words(self.fault.layout, out)
        if "--out" in words and words[words.index("--out") + 1] == str(new):
            self.outs.append(new)
        return words

    def compare(self) -> None:
        """Compare all losses, and the last checkpoint, with the undisturbed run's."""
        if any(problem.what in ("hung", "lost") for problem in self.problems):
            return
        try:
            self._compare()
        except UserError as error:
            self.problem("lost", str(error))

    def _compare(self) -> None:
        expected, seen = dict(_losses(self.plain)), dict[int, float]()
        for out in self.outs:
            for step, loss in _losses(out) if (out / "events.jsonl").exists() else []:
                if loss != expected[step]:
                    self.problem("lost", f"step {step} of {out.name} has loss {loss!r}, undisturbed {expected[step]!r}")
                    return
                seen[step] = loss
        if seen != expected and self.whole_log:
            self.problem("lost", f"steps {sorted(expected.keys() - seen.keys())} are missing")
        last = latest(self.outs[-1] / "checkpoints")
        different = diff(last, Checkpoint.open(self.plain / "checkpoints" / f"step-{STEPS}")) if last else ["all"]
        if different:
            self.problem("lost", f"the last checkpoint differs: {different[0]}")

    def check_leftovers(self) -> None:
        """See that nothing remains of all processes of the trial, which are killed then."""
        deadline = time.monotonic() + GONE_WITHIN
        while (left := processes_in(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid, name in left.items():
            self.problem("leaked", f"process {name}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.killed and any(self.tmp.iterdir()):
            # The next launcher removes them, whatever it trains.
            self.ended(self.start("--steps", "1", out=self.out.with_name(f"{self.out.name}-next")), {0: ""})
        for path in self.tmp.iterdir():
            self.problem("leaked", f"temporary file {path.name}")
        if self.fault.kind.startswith("server") or self.problems:
            return
        out = self.outs[-1]
        more = {path.name for path in out.iterdir()} - {path.name for path in self.plain.iterdir()} - KEPT
        parts = [path.name for path in (out / "checkpoints").iterdir() if not (path / "manifest.json").exists()]
        for name in (*sorted(more), *parts):
            self.problem("leaked", f"{name} in the run's directory")


def _losses(out: Path) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were written, of the log's lines that can be read."""
    found = []
    for line in (out / "events.jsonl").read_bytes().splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            found += [(event["step"], event["loss"])] if isinstance(event, dict) and "loss" in event else []
    return found


def processes_in(folder: Path) -> dict[int, str]:
    """Process id -> command of all processes that run in a folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "cwd").readlink().is_relative_to(folder):
                found[int(entry.name)] = json.dumps((entry / "comm").read_text().strip())
    return found
