"""State off the device: the same bits as in memory, in any layout, and exact bytes of every home."""

from zlib import crc32

import pytest

from harness.checks import assert_exact, assert_rules, train
from harness.jobs import RankOutcome
from harness.offloads import Offloaded, clear, offload_cases
from harness.space import point
from harness.today import by_turns
from shardwise.layout import Layout


def _bits(ranks: list[RankOutcome]) -> list[tuple]:
    return [(rank.losses, rank.norms, rank.pieces) for rank in ranks]


@pytest.mark.layouts(lambda offloaded: offloaded.layout)
@pytest.mark.parametrize("offloaded", by_turns(offload_cases(), 3, "offloads"), ids=lambda o: o.id)
def test_a_home_changes_no_bit(offloaded: Offloaded) -> None:
    case, layout = clear(offloaded), offloaded.layout
    over = {"transport": "gloo" if crc32(offloaded.id.encode()) % 3 == 0 else "shared"}
    in_memory, ranks = (train(case, each, **over) for each in (offloaded.plain, layout))
    assert _bits(ranks) == _bits(in_memory)
    assert_exact(case, layout, ranks)


def test_there_are_enough_of_them() -> None:
    assert len({each.id for each in offload_cases()}) >= 40


@pytest.mark.parametrize("way", ["zero=3,offload=nvme,offload_params=nvme", "zero=2,offload=cpu", "offload=nvme"])
def test_one_device_keeps_state_elsewhere(way: str) -> None:
    """A stage is in effect even for one rank, which in memory shards nothing: equal but for rounding."""
    case = point(model="qwen3", accumulate=2).case
    layout = Layout.parse(f"{way},precision=fp64")
    ranks = train(case, layout)
    assert_rules(case, layout, ranks)
