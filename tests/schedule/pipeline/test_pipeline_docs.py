"""docs/pipelines.md: its Python runs, and its figures are what the commands that it names print."""

import re
from pathlib import Path

from harness.cases import from_table
from shardwise.cli.main import main
from shardwise.schedule.pipeline import build, registry, training
from shardwise.schedule.pipeline.verify import verify

TEXT = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
SCHEDULE, USE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_schedule_that_it_adds_is_right(monkeypatch):
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._known()))
    exec(SCHEDULE, {**vars(training)})
    assert verify(build("one-by-one", 4, 8)) == []


def test_its_python_runs():
    exec(USE, {})


@from_table
def test_its_figures_are_printed(argv, figures, capsys):
    assert main(["pipeline", "simulate", *argv.split(), "--ranks", "4", "--micro", "8"]) == 0
    out = capsys.readouterr().out
    for figure in figures:
        assert figure in out
        assert figure.replace(".0", "").strip() in TEXT or figure == " 0.00 s  "


def test_the_large_one_has_as_many_actions():
    p, m, v = 64, 512, 4
    computations, messages = 2 * p * v * m, 2 * (p * v - 1) * m
    assert f"{computations + 2 * messages + p * v + p:,} actions" in TEXT
