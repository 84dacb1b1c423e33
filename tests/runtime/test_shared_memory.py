"""Shared memory when things go wrong: ranks that die, do not come, or cannot have the memory."""

import random
from functools import reduce
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.pool import Pool, RankFailed, run_ranks
from harness.shared_jobs import Said, pieces, quick_alone
from harness.today import EVERYTHING, seed
from shardwise.runtime.transport.mail import PAGE, _room
from shardwise.runtime.transport.shared_collective import PIECE, SLOTS

MEBIBYTE = 1 << 20
LARGE = (SLOTS // 2 + 3) * PIECE // 8
"""Numbers of a rank's piece with which a sum has more parts than may be under way at once."""


def mapped(pid: int) -> str:
    """What a process has mapped; nothing once it has ended, whether its parent knows or not."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_a_rank_killed_inside_collectives_is_named_and_nothing_is_left() -> None:
    """At random moments, 20 with SHARDWISE_ALL=1: the others end with one line, and the next start works."""
    generator = random.Random(seed())
    pool = Pool(3)
    try:
        for number in range(20 if EVERYTHING else 3):
            assert pool.run("harness.shared_jobs:healthy", 3, 20) == [0, 0, 0]
            processes = [process.pid for process, _ in pool.workers]
            with pytest.raises(RankFailed, match="RuntimeError: rank 2 has ended"):
                pool.run("harness.shared_jobs:killed", 3, (number, generator.uniform(0.0, 0.15)), limit=30)
            # Segments have no names: they are gone with the processes that mapped them.
            assert not any(mapped(pid) for pid in processes)
            assert not [path for path in Path("/dev/shm").iterdir() if "shardwise" in path.name]
    finally:
        pool.close()


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    assert run_ranks("harness.shared_jobs:late", 2) == ["rank 1 did not come within 0.5 s", ""]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_small_sums_and_gathers_have_the_same_bits_everywhere(ranks: int) -> None:
    """In the order of the ranks, however far one runs ahead, and with other collectives under way."""
    payload = seed() % 1000, 200
    expected = quick_alone(ranks, payload)
    for found in run_ranks("harness.shared_jobs:quick", ranks, payload):
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("job", ["summed", "summed_later", "summed_last"])
@pytest.mark.parametrize(("ranks", "elements"), [(2, 1000), (3, 1000), (4, 1000), (2, LARGE), (3, LARGE)])
def test_what_is_added_up_has_the_bits_of_the_ranks_order(job: str, ranks: int, elements: int) -> None:
    """On every rank, as on gloo: so a run goes on alike where memory cannot be shared."""
    every = [pieces(rank, ranks, elements).view(ranks, elements) for rank in range(ranks)]
    for rank, found in enumerate(run_ranks(f"harness.shared_jobs:{job}", ranks, elements)):
        assert torch.equal(found, reduce(torch.add, [each[rank] for each in every], torch.ones(elements)))


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_messages_of_every_size_share_a_few_segments(order: str) -> None:
    """As a service's prompts make them: in the worst case one segment of each room, and one more of the largest."""
    sizes = list(range(0, 300_000, 701))
    if order != "rising":
        sizes = sizes[::-1] if order == "falling" else random.Random(seed()).sample(sizes, len(sizes))
    sent, _ = run_ranks("harness.shared_jobs:mailed", 2, sizes)
    largest = max(sizes)
    assert largest <= sent <= {"rising": 9, "falling": 3, "any": 9}[order] * largest


@given(st.integers(0, 1 << 40))
def test_a_segment_is_hardly_larger_than_its_message(nbytes: int) -> None:
    room = _room(nbytes)
    assert nbytes <= room <= max(nbytes * 5 / 4, nbytes + PAGE) and room > 0
    assert _room(room) == room


def test_64_megabytes_are_enough_for_any_tensor() -> None:
    """160 MB pass through segments that may have 64 MB at most."""
    assert run_ranks("harness.shared_jobs:limited", 2, (64 * MEBIBYTE, "shared")) == [Said("shared", "", 2.0)] * 2


def test_without_memory_to_share_gloo_carries_everything() -> None:
    assert run_ranks("harness.shared_jobs:limited", 2, (MEBIBYTE // 2, "auto")) == [Said("gloo", "", 2.0)] * 2


def test_who_asks_for_shared_memory_is_told_why_there_is_none() -> None:
    for said in run_ranks("harness.shared_jobs:limited", 2, (MEBIBYTE // 2, "shared")):
        assert said.problem == (
            "no shared memory: rank 0 got no shared memory: File too large; choose --transport gloo"
        )


def test_transports_that_are_gone_leave_no_open_files() -> None:
    for before, after in run_ranks("harness.shared_jobs:open_files", 2, 5):
        assert after <= before
