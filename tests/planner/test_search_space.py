"""The space: every candidate is a legal layout, each there once, and none that the definition names is missing."""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.frames import frame_of
from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload, check
from shardwise.layout.keys import divisors
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.model.flops import forward_flops_per_token
from shardwise.planner import Space, plan
from shardwise.planner.ranking import SWITCHES, distinct, words
from shardwise.planner.space import LayoutColumns, held_by
from shardwise.predict.fixing import SCHEDULES, fixed_of
from shardwise.predict.supported import in_closed_form
from shardwise.predict.time import engine
from shardwise.schedule.pipeline.plan import StageLayers

BRIDGE, OWN = engine("megatron-bridge"), engine("shardwise")
MODELS = (
    "tiny-llama", "gpt2", "llama-3-8b", "llama-3-70b", "qwen2.5-14b", "megatron-22b", "megatron-1t", "gpt2-xl",
    "mixtral-8x7b", "deepseek-v3", "bloom-176b",
)  # fmt: skip
SPARSE = get("tiny-llama").replace(name="sparse", experts=Experts(6, 2, 64), heads=4, kv_heads=2)


def space(model="tiny-llama", cluster="8xH100", seq=512, batch=16, fix="") -> Space:
    return Space(get(model), Cluster.parse(cluster), Workload(seq, batch), BRIDGE, fixed_of(fix))


def layouts(frame: LayoutColumns) -> list[Layout]:
    every = product(enumerate(frame.rows), frame.shardings, enumerate(frame.orders))
    return [frame.layout(row, z, o) for (r, row), z, (i, o) in every if frame.possible[r][i]]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(["1xH100", "8xA100", "3x8xH100", "5xL4", "8x72xGB200", "64x8xH100"]),
    st.sampled_from([256, 1000, 1024]),
    st.sampled_from([1, 7, 24, 64, 96]),
    st.data(),
)
def test_candidates_are_legal_layouts(name, text, seq, batch, data):
    model, cluster, workload = get(name), Cluster.parse(text), Workload(seq, batch)
    frames = Space(model, cluster, workload, BRIDGE).frames
    if not frames:
        return
    frame = data.draw(st.sampled_from(frames))
    rows = [(r, o) for r, o in product(range(len(frame.rows)), range(len(frame.orders))) if frame.possible[r][o]]
    r, o = data.draw(st.sampled_from(rows))
    layout = frame.layout(frame.rows[r], data.draw(st.sampled_from(frame.shardings)), frame.orders[o])
    assert Layout.parse(str(layout)) == layout
    check(layout, model, workload, cluster.devices)
    assert workload.micro_batches(layout) == frame.counts[r]


