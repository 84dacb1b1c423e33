"""Times of tasks in a fresh environment, as a new user has it: the last column of docs/tasks.md.

    python docs/task_times.py

Builds a wheel, makes an environment, and installs the wheel without extras: that is enough for every plan and estimate.
Then it adds the extras `train` and `serve` and runs everything else. Needs pip and a package index.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

from shardwise.report.units import format_time
from task_list import DOCS, Task, prepare, served_answer, tasks

ROOT = DOCS.parent
WITH_TORCH = "Train and generate"
FIRST = "shardwise plan llama-3-8b --cluster 8xH100"
HELP_RUNS = 11

TIMES = """\
## Times
`python docs/task_times.py` runs these commands with a wheel in a fresh environment ({day}, {cores} cores with a load of
{load:.0f} by other programs, Python {python}). A time is that of the processor, of all processes of the command,
without waiting.

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
        self.variables = inherited | {"PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "80"}

    def install(self, extra: str = "") -> float:
        """Seconds of pip."""
        words = ["install", "-q", "-c", str(ROOT / "constraints.txt"), f"{self.wheel}{extra}"]
        return spent(lambda: self.run([str(self.bin / "python"), "-m", "pip", *words], self.folder))

    def run(self, command: Sequence[str], folder: Path, expected: int = 0) -> None:
        """Run a command, which must end with this exit code."""
        done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=900)
        if done.returncode != expected:
            raise RuntimeError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def task(self, task: Task, folder: Path) -> float:
        """Seconds of a task's commands."""
        began = _processor_seconds()
        for program, *words in task.commands:
            command = [str(self.bin / program), *words]
            if words[0] == "serve":
                served_answer(command, folder, self.variables)
            else:
                self.run(command, folder, task.code if words == task.commands[-1][1:] else 0)
        seconds = _processor_seconds() - began
        print(f"{seconds:6.1f} s  {task}", flush=True)
        return seconds


def spent(work: Callable[[], object]) -> float:
    """Seconds of some work on the processor, its processes' included."""
    began = _processor_seconds()
    work()
    return _processor_seconds() - began


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(page: str, seconds: Mapping[str, float], times: str) -> str:
    """The page with the seconds of each task in the last column, and its section of times."""
    for question, each in seconds.items():
        row = rf"^(\| {re.escape(question)} \| .+ \|) .*? \|$"
        page = re.sub(row, rf"\1 {format_time(each)} |", page, flags=re.MULTILINE)
    return page[: page.index("## Times\n")] + times


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Environment(folder)
        work = folder / "work"
        prepare(work)
        install = environment.install()

        def of(program: str, *words: str) -> float:
            return spent(lambda: environment.run([str(environment.bin / program), *words], work))

        output = of(*shlex.split(FIRST))
        starts = {
            words[0]: statistics.median(of(*words) for _ in range(HELP_RUNS))
            for words in (("shardwise", "--help"), ("python", "-c", "pass"))
        }
        every = [task for task in tasks() if task.commands]
        light = [task for task in every if task.section != WITH_TORCH]
        seconds = {task.question: environment.task(task, work) for task in light}
        extra = environment.install("[train,serve]")
        seconds |= {task.question: environment.task(task, work) for task in every if task not in light}
        times = TIMES.format(
            day=date.today(), cores=os.cpu_count(), load=os.getloadavg()[2], python=platform.python_version(),
            install=format_time(install), first=FIRST, output=format_time(output), extra=format_time(extra),
            help=format_time(starts["shardwise"]), bare=format_time(starts["python"]),
            ratio=starts["shardwise"] / starts["python"],
        )  # fmt: skip
        page = DOCS / "tasks.md"
        page.write_text(timed(page.read_text(), seconds, times))


if __name__ == "__main__":
    main()
