"""Signs of life in memory alone: what is written is read back, and who is to blame for a standstill."""

import subprocess
import sys
import time
from pathlib import Path

from shardwise.runtime.job import pulse
from shardwise.runtime.job.pulse import IDLE, SAVE_AWAITED, WAITING, WORKING, Pulse, Sign, signs_in, stuck

NOTHING = Sign(0.0, 0, IDLE, "", "")


def sign(state: int, time: float = 0.0, doing: str = "forward of blocks.1", after: str = "all_reduce over dp") -> Sign:
    return Sign(time, 4, state, doing, after)


def test_signs_pass_through_a_file(tmp_path: Path) -> None:
    theirs = pulse.create(tmp_path / "pulse")
    assert signs_in(theirs) == (NOTHING, NOTHING)
    memory = pulse.memory(tmp_path / "pulse")
    training, saving = Pulse(memory), Pulse(memory, pulse.SAVING)
    before = time.monotonic()
    training.step(3)
    training.work("forward of blocks.1")
    training.collective("all_reduce over dp")
    saving.step(2)
    first, second = signs_in(theirs)
    assert (first.step, first.state, first.doing, first.after) == (
        3,
        WORKING,
        "forward of blocks.1",
        "all_reduce over dp",
    )
    assert (second.step, second.state) == (2, WORKING)
    assert before <= first.time <= second.time <= time.monotonic()
    training.wait()
    assert signs_in(theirs)[0].state == WAITING
    training.work()
    saving.idle()
    first, second = signs_in(theirs)
    assert (first.state, first.doing, second.state) == (WORKING, "forward of blocks.1", IDLE)


def test_who_has_begun_is_never_read_as_not_having_begun(tmp_path: Path) -> None:
    """However often it writes just then: it would count as silent since the start, and the run would end."""
    file = tmp_path / "pulse"
    theirs = pulse.create(file)
    writes = "import sys; from pathlib import Path; from shardwise.runtime.job import pulse\n"
    writes += "mine = pulse.Pulse(pulse.memory(Path(sys.argv[1])))\nwhile True: mine.step(7)"
    writer = subprocess.Popen([sys.executable, "-c", writes, str(file)])
    try:
        deadline = time.monotonic() + 60
        while not pulse.read(theirs).time:
            assert writer.poll() is None and time.monotonic() < deadline
        assert {pulse.read(theirs).step for _ in range(100_000)} == {7}
    finally:
        writer.kill()
        writer.wait()


def test_words_that_are_too_long_do_not_spill_over() -> None:
    memory = bytearray(pulse.SIZE)
    training, saving = Pulse(memory), Pulse(memory, pulse.SAVING)
    saving.work("saving")
    training.collective("c" * 1000)
    training.work("é" * 1000)
    first, second = signs_in(memory)
    assert set(first.after) == {"c"} and first.doing.startswith("é" * 50)
    assert (second.doing, second.after) == ("saving", "")


def test_the_silent_rank_is_named_not_those_that_wait_longer() -> None:
    signs = {
        0: (sign(WAITING, 0.0, after="all_gather over dp"), NOTHING),
        1: (sign(WORKING, 1.0), NOTHING),
        2: (sign(WAITING, 2.0), NOTHING),
        3: (sign(WAITING, 2.0), NOTHING),
    }
    assert stuck(signs, 10, 11.0) is None
    assert stuck(signs, 10, 11.5) == (
        1,
        "rank 1 made no progress for 10 s at step 4 in forward of blocks.1, after all_reduce over dp; "
        "rank 0 waited for it in all_gather over dp, ranks 2 and 3 waited for it in all_reduce over dp",
    )


def test_a_rank_alone() -> None:
    signs = {0: (Sign(5.0, 1, WORKING, "the optimizer", ""), NOTHING)}
    assert stuck(signs, 10, 16.0) == (0, "rank 0 made no progress for 11 s at step 1 in the optimizer")


def test_a_save_in_the_background_is_found_while_training_goes_on() -> None:
    signs = {
        0: (sign(WORKING, 19.0), sign(WAITING, 1.0, after="the gather")),
        1: (sign(SAVE_AWAITED, 3.0), sign(WORKING, 1.0, "the save of its part", "")),
    }
    assert stuck(signs, 10, 20.0) == (
        1, "rank 1 made no progress for 19 s at step 4 in the save of its part; rank 0 waited for it in the gather",
    )  # fmt: skip


def test_nobody_is_blamed_while_somebody_works_or_waits_for_its_save() -> None:
    for other in (sign(WORKING, 99.0), NOTHING, sign(SAVE_AWAITED, 0.0)):
        assert stuck({0: (sign(WAITING), NOTHING), 1: (other, NOTHING)}, 10, 100.0) is None


def test_collectives_that_do_not_match() -> None:
    signs = {
        0: (sign(WAITING, 1.0, after="all_reduce over dp"), NOTHING),
        1: (sign(WAITING, 0.0, after="all_gather over tp"), NOTHING),
        2: (sign(WAITING, 1.0, after="all_reduce over dp"), NOTHING),
    }
    assert stuck(signs, 10, 11.0) is None
    verdict = stuck(signs, 10, 12.0)
    assert verdict == (
        1,
        "no rank made progress for 12 s: each waits for others, ranks 0 and 2 at step 4 in all_reduce over dp, "
        "rank 1 at step 4 in all_gather over tp",
    )


def test_a_rank_without_a_launcher_looks_after_itself() -> None:
    memory = bytearray(pulse.SIZE)
    Pulse(memory).collective("all_reduce over dp")
    said: list[str] = []
    pulse.watch_over(memory, 5, 0.1, said.append)
    deadline = time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(said) == 1 and said[0].startswith("rank 5 made no progress for 0 s, after all_reduce over dp")
