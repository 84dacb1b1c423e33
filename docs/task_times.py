"""Times of tasks in a fresh environment, as a new user has it: the last column of docs/tasks.md, and the page
docs/task_times.md of the newcomers' tasks in tests/docs/newcomers.toml.

    python docs/task_times.py [newcomers]

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
import time
import tomllib
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


NEWCOMERS = """\
# Tasks of newcomers

Training, serving and learning: {count} questions that one or two commands answer, chosen by this project's authors;
{one} need one command. `tests/docs/test_newcomers.py` has what each must print.

`python docs/task_times.py newcomers` makes this page with a wheel in a fresh environment ({day}, {cores} cores with a
load of {load:.0f} by other programs, Python {python}). *Processor time* is the command's own, without waiting.

| task | `shardwise ...` | time | processor time |
|---|---|---:|---:|
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

    def seconds(self, command: Sequence[str], folder: Path, expected: int = 0) -> float:
        """Seconds of a command, which must end with this exit code."""
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=900)
        spent = time.perf_counter() - began
        if done.returncode != expected:
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


def newcomers(environment: Environment, folder: Path) -> None:
    """Run the newcomers' tasks, and write their page. Needs the extra `train`."""
    every = tomllib.loads((ROOT / "tests" / "docs" / "newcomers.toml").read_text())["tasks"]
    rows, environment.variables["COLUMNS"] = [], "80"
    for question, commands, _, *rest in every:
        codes = [0] * (len(commands) - 1) + [next((code for code in rest if isinstance(code, int)), 0)]
        before, walls = _processor_seconds(), []
        for command, code in zip(commands, codes, strict=True):
            words = [str(environment.bin / "shardwise"), *shlex.split(command)]
            walls.append(environment.seconds(words, folder, code))
        spent = _processor_seconds() - before
        print(f"{sum(walls):6.1f} s  {question}", flush=True)
        shown = "; ".join(f"`{command}`" for command in commands)
        rows.append(f"| {question} | {shown} | {format_time(sum(walls))} | {format_time(spent)} |\n")
    load = os.getloadavg()[2]
    head = NEWCOMERS.format(
        count=len(every), one=sum(len(task[1]) == 1 for task in every), day=date.today(), cores=os.cpu_count(),
        python=platform.python_version(), load=load,
    )  # fmt: skip
    (DOCS / "task_times.md").write_text(head + "".join(rows))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(page: str, spent: Mapping[str, Sequence[float]], times: str) -> str:
    """The page with the seconds of each task's commands in the last column, and its section of times."""
    for question, seconds in spent.items():
        words = ", ".join(map(format_time, seconds))
        page = re.sub(rf"^(\| {re.escape(question)} \| .+ \|) .*? \|$", rf"\1 {words} |", page, flags=re.MULTILINE)
    return page[: page.index("## Times\n")] + times


def main(only: str = "") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Environment(folder)
        work = folder / "work"
        prepare(work)
        if only == "newcomers":
            environment.install("[train]")
            return newcomers(environment, work)
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
        newcomers(environment, work)


if __name__ == "__main__":
    main(*sys.argv[1:])