@from_table
def test_nothing_is_there_twice_and_nothing_is_missing(model, cluster, seq, batch, software):
    """Against all values of all keys, without what `check` rejects or the engine's software lacks."""
    found = Space(model, Cluster.parse(cluster), Workload(seq, batch), engine(software))
    every = [layout for frame in found.frames for layout in layouts(frame)]
    assert len({str(layout) for layout in every}) == len(every) == found.size
    texts = [str(layout) for layout in every if not layout.stages]
    devices = found.cluster.devices
    degrees = divisors(devices)
    wanted = set()
    for tp, pp, cp in product(degrees, repeat=3):
        if devices % (tp * pp * cp) == 0:
            wanted |= set(every_layout(model, found, tp, pp, cp, devices // (tp * pp * cp)))
    assert set(texts) == wanted


def every_layout(model, found: Space, tp, pp, cp, dp):
    # As many layers in each, or one in all but the first and the last.
    whole = set(divisors(model.layers)) | (set() if model.experts else {model.layers + 2})
    chunks = [v for v in range(1, model.layers + 3) if v == 1 or (pp > 1 and pp * v in whole)]
    stages = [(0, 0, 0)] + [(z, s, 0) for z in (1, 2, 3) for s in range(2, dp * cp + 1)]
    if found.features.copies and found.cluster.nodes > 1:  # the most ranks of a shard group that share a node
        near = {s: [h for h in range(2, s) if s % h == 0 and h * tp <= 4] for s in range(2, dp * cp + 1)}
        stages += [(3, s, max(h)) for s, h in near.items() if h]
    shapes = product((False, True), ("none", "selective", "full"), range(1, found.workload.batch + 1), stages)
    experts = range(1, model.experts.count + 1) if model.experts else (1,)
    for shape, schedule, virtual, ep in product(shapes, SCHEDULES, chunks, experts):
        sp, recompute, micro, (zero, shard, hpz) = shape
        if (pp == 1 and schedule != "1f1b") or pp > model.layers:
            continue
        try:
            layout = Layout(
                dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, shard=shard, hpz=hpz, sp=sp, recompute=recompute,
                micro=micro, schedule=schedule, virtual=virtual, attention=found.attention, ep=ep,
            )  # fmt: skip
            check(layout, model, found.workload, found.cluster.devices)
        except UserError:
            continue
        closed = in_closed_form(schedule, virtual, pp, found.workload.micro_batches(layout))
        if closed and not found.features.missing(layout, model.layers):
            yield str(layout)


@pytest.mark.parametrize(
    ("stages", "words"),
    [("8/9/9/7", "adds up to 33 layers, but llama-3-8b has 32"), ("9/9/9/5", "stages=8/8/8/8 or 8/9/9/6 (estimate")],
)
def test_stages_that_no_search_has(stages, words):
    with pytest.raises(UserError, match=re.escape(words)):
        plan("llama-3-8b", "8xH100", Workload(8192, 64), fix=f"pp=4,virtual=1,stages={stages}", explain=False)


def busiest(stages: Sequence[int], pp: int, head: float) -> float:
    *others, last = held_by(stages, pp)
    return max(*others, last + head)


@pytest.mark.parametrize(("name", "cluster"), [("llama-3-8b", "8xH100"), ("gemma-2-27b", "16xH100"), ("gpt2", "4xL4")])
def test_chosen_stages_are_lighter_than_even_ones(name, cluster):
    """No other cut of as many layers leaves the busiest rank less, with one chunk a rank; and no pipeline has two."""
    model, workload = get(name), Workload(1024, 96)
    of_head = 2 * model.vocab * model.hidden
    head = of_head * model.layers / (forward_flops_per_token(model, workload.seq) - of_head)
    cuts = {(one.pp, one.virtual, one.stages) for frame in Space(model, Cluster.parse(cluster), workload, OWN).frames
            for one in layouts(frame) if one.pp > 1}  # fmt: skip
    chosen = {(pp, virtual): stages for pp, virtual, stages in cuts if stages}
    assert len(chosen) == sum(bool(stages) for *_, stages in cuts)
    assert name == "gpt2" or {pp for pp, virtual in chosen if virtual == 1}
    for (pp, virtual), stages in chosen.items():
        even = StageLayers.even(model.layers, pp).layers
        most = max(virtual for of, virtual, stages in cuts if of == pp and not stages)
        assert busiest(stages, pp, head) < 0.97 * busiest(even, pp, head) or virtual > most
    for pp in {pp for pp, *_ in cuts if pp <= 4}:
        least = min(busiest(stages, pp, head) for stages in compositions(model.layers, pp))
        even = busiest(StageLayers.even(model.layers, pp).layers, pp, head)
        found = busiest(chosen[pp, 1], pp, head) if (pp, 1) in chosen else even
        assert found == pytest.approx(least) or 0.97 * even <= least <= found == even


def compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of every pipeline with at least one on each stage."""
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *ends, layers)))


def test_closed_forms_hold_where_a_schedule_is_legal():
    assert in_closed_form("interleaved", 2, 4, 8) and not in_closed_form("interleaved", 2, 4, 2)
    assert not in_closed_form("1f1b", 2, 4, 8) and not in_closed_form("interleaved", 1, 4, 8)
    assert in_closed_form("zb-h1", 1, 4, 4) and not in_closed_form("zb-h1", 1, 4, 3)
    assert in_closed_form("1f1b", 1, 1, 1) and not in_closed_form("gpipe", 1, 1, 4)


def test_what_is_fixed_is_in_every_candidate():
    found = space("llama-3-8b", "2x8xH100", 4096, 64, "tp=4,zero=1,shard=2,sp,micro=2,recompute=full")
    assert found.size
    for frame in found.frames:
        for layout in layouts(frame):
            assert (layout.tp, layout.zero, layout.micro, layout.recompute) == (4, 1, 2, "full")
            assert layout.sp and layout.shard_ranks == 2
    assert (
        space("llama-3-8b", "8xH100", 4096, 64, "sp=false,schedule=1f1b").size
        < space("llama-3-8b", "8xH100", 4096, 64).size
    )


def test_a_shard_group_of_all_is_what_layouts_without_zero_have():
    for zero in ("zero=0", "zero=2"):
        found, free = (space("llama-3-8b", "8xH100", 4096, 64, text) for text in (f"{zero},shard=0", zero))
        every = {str(layout) for frame in free.frames for layout in layouts(frame) if not layout.shard}
        assert {str(layout) for frame in found.frames for layout in layouts(frame)} == every


@from_table
def test_what_cannot_be_fixed_is_said_in_a_line(text, words):
    with pytest.raises(UserError, match=words):
        fixed_of(text)


@from_table
def test_what_cannot_be_searched_is_said_in_a_line(arguments, words):
    with pytest.raises(UserError, match=words):
        space(**arguments)


def test_decoders_of_other_kinds_are_not_planned():
    model = get("gpt2").replace(gated=True)
    with pytest.raises(UserError, match="gpt2 cannot be planned yet: LayerNorm with a gated"):
        Space(model, Cluster.parse("8xH100"), Workload(512, 16), BRIDGE)


@from_table
def test_splits_of_experts_that_no_search_comes_upon_are_refused(text, words):
    with pytest.raises(UserError, match=words):
        frame_of(SPARSE, Layout.parse(text), Workload(512, 24))


def test_a_search_needs_sequences():
    with pytest.raises(UserError, match="--seq and --batch"):
        Space(get("gpt2"), Cluster.parse("8xH100"), Workload(), BRIDGE)


def test_overlaps_count_where_they_make_a_difference():
    plain = next(frame for frame in space().frames if frame.tp == frame.pp == 1 and frame.data > 1)
    found = list(distinct(plain, BRIDGE))
    # Nothing to overlap over tp and between stages; parameters are gathered at stages 1 to 3 only.
    assert len(found) == 4
    assert all(variant.tensor_overlap and variant.pipeline_overlap for variant, _ in found)
    assert all(sharding.zero for variant, shardings in found if not variant.gather_overlap for sharding in shardings)
    split = next(frame for frame in space().frames if min(frame.tp, frame.pp, frame.data) > 1)
    assert len(list(distinct(split, BRIDGE))) == 2 ** len(SWITCHES)
    assert len({words(variant) for variant, _ in distinct(split, BRIDGE)}) == 2 ** len(SWITCHES)


def test_dropping_attention_probabilities_needs_explicit_attention():
    found = space("gpt2", "8xH100", 512, 16)
    assert found.attention == "math"
    layout = layouts(found.frames[0])[0]
    with pytest.raises(LayoutError, match="attention=math"):
        check(Layout.parse(str(layout).replace(",attention=math", "")), found.model)
