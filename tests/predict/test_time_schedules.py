"""The bubbles that the time of a step takes for a schedule, against schedules simulated action by action."""

from itertools import product

import numpy as np
import pytest

from shardwise.errors import UserError
from shardwise.predict.fixing import SCHEDULES
from shardwise.predict.time.pieces import Pieces
from shardwise.predict.time.step import bubble_share
from shardwise.schedule.pipeline import build, find
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

SECONDS = [(2.0, 2.0, 1.0), (3.0, 4.0, 2.0), (1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (4.0, 1.0, 2.0), (1.0, 5.0, 2.0)]
"""Forward, input gradient, weight gradient of all chunks of a rank."""


def idle(name: str, p: int, m: int, v: int, seconds: tuple[float, float, float]) -> float:
    schedule = build(name, p, m, v)
    return max(simulate(schedule, Times.equal(schedule.stages, *(each / v for each in seconds))).idle)


def share(name: str, p: int, m: int, v: int, seconds: tuple[float, float, float]) -> float:
    forward, rest, weights = seconds
    pieces = Pieces({"matmul": forward + rest + weights, "host": 9.0}, {}, {}, forward, weights)
    return float(bubble_share(name, p, m, v, pieces))


@pytest.mark.parametrize("name", SCHEDULES)
def test_shares_are_those_of_simulated_schedules(name):
    exact = 0
    for p, m, seconds in product((2, 3, 4), (1, 2, 4, 8, 9), SECONDS):
        for v in (1, 2, 3):
            if find(name).objection(p, m, v) or (name == "interleaved" and m < p):
                continue
            told = share(name, p, m, v, seconds) * idle("1f1b", p, m, 1, seconds)
            real = idle(name, p, m, v, seconds)
            # Where zb-h1 has no exact form it counts as 1F1B, which is no shorter.
            if name == "zb-h1" and (m < p or seconds[2] > min(seconds[:2])):
                assert real <= told * (1 + 1e-9)
                continue
            assert told == pytest.approx(real), (p, m, v, seconds)
            exact += 1
    assert exact > 20


def test_arrays_are_numbers():
    rows = [(3.0, 4.0, 2.0), (1.0, 1.0, 3.0)]
    forward, rest, weights = (np.array(column) for column in zip(*rows, strict=True))
    pieces = Pieces({"matmul": forward + rest + weights}, {}, {}, forward, weights)
    assert bubble_share("zb-h1", 4, 8, 1, pieces).tolist() == [share("zb-h1", 4, 8, 1, row) for row in rows]


def test_a_schedule_without_closed_form_is_refused():
    with pytest.raises(UserError, match="schedule=zb-v has no closed form; there is one for 1f1b"):
        share("zb-v", 4, 8, 2, (1.0, 1.0, 1.0))
