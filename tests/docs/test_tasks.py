"""Every command of "I want to ..." runs at 80 columns, in the folder that the page describes; those of newcomers print
what they must."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from harness import forked
from harness.documents import ENVIRONMENT, LIMIT, SHORTER
from harness.today import EVERYTHING, some_of
from task_list import DOCS, NEWCOMERS, Task, prepare, served_answer, tasks

TASKS = tasks()
ALONE = [task for task in TASKS if task.commands and task.section != "Train and generate"]
"""Tasks whose commands need no run that an earlier one has made, and no torch."""
NARROW = ENVIRONMENT | {"COLUMNS": "80"}
pytestmark = pytest.mark.usefixtures("leftovers")


def run_task(task: Task, folder: Path) -> None:
    said = ""
    for program, *words in task.commands:
        if words[0] == "lab" and not os.access("/var/run/netns", os.W_OK) and os.geteuid():
            continue  # network namespaces are the superuser's
        if words[0] == "serve":
            assert served_answer([sys.executable, "-m", program, *words], folder, NARROW)
            continue
        shorter = SHORTER.get(tuple(words[:2]), ())
        done = forked.shardwise(*words, *shorter, environment=NARROW, timeout=LIMIT, folder=folder)
        said = " ".join((done.stdout + done.stderr).split())
        expected = task.code if words == task.commands[-1][1:] else 0
        assert done.returncode == expected, (task.question, words, said[-500:])
    assert task.prints is None or task.prints in said, (task.question, said[-500:])


@pytest.mark.parametrize("task", some_of(ALONE, 6, "tasks"), ids=str)
def test_a_task_that_needs_no_torch(task: Task, tmp_path: Path) -> None:
    prepare(tmp_path)
    run_task(task, tmp_path)


@pytest.mark.skipif(not EVERYTHING, reason="runs of all kinds, one after the other: SHARDWISE_ALL=1")
def test_runs_one_after_the_other(tmp_path: Path) -> None:
    os.environ.pop("RANK", None)
    prepare(tmp_path)
    for task in TASKS:
        if task not in ALONE:
            run_task(task, tmp_path)


def test_each_question_has_one_or_two_commands_or_a_page() -> None:
    assert len(TASKS) >= 85 and len({task.question for task in TASKS}) == len(TASKS)
    text = (DOCS / "tasks.md").read_text()
    for task in TASKS:
        line = next(line for line in text.splitlines() if line.startswith(f"| {task.question} |"))
        assert len(task.commands) <= 2 and (task.commands or "](" in line or "`make " in line), task.question


def test_48_questions_are_newcomers() -> None:
    asked = [task for task in TASKS if task.prints is not None]
    assert len(asked) == 48 == len(tomllib.loads(NEWCOMERS.read_text())["prints"])
    assert all(1 <= len(task.commands) <= 2 for task in asked)
