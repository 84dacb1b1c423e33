"""Bytes of a served model, and whether they fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout
from shardwise.layout.context import PageCut
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import count
from shardwise.predict.memory.serving import ServingSetup, fit_on_cluster, fit_on_host, serving_fit, weight_bytes
from shardwise.predict.serving_layout import plan_of
from shardwise.predict.time.serving import ServingLayout, cache_bytes_per_token

MODEL = ModelConfig("m", vocab=64, hidden=32, layers=6, heads=4, kv_heads=2, ffn=64, max_positions=512)
LLAMA = get("llama-3-70b")
SERVED = ServingSetup(64, 2)


def fit(text: str, served: ServingSetup = SERVED, room: float | None = None, model: ModelConfig = MODEL):
    return serving_fit(model, Layout.parse(text), served, room)


def test_weights_and_cache_are_those_of_the_plan():
    whole = fit("").held
    assert whole.weights == 2 * count(MODEL) and whole.slots == 0
    assert whole.cache == 2 * 64 * cache_bytes_per_token(MODEL, ServingLayout())
    assert fit("tp=2").held.cache == whole.cache / 2
    assert fit("tp=4").held.cache == whole.cache / 2  # two key/value heads: neighbours hold the same one
    assert fit("pp=3").held.cache == whole.cache / 3
    assert fit("precision=fp32").held.weights == 2 * whole.weights


def test_pages_are_cut_over_context_parallel_ranks():
    assert fit("cp=4").held.cache == fit("").held.cache / 4
    assert fit("tp=2,cp=2,pp=3").held.cache == fit("").held.cache / 12
    assert fit("cp=4").held.weights == fit("").held.weights
    with pytest.raises(
        LayoutError, match="cp=3 does not divide the cache's pages of 16 tokens; valid cp: 1, 2, 4, 8, 16"
    ):
        fit("cp=3")


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 100))
def test_every_token_of_a_sequence_is_on_one_rank(cp: int, slots: int, tokens: int):
    cut = PageCut(cp * slots, cp)
    owners = [position % cut.page // cut.slots for position in range(tokens)]
    assert [cut.held(rank, tokens) for rank in range(cp)] == [owners.count(rank) for rank in range(cp)]


def test_gathered_weights_keep_a_share_and_two_slots():
    held = fit("dp=4,zero=3").held
    assert held.weights == pytest.approx(2 * count(MODEL) / 4, rel=0.01)
    largest = max(unit.numel for unit in plan_of(MODEL, Layout()).units)
    assert 2 * largest <= held.slots <= 4 * largest


@pytest.mark.parametrize("tied", [False, True])
def test_int8_keeps_a_byte_a_weight_of_matrices_but_tables(tied):
    plan = plan_of(MODEL.replace(tied=tied), Layout())
    tables = {name for u in plan.units for name in (p.name for p in u.placed) if name.startswith("embedding.")}
    matrices = [p for u in plan.units for p in u.placed if p.name not in tables and len(p.shape) == 2]
    assert tied != any(p.name.startswith("head.") for p in matrices)
    saved = weight_bytes(plan) - weight_bytes(plan, int8=True)
    assert saved == sum(p.numel - 2 * p.shape[0] for p in matrices)
    tiled = sum(-(-p.shape[0] // 48) * 48 * 512 + 12 * p.shape[0] for p in matrices)
    assert weight_bytes(plan, int8=True, cpu=True) == weight_bytes(plan) - sum(2 * p.numel for p in matrices) + tiled
    with pytest.raises(UserError, match="zero=0 with int8"):
        fit("dp=2,zero=3", ServingSetup(64, int8=True))


@given(
    st.sampled_from(["", "tp=2", "tp=4", "pp=2", "pp=3", "pp=3,stages=0/6/0", "tp=2,pp=2", "dp=2", "dp=3,zero=3",
                     "tp=2,dp=2,zero=3"]),
    st.floats(1e4, 3e6), st.integers(1, 5), st.integers(1, 33), st.booleans(),
)  # fmt: skip
def test_the_largest_that_fits_fits_and_one_page_more_does_not(text, room, batch, page, int8):
    served = ServingSetup(64, batch, page, int8=int8 and "zero" not in text)
    found = fit(text, served, room)
    if found.largest_context:
        assert fit(text, replace(served, context=found.largest_context), room).fits
    more = found.largest_context + page
    assert more > MODEL.max_positions or not fit(text, replace(served, context=more), room).fits
    if found.largest_batch:
        assert not fit(text, replace(served, batch=found.largest_batch + 1), room).fits
    assert found.fits == (found.held.total <= room)


def test_on_a_cluster_and_on_a_host():
    cluster = Cluster.parse("8xH100")
    split, whole = (fit_on_cluster(LLAMA, Layout.parse(text), ServingSetup(8192), cluster) for text in ("tp=8", ""))
    assert split.fits and not whole.fits
    assert split.largest_context == LLAMA.max_positions and split.tps == (1, 2, 4, 8, 16, 32, 64)
    assert "the weights alone take 141 GB" in whole.refusal() and "valid tp: 1, 2, 4" in "\n".join(whole.lines())
    assert "the largest context for 8 sequences is 8,192 tokens" in "\n".join(split.lines())
    assert fit_on_host(MODEL, Layout.parse("tp=2"), ServingSetup(64), 2_000_000).room == 1_000_000
    assert fit_on_host(MODEL, Layout.parse("tp=2"), ServingSetup(64), None).fits
    with pytest.raises(LayoutError, match="needs 16 ranks, but there are 8"):
        fit_on_cluster(LLAMA, Layout.parse("tp=16"), ServingSetup(8192), cluster)


def test_a_refusal_names_the_largest_context():
    found = fit("", ServingSetup(512, 2), 2 * count(MODEL) + 200_000)
    assert not found.fits and f"2 sequences is {found.largest_context:,} tokens" in found.refusal()
    assert 0 < found.largest_context < 512


def test_a_refusal_says_what_of_batch_context_and_weights_is_too_large():
    short, whole = (fit("", ServingSetup(context, 1)).held.total for context in (16, 512))
    many = fit("", ServingSetup(64, 20_000), fit("", ServingSetup(64, 100)).held.total)
    assert not many.largest_context and many.largest_batch == 100
    assert "no context fits 20,000 sequences, but 100 sequences of 64 tokens fit" in many.refusal()
    long = fit("", ServingSetup(512, 1), (short + whole) / 2)
    assert long.largest_context and not long.largest_batch
    assert f"{long.largest_context:,} tokens, and not even one sequence of 512 tokens fits" in long.refusal()
    assert "fewer sequences and a shorter context" in fit("", ServingSetup(512, 20_000), (short + whole) / 2).refusal()
    heavy = fit("", ServingSetup(64, 1), count(MODEL)).refusal()
    assert "the weights alone take" in heavy and "split them further" in heavy and "shorter" not in heavy


def test_positions_without_end_are_as_many_as_fit():
    far = fit("", ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=10**30))
    assert (
        far.largest_context
        == fit("", ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=1 << 20)).largest_context
        > 0
    )
    assert fit("", ServingSetup(64, 2), 1e3, MODEL.replace(max_positions=10**30)).largest_context == 0
    # A stage without blocks has no cache: those with blocks say how many fit.
    staged, rest = (f"pp=2,stages={MODEL.layers}/0", "pp=2")
    for text in (staged, rest):
        assert 0 < fit(text, ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=10**30)).largest_context < 10**6


def test_numbers_that_make_no_sense():
    with pytest.raises(UserError, match="context must be at least 1, not 0"):
        ServingSetup(0)
