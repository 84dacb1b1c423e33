from dataclasses import fields

import pytest
from hypothesis import given

from harness.strategies import any_layouts
from shardwise.errors import LayoutError
from shardwise.layout import Layout


@given(any_layouts())
def test_text_and_layout_are_the_same(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


@given(any_layouts())
def test_canonical_text_names_what_differs_from_the_defaults_in_order(layout: Layout) -> None:
    keys = [word.partition("=")[0] for word in str(layout).split(",")]
    order = [field.name for field in fields(Layout)]
    assert keys == sorted(keys, key=order.index)
    differing = [field.name for field in fields(Layout) if getattr(layout, field.name) != field.default]
    assert keys == (differing or ["dp"])


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", "dp=1"),
        ("dp=1,zero=0", "dp=1"),
        (" tp=2 , dp = 4 ", "dp=4,tp=2"),
        ("tp=2,sp=true", "tp=2,sp"),
        ("tp=2,sp=false", "tp=2"),
        ("dp=4,zero=3,shard=4", "dp=4,zero=3"),
        ("dp=4,zero=3,shard=2", "dp=4,zero=3,shard=2"),
        ("dp=2,tp=2,pp=2,zero=1,sp,schedule=1f1b,micro=1,recompute=full", "dp=2,tp=2,pp=2,zero=1,sp,recompute=full"),
        ("pp=4,stages=21/20/20/19", "pp=4,stages=21/20/20/19"),
    ],
)  # fmt: skip
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zeor=2", "did you mean zero"),
        ("frobnicate=2", "known keys: dp, tp"),
        ("dp=2,dp=4", "dp is given twice"),
        ("dp", "dp needs a value, such as dp=2"),
        ("dp=two", "dp needs an integer, not 'two'"),
        ("dp=-2", "dp must not be negative"),
        ("dp=0", "dp must be a positive integer, not 0"),
        ("zero=4", "zero must be 0, 1, 2 or 3"),
        ("recompute=ful", "did you mean full"),
        ("precision=fp16", "did you mean bf16"),
        ("precision=float32", "did you mean fp32"),
        ("grads=float16", "did you mean bf16"),
        ("grads=fp31", "did you mean fp32"),
        ("recompute=", "such as recompute=none"),
        ("sp", "needs tp of at least 2"),
        ("tp=2,sp=2", "sp stands alone"),
        ("tpkind=gathered", "needs tp of at least 2"),
        ("tp=2,sp,tpkind=gathered", "leave out one of them"),
        ("tp=2,tpkind=gather", "did you mean gathered"),
        ("dp=6,zero=1,shard=4", "shard=4 does not divide dp x cp = 6; valid: 2, 3, 6"),
        ("tp=2,zero=1,shard=2", "valid: none"),
        ("dp=4,shard=2", "shard=2 makes groups of the ranks that ZeRO shards over and needs zero of at least 1"),
        ("dp=4,zero=2,hpz=2", "hpz=2 keeps second copies of gathered parameters and needs zero=3"),
        ("dp=4,zero=3,hpz=8", "hpz=8 must cut the 4 ranks that ZeRO shards over into smaller groups; valid: 2"),
        ("dp=4,qgz", "qgz reduces gradients to their shards in 4 bits and needs zero of at least 1"),
        ("dp=4,zero=1,qgz=4", "qgz stands alone"),
        ("dp=4,zero=1,feedback", "feedback adds what 4-bit gradients have lost to the next ones and needs qgz"),
        ("dp=4,zero=1,qwz", "qwz gathers parameters in 8 bits for each use and needs zero=3"),
        ("dp=12,zero=3,shard=6,hpz=4", "valid: 2, 3"),
        ("dp=3,zero=3,hpz=2", "valid: none of 3 ranks"),
        ("pp=2,stages=4/0/1", "layer counts, such as"),
        ("pp=2,stages=4", "must name pp x virtual = 2"),
        ("virtual=2", "virtual stages need pp"),
        ("dp=2,ep=3", "must divide dp x cp x tp"),
        ("order=dp-tp", "order must name"),
        ("dp=2,zero3", "did you mean zero=3?"),
        ("FSDP=4", "did you mean dp=4,zero=3?"),
        ("sequence_parallel", "did you mean sp?"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=4,every=3", "every=3 needs sync=local"),
        ("dp=4,sync=local", "every=20"),
        ("dp=4,sync=local,every=2,replicas=3", "valid: 1, 2, 4"),
        ("dp=4,sync=local,every=2,outer_bits=3", "outer_bits must be 0, 4 or 8, not 3"),
        ("dp=4,sync=loc", "did you mean local?"),
        ("dp=4,sync=ps,servers=9", "at most servers=4, or servers=9:own"),
        ("dp=4,sync=ps,servers=two", "such as 2, or 2:own"),
        ("dp=4,sync=async,zero=1", "does not go with zero=1"),
        ("dp=4,sync=ssp,staleness=1,offload=cpu", "does not go with offload=cpu"),
        ("dp=4,sync=ps,staleness=2", "staleness=2 needs sync=ssp"),
        ("dp=4,sync=ps,backup=4", "at most 3"),
    ],
)
def test_ways_to_agree_that_contradict_themselves(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "canonical", "ranks"),
    [
        ("dp=4,tp=2,sync=local,every=5,replicas=4", "dp=4,tp=2,sync=local,every=5", 8),
        ("dp=3,sync=ps,servers=1", "dp=3,sync=ps", 3),
        ("dp=3,sync=ps,servers=2:own,backup=1", "dp=3,sync=ps,servers=2:own,backup=1", 5),
    ],
)
def test_ways_to_agree(text: str, canonical: str, ranks: int) -> None:
    layout = Layout.parse(text)
    assert (str(layout), layout.ranks) == (canonical, ranks)


@pytest.mark.parametrize("text", ["DP=2, TP=2, SP", "dp=2 tp=2 sp", " dp = 2,tp= 2 ,,Sp"])
def test_case_and_spaces_do_not_matter(text: str) -> None:
    assert str(Layout.parse(text)) == "dp=2,tp=2,sp"


@given(any_layouts())
def test_data_ranks_are_shards_times_replicas(layout: Layout) -> None:
    assert layout.shard_ranks * layout.replicate_ranks == layout.data_ranks
    assert layout.data_ranks * layout.independent == layout.dp * layout.cp
    assert layout.training_ranks == layout.dp * layout.cp * layout.tp * layout.pp
    assert layout.stage == (layout.zero if layout.shard_ranks > 1 or layout.offload_home != "none" else 0)
