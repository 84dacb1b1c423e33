"""What people and pages are shown of a schedule."""

import json
import re
from pathlib import Path

import pytest
from collective_reference import step_by_step

from shardwise.schedule import algorithms, build
from shardwise.schedule.algorithms import registry
from shardwise.schedule.show import MOST_FRAMED, describe, frames
from shardwise.schedule.verify import verify


def test_a_ring_reads_like_one():
    lines = list(describe(build("all-reduce", "ring", 4), 10))
    assert lines[0] == "all-reduce ring: 4 ranks, 6 rounds; 10 elements in 4 chunks of 2 or 3; memory: data"
    start = lines.index("round 0: reduce-scatter")
    assert lines[start + 1] == "  rank 0 → rank 1: add chunk 3 (3 elements)"
    table = [line.split() for line in lines[start + 5 : start + 10]]
    assert table[0] == ["0", "1", "2", "3"] and table[2] == ["rank", "1", "1", "1", "1", "0-1"]
    assert [line.split()[2:] for line in lines[-6:-2]] == [["0-3"] * 4] * 4


def test_other_memory_and_spans_are_named():
    text = "\n".join(describe(build("all-to-all", "bruck", 4), 4))
    assert "rank 0, by itself: copy chunk 0 to chunk 0 of out (1 element)" in text
    assert "rank 0 → rank 1: copy chunk 3 to chunk 3 of scratch (1 element)" in text
    assert "chunks 0,2" in "\n".join(describe(build("all-gather", "hierarchical", 4, node=2), 4))
    assert "holds" not in "\n".join(describe(build("all-reduce", "ring", 9), 9))


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: f"{a.collective}-{a.name}")
def test_frames_tell_what_every_chunk_holds(algorithm):
    """A page needs nothing else: the states are those of the transfers, done step by step by somebody else."""
    schedule = build(algorithm.collective, algorithm.name, 6)
    data = json.loads(json.dumps(frames(schedule, 20)))
    assert len(data["frames"]) == schedule.steps + 1 and data["frames"][0]["transfers"] == []
    rounds = list(schedule.rounds())
    for done, frame in enumerate(data["frames"]):
        memory = step_by_step(schedule, rounds[:done])
        for rank, row in enumerate(frame["holds"]):
            expected = [None if held is None else sorted([*part] for part in held.elements()) for held in memory[rank]]
            assert row == expected
    sent = sum(t["elements"] for frame in data["frames"] for t in frame["transfers"] if t["src"] != t["dst"])
    assert (sent > 0) and data["bounds"][-1] == schedule.data_elements(20) * len(schedule.regions)


def test_the_guide_s_examples_run(monkeypatch):
    """Its own algorithm is right, and known only while this test runs."""
    monkeypatch.setattr(registry, "_KNOWN", {name: dict(known) for name, known in registry._KNOWN.items()})
    guide = Path(__file__).parents[2] / "docs" / "collectives.md"
    for example in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
        exec(example, {})
    assert all(verify(build("all-gather", "neighbours", p)) == [] for p in (1, 2, 5, 8))


def test_frames_of_many_ranks_leave_the_states_out():
    data = frames(build("all-reduce", "recursive-doubling", MOST_FRAMED + 1), 1)
    assert {frame["holds"] for frame in data["frames"]} == {None}
