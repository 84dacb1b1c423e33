import math

import numpy as np
import pytest

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.schedule.stragglers import SlowRank, Stragglers, emulated_seconds

STEPS = np.arange(40_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank=1,factor=3", SlowRank(1, 3.0)),
        (" rank = all , factor = 3 , probability = 0.25", SlowRank(None, 3.0, 0.25)),
        ("rank=all,spread=0.3", SlowRank(None, spread=0.3)),
        ("factor=1.5,rank=0,spread=0.1", SlowRank(0, 1.5, spread=0.1)),
    ],
)
def test_a_text_is_read_and_written(text: str, expected: SlowRank) -> None:
    assert SlowRank.parse(text) == expected
    assert SlowRank.parse(str(expected)) == expected


@from_table
def test_a_wrong_text_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^--slow ") as error:
        Stragglers.parse([text])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_rank_that_does_not_exist_and_none() -> None:
    slow = Stragglers.parse(["rank=4,factor=2"])
    slow.check(5)
    with pytest.raises(UserError, match="are 0 to 3"):
        slow.check(4)
    assert Stragglers.parse(["none"]) == Stragglers.parse([]) == Stragglers(())
    assert emulated_seconds(None) is None and emulated_seconds("250ms") == 0.25
    with pytest.raises(UserError, match="--emulate 0s"):
        emulated_seconds("0s")


def test_trap_32_a_factor_belongs_to_its_rank() -> None:
    slow = Stragglers.parse(["rank=2,factor=3", "rank=all,factor=2,probability=0.5"], seed=7)
    factors = slow.factors(range(4), STEPS[:200])
    assert set(factors[2]) == {3.0, 6.0}
    assert all(set(factors[rank]) == {1.0, 2.0} for rank in (0, 1, 3))


def test_a_factor_is_a_function_of_seed_rank_and_step() -> None:
    texts = ["rank=all,factor=3,probability=0.25", "rank=1,spread=0.3"]
    slow = Stragglers.parse(texts, seed=5)
    whole = slow.factors(range(3), STEPS[:100])
    for rank, step in ((0, 0), (1, 17), (2, 99)):
        assert slow.factor(rank, step) == pytest.approx(whole[rank, step], rel=1e-12)
    assert np.array_equal(slow.factors(range(1, 3), STEPS[40:60]), whole[1:, 40:60])
    assert not np.array_equal(whole[0], whole[2])
    assert not np.array_equal(Stragglers.parse(texts, seed=6).factors(range(3), STEPS[:100]), whole)


def test_slow_steps_are_as_frequent_as_asked_for_and_ranks_are_independent() -> None:
    slow = Stragglers.parse(["rank=all,factor=3,probability=0.25"], seed=1)
    factors = slow.factors(range(4), STEPS)
    share = (factors == 3).mean(axis=1)
    assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / len(STEPS)))
    slowest = factors.max(axis=0)  # of four independent two-point variables
    assert slowest.mean() == pytest.approx(1 + 2 * (1 - 0.75**4), abs=5 / math.sqrt(len(STEPS)))
    # One step says nothing about the next.
    assert np.corrcoef(factors[0][:-1], factors[0][1:])[0, 1] == pytest.approx(0, abs=5 / math.sqrt(len(STEPS)))


def test_spread_is_log_normal() -> None:
    logs = np.log(Stragglers.parse(["rank=all,spread=0.3"], seed=2).factors(range(2), STEPS))
    assert logs.mean() == pytest.approx(0, abs=0.01)
    assert logs.std() == pytest.approx(0.3, rel=0.02)
    assert ((logs / 0.3) ** 4).mean() == pytest.approx(3, rel=0.05)  # as a normal variable has it
