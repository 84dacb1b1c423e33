"""Eight random faults of the day, and proof that each check finds what it is there for."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults import __main__ as program
from faults import inject, serving, trial
from faults.draw import Fault, draw, draw_layouts, runnable
from faults.report import Result, table
from faults.trial import Ended, Problem, Space, Trial
from harness.today import seed
from harness.training_process import SOURCES
from shardwise.layout import Layout

LAYOUT = "dp=2,zero=3,precision=fp32"
KINDS = [*inject.KINDS, *serving.KINDS]


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    made = Space(tmp_path_factory.mktemp("faults"))
    made.run_undisturbed(LAYOUT)
    return made


def test_eight_random_faults_lose_hang_and_leak_nothing(tmp_path: Path) -> None:
    around = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{SOURCES}", "TMPDIR": str(tmp_path)}
    words = ["--count", "8", "--layouts", "2", "--seed", str(seed()), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "faults", *words], capture_output=True, text=True, timeout=600, env=around
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["faults"]
    assert len(found) == 8 and len({item["fault"]["kind"] for item in found}) == 8
    assert not [item for item in found if item["problems"]] and not done.returncode, found
    assert all(item["told"] or item["skipped"] for item in found)
    assert not list(tmp_path.glob("faults-*"))


def test_faults_are_drawn_evenly_and_again_by_the_same_seed() -> None:
    layouts = draw_layouts("3", 8)
    assert len(set(layouts)) == 8 and all(map(runnable, layouts)) and layouts == draw_layouts("3", 8)
    faults = list(draw("3", 3 * len(KINDS), layouts, KINDS))
    assert faults == list(draw("3", 3 * len(KINDS), layouts, KINDS))
    assert all(sum(fault.kind == kind for fault in faults) == 3 for kind in KINDS)
    assert all(Layout.parse(fault.layout).ranks == 2 for fault in faults if fault.kind == "link cut")
    assert not runnable("dp=8") and not runnable("tp=3")


def made(space: Space, kind: str = "rank killed") -> Trial:
    number = len(list(space.folder.glob("fault-*")))
    return Trial(Fault(number, kind, LAYOUT, str(number)), space)


def found(one: Trial) -> list[str]:
    return [problem.what for problem in one.problems]


def test_a_run_that_nothing_happens_to_passes_each_check_and_damage_to_it_does_not(space: Space) -> None:
    one = made(space)
    one.ended(one.start("--keep-last", "0"), {0: ""})
    one.check_kept(trial.STEPS)
    one.compare()
    one.check_leftovers()
    assert not one.problems and one.whole() == trial.STEPS

    one.check_kept(trial.STEPS + 1)
    assert found(one) == ["lost"]
    (part, *_) = (one.out / "checkpoints" / f"step-{trial.STEPS}").glob("*.safetensors")
    whole = part.read_bytes()
    part.write_bytes(bytes([*whole[:-8], whole[-8] ^ 1, *whole[-7:]]))
    one.check_kept(0)
    assert found(one) == ["lost", "lost"] and "checksum" in one.problems[-1].text
    part.write_bytes(whole)

    one.problems.clear()
    events = one.out / "events.jsonl"
    lines = events.read_text().splitlines()
    events.write_text("\n".join(lines[:-5]) + "\n")
    one.compare()
    assert found(one)[0] == "lost" and "are missing" in one.problems[0].text
    one.problems.clear()
    first = next(line for line in lines if '"loss"' in line)
    changed = json.loads(first)
    changed["loss"] *= 1 + 2**-50
    events.write_text("\n".join([*lines, json.dumps(changed)]) + "\n")
    one.compare()
    assert found(one) == ["lost"] and "undisturbed" in one.problems[0].text


def test_whatever_is_left_is_found(space: Space) -> None:
    one = made(space)
    one.ended(one.start(), {0: ""})
    (one.tmp / "left").touch()
    sleeper = subprocess.Popen(["sleep", "600"], cwd=one.folder)
    trial.GONE_WITHIN, before = 0.1, trial.GONE_WITHIN
    try:
        one.check_leftovers()
    finally:
        trial.GONE_WITHIN = before
        sleeper.kill()
        sleeper.wait()
    assert [problem.text for problem in one.problems] == ['process "sleep"', "temporary file left"]
    one.problems.clear()
    (one.tmp / "left").unlink()
    (one.out / ".lock").touch()
    (one.out / "checkpoints" / "step-90").mkdir()
    one.check_leftovers()
    assert [problem.text.split()[0] for problem in one.problems] == [".lock", "step-90"]


def test_a_hang_a_traceback_and_a_wrong_code_are_found(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.training_process.LIMIT", 0.5)
    one = made(space)
    process = one.start()
    process.send(signal.SIGSTOP)
    one.ended(process, {0: ""})
    one.check_leftovers()
    assert found(one) == ["hung"]
    monkeypatch.undo()
    one = made(space)
    assert one.ended(one.start(words=["train", "nothing-of-the-kind"]), {0: ""}).code == 2
    assert one.ended(one.start(words=["train", "nothing-of-the-kind"]), {2: "No space left"}).code == 2
    assert found(one) == ["unclear", "unclear"]
    one.problems.clear()
    one.continue_to_the_end(Ended(1, ""))
    assert not one.problems and one.outs == [one.out]  # nothing had begun: the same command
    one.compare()
    assert not one.problems


def test_the_table_counts_what_was_skipped_apart() -> None:
    kinds = ["link cut", "rank killed", "rank killed"]
    faults = [Fault(number, kind, LAYOUT, "") for number, kind in enumerate(kinds)]
    results = [
        Result(faults[0], 0.0, skipped="no root"),
        Result(faults[1], 2.0),
        Result(faults[2], 4.0, (Problem("lost", "step 3"), Problem("lost", "step 4"))),
    ]
    lines = table(results)
    assert lines[1].split() == ["link", "cut", "0", "0", "0", "0", "0", "0", "0", "1", "-"]
    assert lines[2].split() == ["rank", "killed", "2", "1", "1", "1", "0", "0", "0", "0", "3.0"]
    assert "skipped: link cut: no root" in lines and lines[-1].endswith("lost: step 4")


@pytest.mark.parametrize("words", [["--count", "0"], ["--jobs", "x"]])
def test_a_bad_option_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == 2 and "is no positive number" in capsys.readouterr().err


def test_faults_that_need_mounts_are_skipped_without_them() -> None:
    assert "needs unshare" in inject.missing("disk full", mounts=False)
    assert not inject.missing("disk full", mounts=True) and not inject.missing("rank killed", mounts=False)
