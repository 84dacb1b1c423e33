"""The timelines of all ranks: one clock a host, bounded, whole on disk or refused in one line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.report.rank_timelines import RankTimelines, Recorded, aligned, kept

EVENT: dict[str, Any] = {"name": "forward blocks.0", "stream": "compute", "start_s": 2e-6, "duration_s": 1e-6}

recorded = st.dictionaries(
    st.integers(0, 7),
    st.builds(Recorded, st.sampled_from("xyz"), st.integers(0, 10**15), st.integers(0, 3).map(lambda n: (EVENT,) * n)),
    min_size=1,
)


@given(recorded)
def test_ranks_of_a_host_keep_their_distance_and_hosts_begin_together(found: dict[int, Recorded]) -> None:
    ranks = {one.rank: one for one in aligned(found, 3, 8).ranks}
    assert list(ranks) == sorted(found)
    for a in found:
        for b in found:
            same = found[a].host == found[b].host
            assert same == (ranks[a].host == ranks[b].host)
            if same:
                assert ranks[a].start - ranks[b].start == found[a].start - found[b].start
    for host in {one.host for one in ranks.values()}:
        assert min(one.start for one in ranks.values() if one.host == host) == 0


@given(recorded)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, found: dict[int, Recorded]) -> None:
    path = tmp_path_factory.mktemp("run") / "timelines.json"
    timelines = aligned(found, 3, 8)
    timelines.write(path)
    assert RankTimelines.read(path) == timelines


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 50), min_size=1), st.integers(0, 400), st.data())
def test_those_that_must_and_as_many_as_there_is_room_for(
    counts: dict[int, int], most: int, data: st.DataObject
) -> None:
    first = data.draw(st.sets(st.sampled_from(sorted(counts))))
    chosen = kept(counts, first, most)
    assert first <= chosen <= set(counts)
    if chosen > first:
        assert sum(counts[rank] for rank in chosen) <= most
    left = sorted(set(counts) - chosen)
    if left:
        assert sum(counts[rank] for rank in {*chosen, left[0]}) > most
        assert all(rank < left[0] for rank in chosen - first)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "timelines": [{}]}', "\x00"])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timelines.json"
    path.write_text(text)
    with pytest.raises(UserError, match="damaged"):
        RankTimelines.read(path)


def test_another_version_and_a_missing_file_say_so(tmp_path: Path) -> None:
    path = tmp_path / "timelines.json"
    path.write_text('{"schema_version": 9, "what": "another version has"}')
    with pytest.raises(UserError, match="schema version 9, not 1"):
        RankTimelines.read(path)
    with pytest.raises(UserError, match="cannot read timelines"):
        RankTimelines.read(tmp_path / "none.json")
