import ast
import re
from itertools import combinations
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

import shardwise
from harness.cases import from_table, table
from harness.strategies import any_layouts
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import (
    CP,
    DATA,
    DENSE,
    DP,
    EDP,
    EP,
    ETP,
    EXPERT,
    KV,
    PP,
    REPLICA,
    REPLICATE,
    SHARD,
    STAGE,
    TP,
    Axes,
    named,
)

AXES = (REPLICA, PP, DP, CP, TP, EDP, EP, ETP, DATA, SHARD, REPLICATE, KV)
COMPOSED = (*AXES, REPLICA + STAGE, SHARD + TP, DP + TP, DENSE, EXPERT, PP + EP, EDP + ETP, SHARD + TP + PP)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    layout = draw(any_layouts())
    assume(layout.ranks <= 64)
    return Mesh(layout, draw(st.sampled_from([n for n in range(1, layout.tp + 1) if layout.tp % n == 0])))


@given(meshes(), st.sampled_from([DENSE, EXPERT]))
def test_either_view_names_every_rank_once(mesh: Mesh, view: Axes) -> None:
    view = REPLICA + view
    places = [tuple(mesh.index((axis,), rank) for axis in view) for rank in range(mesh.layout.training_ranks)]
    assert all(a != b for a, b in combinations(places, 2))
    if view == REPLICA + DENSE:
        ranks = [mesh.rank(**dict(zip(view, place, strict=True))) for place in places]
        assert ranks == list(range(mesh.layout.training_ranks))


@given(meshes(), st.sampled_from(COMPOSED))
def test_groups_of_axes_part_the_ranks(mesh: Mesh, axes: Axes) -> None:
    groups = {mesh.group(axes, rank) for rank in range(mesh.layout.training_ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.layout.training_ranks))
    assert {len(group) for group in groups} == {mesh.size(axes)}
    for group in groups:
        assert all(mesh.group(axes, rank) == group for rank in group)
        assert [mesh.index(axes, rank) for rank in group] == list(range(len(group)))


@given(meshes(), st.sampled_from(COMPOSED))
def test_ranks_of_a_group_differ_along_its_axes_alone(mesh: Mesh, axes: Axes) -> None:
    view = EXPERT if set(axes) & set(EXPERT) - set(PP) else DENSE
    others = [(axis,) for axis in view if axis not in axes]
    if set(axes) <= set(view):
        for rank in range(mesh.layout.training_ranks):
            for other in others:
                assert {mesh.index(other, member) for member in mesh.group(axes, rank)} == {mesh.index(other, rank)}


@given(meshes())
def test_shards_and_replicas_cross_in_one_rank(mesh: Mesh) -> None:
    for rank in range(mesh.layout.training_ranks):
        shard, replicate = set(mesh.group(SHARD, rank)), set(mesh.group(REPLICATE, rank))
        assert shard & replicate == {rank}
        assert shard | replicate <= set(mesh.group(DATA, rank))


@given(meshes())
def test_both_views_have_the_same_stages(mesh: Mesh) -> None:
    for rank in range(mesh.layout.training_ranks):
        assert set(mesh.group(EDP + EP + ETP, rank)) == set(mesh.group(STAGE, rank))
        assert mesh.stage(mesh.index(PP, rank)) == tuple(sorted(mesh.group(REPLICA + STAGE, rank)))
        if mesh.layout.expert_tp == mesh.layout.tp:
            assert mesh.group(ETP, rank) == mesh.group(TP, rank)


@given(meshes(), st.sampled_from(COMPOSED))
def test_a_name_tells_the_group_again(mesh: Mesh, axes: Axes) -> None:
    name = mesh.name(axes)
    assert bool(name) == (mesh.size(axes) > 1)
    assert all(mesh.group(named(name), rank) == mesh.group(axes, rank) for rank in range(mesh.layout.training_ranks))


def test_the_default_order_keeps_tensor_parallel_ranks_together() -> None:
    mesh = Mesh(Layout.parse("dp=2,tp=2,pp=2"))
    assert mesh.group(TP, 0) == (0, 1)
    assert mesh.group(DP, 0) == (0, 2)
    assert mesh.group(PP, 0) == (0, 4)
    other = Mesh(Layout.parse("dp=2,tp=2,pp=2,order=dp-pp-cp-tp"))
    assert (other.group(TP, 0), other.group(PP, 0), other.group(DP, 0)) == ((0, 1), (0, 2), (0, 4))


def test_expert_groups_of_a_stage() -> None:
    """Eight ranks, tp fastest: experts over neighbouring tensor groups, or over single ranks where etp is 1."""
    mesh = Mesh(Layout.parse("dp=4,tp=2,ep=2,etp=2"))
    assert [mesh.group(axes, 0) for axes in (ETP, EP, EDP)] == [(0, 1), (0, 2), (0, 4)]
    mesh = Mesh(Layout.parse("dp=4,tp=2,ep=4,etp=1,pp=2"))
    assert [mesh.group(axes, 9) for axes in (ETP, EP, EDP, PP)] == [(9,), (8, 9, 10, 11), (9, 13), (1, 9)]


def test_replicas_of_a_key_value_head_are_neighbours() -> None:
    mesh = Mesh(Layout.parse("tp=4"), kv_replicas=2)
    assert [mesh.group(KV, rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@from_table
def test_names_in_the_ledger(layout: str, axes: Axes, name: str) -> None:
    assert Mesh(Layout.parse(layout)).name(axes) == name


KEYS = table(__file__, "KEYS")
"""Where a word that is also an axis's name is something else."""


def test_one_file_spells_axes() -> None:
    package = Path(shardwise.__file__).parent
    one = "|".join(sorted(set(DENSE + EXPERT + SHARD + REPLICATE + KV)))
    spelled: dict[str, list[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            word = node.value if isinstance(node, ast.Constant) else None
            if isinstance(word, str) and re.fullmatch(rf"({one})(_({one}))*", word):
                spelled.setdefault(path.relative_to(package).as_posix(), []).append(word)
    del spelled["layout/axes.py"]
    excused = {path: key for path in spelled for key in KEYS if path == key or path.startswith(f"{key}/")}
    composed = [path for path, words in spelled.items() if any("_" in word for word in words)]
    assert {excused.get(path) for path in composed} <= {"interop/engines", "certify/engines"}
    assert {path: words for path, words in spelled.items() if path not in excused} == {}
    assert set(excused.values()) == set(KEYS), "an excuse that nothing needs"
