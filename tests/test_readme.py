"""The README's program, commands and figures: they run, and they are what the code gives."""

import re
import runpy

import pytest

from harness.documents import ROOT, blocks, commands, python, run
from shardwise.cli.main import main
from shardwise.interop import WRITERS

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
"""Continues with the README's run."""
pytestmark = pytest.mark.usefixtures("leftovers")


def test_the_first_use_is_ten_lines_that_run(tmp_path):
    (program,) = blocks(README, "python")
    assert len(program.splitlines()) <= 10
    done = python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "ledger equal: True  bytes equal: True" in out
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) in runs/tiny-llama-1", out).groups())
    assert last < first


def test_the_commands_run_in_the_order_given(tmp_path):
    quoted = commands(README + COMMANDS)
    assert {command[0] for command in quoted} == {"shardwise", "torchrun"}
    for command in quoted:
        if "--seconds" in command:  # of measuring
            command[command.index("--seconds") + 1] = "2"
        if "--steps" in command:
            at = command.index("--steps") + 1
            command[at] = str(int(command[at]) * 2 // 5)
    said = [run(*command, cwd=tmp_path) for command in quoted]
    assert any("14.0 GB" in out for out in said), "the ZeRO table of 7B"
    (compared,) = [line for block in blocks(README, "text") for line in block.splitlines() if "bytes by class" in line]
    peak = re.compile(r"within .*")  # differs by some bytes from host to host
    verdicts = [peak.sub("", out.splitlines()[-1]) for out in said if "bytes by class" in out]
    assert verdicts == [peak.sub("", compared)], "the comparison"
    (times,) = re.findall(r"sends ([\d,]+) times the bytes", COMMANDS.replace("\n", " "))
    assert any(f"{times} times" in out for out in said), "the comparison of strategies"
    assert (tmp_path / "runs/first/result.json").is_file() and (tmp_path / "runs/second/result.json").is_file()


@pytest.mark.parametrize("engine", WRITERS)
def test_the_line_of_emit_writes_for_every_engine(engine, capsys):
    (line,) = re.findall(r"`shardwise (emit [^`]+)`", README)
    layout = "tp=8" if WRITERS[engine].serves else "dp=8" if engine == "ddp" else "dp=8,zero=3"
    values = {"MODEL": "llama-3-8b", "LAYOUT": layout, "ENGINE": engine}
    assert main([values.get(word, word) for word in line.split()]) == 0
    assert layout in capsys.readouterr().out


def test_what_is_shown_below_commands_is_what_they_print():
    script = runpy.run_path(str(ROOT / "docs" / "readme.py"))
    assert script["with_outputs"](README) == README, "make figures"
    marks = re.findall(r"<!-- output: \d+-\d+ -->\n```text\n(.*?)```\n<!-- /output -->", README, re.DOTALL)
    assert len(marks) == README.count("<!-- output: ") == 3 and all(len(shown.splitlines()) >= 6 for shown in marks)
    assert len(marks[0].splitlines()) == 10 and "best of" in marks[0]


def test_the_first_screen_is_one():
    screen = README.splitlines()[:50]
    assert max(map(len, screen)) <= 80
    first = "\n".join(screen)
    for words in (".gif", "777 published steps", "shardwise plan ", 'shardwise explain "vllm serve', "## Install"):
        assert words in first


def test_errors_beside_other_predictors_are_those_of_the_table():
    """Means over the rows that all three predict, of docs/prediction.md."""
    page = (ROOT / "docs" / "prediction.md").read_text()
    section = page.partition("## Other predictors on the same rows")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [\w-]+ \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)%", section, re.MULTILINE)
    steps = sum(int(row[0]) for row in rows)
    means = [sum(int(row[0]) * float(row[at]) for row in rows) / steps for at in (1, 2, 3)]
    said = re.search(
        r"On (\d+) published steps, shardwise is off by ([\d.]+)% in the mean, Calculon by ([\d.]+)%, llm-analysis at "
        r"its best efficiency by ([\d.]+)% \(nearer on (\d) of the (\d) \[sources\]",
        README.replace("\n", " "),
    )
    assert said and int(said[1]) == steps and [said[2], said[3], said[4]] == [f"{mean:.1f}" for mean in means]
    nearer = [row for row in rows if float(row[3]) < float(row[1])]
    assert (int(said[5]), int(said[6])) == (len(nearer), len(rows))


def test_every_target_and_file_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named and named <= targets
    for link in re.findall(r"\]\(([^)]+)\)", README):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file() or not path, link
        assert not anchor or anchor in anchors((ROOT / path).read_text() if path else README), link


def anchors(text: str) -> set[str]:
    return {title.lower().replace(",", "").replace(" ", "-") for title in re.findall(r"^##+ (.*)$", text, re.M)}
