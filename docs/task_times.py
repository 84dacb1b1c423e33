"""Times of the tasks of docs/tasks.md in a fresh environment, as a new user has it: the last column of that page.

    python docs/task_times.py

Builds a wheel, makes an environment, and installs the wheel without extras: that is enough for every plan and estimate.
Then it adds the extras `train` and `serve` and runs everything else. Needs pip and a package index.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from shardwise.report.units import format_time
from task_list import DOCS, Task, prepare, served_answer, tasks

ROOT = DOCS.parent
WITHOUT_TORCH = "Before I have a cluster", "With another engine", "Serve"
FIRST = "shardwise plan llama-3-8b --cluster 8xH100"
HELP_RUNS = 11

TIMES = """\
## Times
`python docs/task_times.py` runs these commands with a wheel in a fresh environment ({day}, {cores} cores, Python
{python}).

| | time |
|---|---|
| `pip install` of the wheel, without torch | {install} |
| first useful output after that: `{first}` | {output} |
| `pip install` of the extras `train` and `serve`, with torch for CPUs | {extra} |
| `shardwise --help`, against a bare interpreter's start | {help} against {bare}: {ratio:.1f} times |
"""


class Environment:
    """A virtual environment with a wheel of this tree."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True
        )
        (self.wheel,) = folder.glob("*.whl")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        self.variables = inherited | {"PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "100"}

    def install(self, extra: str = "") -> float:
        """Seconds of pip."""
        words = ["install", "-q", "-c", str(ROOT / "constraints.txt"), f"{self.wheel}{extra}"]
        return self.seconds([str(self.bin / "python"), "-m", "pip", *words], self.folder)

    def seconds(self, command: Sequence[str], folder: Path) -> float:
        """Seconds of a command, which must succeed."""
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=900)
        spent = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return spent

    def task(self, task: Task, folder: Path) -> list[float]:
        """Seconds of each command of a task."""
        spent = []
        for program, *words in task.commands:
            command = [str(self.bin / program), *words]
            began = time.perf_counter()
            if words[0] == "serve":
                served_answer(command, folder, self.variables)
            else:
                self.seconds(command, folder)
            spent.append(time.perf_counter() - began)
            print(f"{spent[-1]:6.1f} s  {shlex.join([program, *words])}", flush=True)
        return spent


def timed(page: str, spent: Mapping[str, Sequence[float]], times: str) -> str:
    """The page with the seconds of each task's commands in the last column, and its section of times."""
    for question, seconds in spent.items():
        words = ", ".join(map(format_time, seconds))
        page = re.sub(rf"^(\| {re.escape(question)} \| .+ \|) .*? \|$", rf"\1 {words} |", page, flags=re.MULTILINE)
    return page[: page.index("## Times\n")] + times


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Environment(folder)
        work = folder / "work"
        prepare(work)
        install = environment.install()
        output = environment.seconds([str(environment.bin / "shardwise"), *shlex.split(FIRST)[1:]], work)
        starts = {
            words[0]: statistics.median(
                environment.seconds([str(environment.bin / words[0]), *words[1:]], work) for _ in range(HELP_RUNS)
            )
            for words in (("shardwise", "--help"), ("python", "-c", "pass"))
        }
        every = [task for task in tasks() if task.commands]
        light = [task for task in every if task.section in WITHOUT_TORCH and "runs/" not in str(task.commands)]
        spent = {task.question: environment.task(task, work) for task in light}
        extra = environment.install("[train,serve]")
        spent |= {task.question: environment.task(task, work) for task in every if task not in light}
        times = TIMES.format(
            day=date.today(), cores=os.cpu_count(), python=platform.python_version(), install=format_time(install),
            first=FIRST, output=format_time(output), extra=format_time(extra), help=format_time(starts["shardwise"]),
            bare=format_time(starts["python"]), ratio=starts["shardwise"] / starts["python"],
        )  # fmt: skip
        page = DOCS / "tasks.md"
        page.write_text(timed(page.read_text(), spent, times))


if __name__ == "__main__":
    main()
