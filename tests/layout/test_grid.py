from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.strategies import any_layouts
from shardwise.layout import Grid, Layout
from shardwise.layout.layout import AXES

NAMES = ("pp", "dp", "cp", "tp", "data", "shard", "replicate", "kv", "shard_tp", "dp_tp", "pp_dp_cp_tp")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    layout = draw(any_layouts())
    assume(layout.ranks <= 64)
    return Grid(layout, draw(st.sampled_from([n for n in range(1, layout.tp + 1) if layout.tp % n == 0])))


@given(grids())
def test_coordinates_name_every_rank_once(grid: Grid) -> None:
    ranks = range(grid.layout.ranks)
    at = [{axis: grid.coordinates(rank)[axis] for axis in AXES} for rank in ranks]
    assert [grid.rank(**place) for place in at] == list(ranks)
    assert all(a != b for a, b in combinations(at, 2))


@given(grids(), st.sampled_from(NAMES))
def test_groups_of_an_axis_part_the_ranks(grid: Grid, axes: str) -> None:
    groups = {grid.group(axes, rank) for rank in range(grid.layout.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.layout.ranks))
    assert {len(group) for group in groups} == {grid.size(axes)}
    for group in groups:
        assert all(grid.group(axes, rank) == group for rank in group)


@given(grids())
def test_shards_and_replicas_cross_in_one_rank(grid: Grid) -> None:
    for rank in range(grid.layout.ranks):
        shard, replicate = set(grid.group("shard", rank)), set(grid.group("replicate", rank))
        assert shard & replicate == {rank}
        assert shard | replicate <= set(grid.group("data", rank))


@given(grids(), st.sampled_from(["dp", "cp", "tp", "pp", "data", "shard", "replicate", "kv"]))
def test_a_group_is_in_the_order_of_its_axis(grid: Grid, axis: str) -> None:
    for rank in range(grid.layout.ranks):
        places = [grid.coordinates(member)[axis] for member in grid.group(axis, rank)]
        assert places == list(range(len(places)))


def test_the_default_order_keeps_tensor_parallel_ranks_together() -> None:
    grid = Grid(Layout.parse("dp=2,tp=2,pp=2"))
    assert grid.group("tp", 0) == (0, 1)
    assert grid.group("dp", 0) == (0, 2)
    assert grid.group("pp", 0) == (0, 4)
    other = Grid(Layout.parse("dp=2,tp=2,pp=2,order=dp-pp-cp-tp"))
    assert (other.group("tp", 0), other.group("pp", 0), other.group("dp", 0)) == ((0, 1), (0, 2), (0, 4))


def test_replicas_of_a_key_value_head_are_neighbours() -> None:
    grid = Grid(Layout.parse("tp=4"), kv_replicas=2)
    assert [grid.group("kv", rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("layout", "axes", "name"),
    [
        ("dp=4", "data", "dp"),
        ("dp=4,zero=1", "shard", "dp"),
        ("dp=4,zero=1", "replicate", ""),
        ("dp=4", "replicate", "dp"),
        ("dp=4,zero=1,shard=2", "shard", "shard"),
        ("dp=4,zero=1,shard=2", "replicate", "replicate"),
        ("dp=2,cp=2,zero=3", "shard", "dp_cp"),
        ("cp=2,zero=3", "shard", "cp"),
        ("dp=2,tp=2,zero=3", "shard_tp", "dp_tp"),
        ("dp=4,tp=2,zero=3,shard=2", "shard_tp", "shard_tp"),
        ("tp=2", "shard_tp", "tp"),
        ("dp=2,tp=2", "shard_tp", "tp"),
    ],
)
def test_names_in_the_ledger(layout: str, axes: str, name: str) -> None:
    assert Grid(Layout.parse(layout)).axes_name(axes) == name
