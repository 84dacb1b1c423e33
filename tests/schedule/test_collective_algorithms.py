"""Every algorithm gives what its collective promises, for any number of ranks and any size; how it is asked for."""

import numpy as np
import pytest
from collective_reference import results
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.play import play
from shardwise.errors import UserError
from shardwise.schedule import Algorithm, algorithms, build, collective_name, find
from shardwise.schedule.algorithms.patterns import two_colours, two_trees
from shardwise.schedule.program import lower


@st.composite
def cases(draw: st.DrawFn) -> tuple[Algorithm, int, dict[str, int], int]:
    """(algorithm, ranks, options, elements): sizes that divide, that do not, and below the number of ranks."""
    found, p = draw(st.sampled_from(algorithms())), draw(st.integers(1, 20))
    options = {}
    if "root" in found.options:
        options["root"] = draw(st.integers(0, p - 1))
    if "segments" in found.options:
        options["segments"] = draw(st.integers(1, 9))
    if "node" in found.options:
        options["node"] = draw(st.sampled_from([g for g in range(1, p + 1) if p % g == 0]))
    return found, p, options, draw(st.one_of(st.integers(0, 50), st.integers(1, 5).map(lambda k: k * p)))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_the_program_gives_the_collective_s_result(case, seed):
    """Element by element, through the lowered program, against sums of whole arrays."""
    found, p, options, n = case
    schedule = build(found.collective, found.name, p, **options)
    program = lower(schedule, n)
    generator, elements = np.random.default_rng(seed), schedule.data_elements(n)
    memory = list(generator.integers(-(2**63), 2**63 - 1, (p, program.elements)))
    data = np.stack(memory)[:, :elements]
    with np.errstate(over="ignore"):
        played = play(program, memory=memory)
    assert not played.stuck and not played.problems
    bounds = schedule.bounds(n)
    start = int(bounds[schedule.region(schedule.result)])
    for rank, (offset, right) in results(found.collective, data, bounds, schedule.root).items():
        at = start + offset
        np.testing.assert_array_equal(memory[rank][at : at + len(right)], right)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_one_rank_s_program_is_its_part_of_all(case, data):
    found, p, options, n = case
    schedule = build(found.collective, found.name, p, **options)
    rank = data.draw(st.integers(0, p - 1))
    alone, together = lower(schedule, n, rank), lower(schedule, n)
    assert alone.actions[rank] == together.actions[rank]
    assert not any(actions for other, actions in enumerate(alone.actions) if other != rank)
    assert alone.elements <= together.elements


def test_schedules_of_many_ranks_are_small():
    """Rounds are made when asked for: what is kept for 16,384 ranks is a stage or two, or one for each level."""
    for name, most in (("ring", 2), ("hierarchical", 4), ("rabenseifner", 28), ("recursive-doubling", 14)):
        schedule = build("all-reduce", name, 16384)
        assert len(schedule.stages) <= most
        assert all(len(stage.make(0)) <= 16384 for stage in schedule.stages)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16, 21, 64])
def test_in_two_trees_no_rank_has_two_children_in_both(p):
    trees = two_trees(p)
    for src, dst in trees:
        assert sorted(dst.tolist()) == sorted(set(range(p)) - {int(src[0])})
        assert np.bincount(src, minlength=p).max() <= 2
    src, dst = (np.concatenate(ends) for ends in zip(*trees, strict=True))
    assert np.bincount(src).max() <= 2 and np.bincount(dst).max() <= 2
    colour = two_colours(src, dst)
    for ends in (src, dst):
        assert len({*zip(ends.tolist(), colour.tolist(), strict=True)}) == len(ends)


def test_names_are_forgiving():
    assert collective_name("all_gather_into") == "all-gather" == collective_name("all_gather_into_tensor")
    assert collective_name("all_to_all_single") == "all-to-all" and collective_name(" All-Reduce ") == "all-reduce"
    assert find("all_reduce", "butterfly").name == "recursive-doubling"


@from_table
def test_mistakes_are_told_in_one_line(collective, name, ranks, options, words):
    with pytest.raises(UserError, match=words) as caught:
        build(collective, name, ranks, **options)
    assert "\n" not in str(caught.value)
