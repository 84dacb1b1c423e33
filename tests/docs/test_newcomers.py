"""The tasks of newcomers: each in at most two commands, none of which was looked up."""

import os
import shlex
import tomllib
from pathlib import Path

import pytest

from harness import forked
from harness.documents import ENVIRONMENT, ROOT
from harness.today import EVERYTHING, some_of
from task_list import prepare

TASKS = tomllib.loads(Path(__file__).with_name("newcomers.toml").read_text())["tasks"]
LIGHT = [task for task in TASKS if "torch" not in task]
pytestmark = pytest.mark.usefixtures("leftovers")


def run(task: list, folder: Path) -> None:
    question, commands, words, *rest = task
    for command in commands:
        done = forked.shardwise(
            *shlex.split(command), environment=ENVIRONMENT | {"COLUMNS": "80"}, timeout=300, folder=folder
        )
        said = " ".join((done.stdout + done.stderr).split())
        expected = next((code for code in rest if isinstance(code, int)), 0) if command is commands[-1] else 0
        assert done.returncode == expected, (question, command, said[-500:])
    assert words in said, (question, said[-500:])


def test_there_are_48_of_at_most_two_commands():
    assert len(TASKS) == 48 == len({task[0] for task in TASKS})
    assert all(1 <= len(task[1]) <= 2 for task in TASKS)
    page = (ROOT / "docs" / "task_times.md").read_text()
    for question, commands, *_ in TASKS:
        assert f"| {question} | {'; '.join(f'`{command}`' for command in commands)} | " in page, question


@pytest.mark.parametrize("task", some_of(LIGHT, 5, "tasks of newcomers"), ids=lambda task: task[0])
def test_a_task_that_needs_no_torch(task, tmp_path):
    prepare(tmp_path)
    run(task, tmp_path)


@pytest.mark.skipif(not EVERYTHING, reason="runs of processes, one after the other: SHARDWISE_ALL=1")
def test_tasks_that_train_and_generate(tmp_path):
    os.environ.pop("RANK", None)
    prepare(tmp_path)
    for task in TASKS:
        if "torch" in task:
            run(task, tmp_path)
