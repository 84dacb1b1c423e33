"""Every command of "I want to ..." runs, in the folder that the page describes."""

import os
import sys
from pathlib import Path

import pytest

from harness.documents import ENVIRONMENT, run
from harness.today import EVERYTHING, some_of
from task_list import DOCS, Task, prepare, served_answer, tasks

PLANS = "Before I have a cluster", "With another engine"
"""Sections whose commands need no run that an earlier one has made."""
TASKS = tasks()
pytestmark = pytest.mark.usefixtures("leftovers")


def run_task(task: Task, folder: Path) -> None:
    for command in task.commands:
        if command[1] == "lab" and not os.access("/var/run/netns", os.W_OK) and os.geteuid():
            continue  # network namespaces are the superuser's
        if command[1] == "serve":
            assert served_answer([sys.executable, "-m", *command], folder, ENVIRONMENT)
        else:
            assert run(*command, cwd=folder)


@pytest.mark.parametrize(
    "task", some_of([t for t in TASKS if t.section in PLANS], 3, "tasks"), ids=lambda t: t.question
)
def test_a_plan_that_is_asked_for(task: Task, tmp_path: Path) -> None:
    assert task.commands
    run_task(task, tmp_path)


@pytest.mark.skipif(not EVERYTHING, reason="runs of all kinds, one after the other: SHARDWISE_ALL=1")
def test_runs_one_after_the_other(tmp_path: Path) -> None:
    prepare(tmp_path)
    for task in TASKS:
        if task.section not in PLANS:
            run_task(task, tmp_path)


def test_each_question_has_one_or_two_commands_or_a_page() -> None:
    assert len(TASKS) >= 55 and len({task.question for task in TASKS}) == len(TASKS)
    text = (DOCS / "tasks.md").read_text()
    for task in TASKS:
        line = next(line for line in text.splitlines() if line.startswith(f"| {task.question} |"))
        assert len(task.commands) <= 2 and (task.commands or "](" in line or "`make " in line), task.question
