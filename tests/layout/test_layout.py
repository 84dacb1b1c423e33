from dataclasses import fields

import pytest
from hypothesis import given

from harness.cases import from_table
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


@from_table
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical


@from_table
def test_a_mistake_is_one_line_that_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@from_table
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
