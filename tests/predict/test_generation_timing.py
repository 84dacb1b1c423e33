"""How strategies put a token's time together, and what the comparison says of Llama-3-70B on eight H100."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.serving import plan_of
from shardwise.model.catalog import get
from shardwise.planner.strategies import MOST_TOKENS, Asked, compare, crossover, usual_layouts
from shardwise.predict import estimate
from shardwise.predict.time import engine
from shardwise.predict.time.generation import DecodeStrategy, pricing_for
from shardwise.predict.time.network import Collectives

LLAMA, SMALL = get("llama-3-70b"), get("llama-3-8b")
NODE = Cluster.parse("8xH100")
TRT = engine("tensorrt-llm")


def strategy(text: str, model=SMALL, cluster: Cluster = NODE) -> DecodeStrategy:
    return DecodeStrategy(model, Layout.parse(text), TRT, cluster)


def test_without_gathers_and_stages_it_is_a_decode_step():
    one = strategy("tp=4")
    step = one.served.decode_step(4, 500.0)
    assert one.token(4, 500.0).seconds == pytest.approx(float(step.seconds))
    whole = one.served.prefill(1, 1024)
    assert one.prompt(1024, 4096).seconds == pytest.approx(float(whole.seconds))


def test_replicas_share_the_sequences():
    assert strategy("dp=4").token(16, 500.0) == strategy("dp=1").token(4, 500.0)


@given(
    st.sampled_from(["tp=2", "dp=4,zero=3", "tp=2,dp=4,zero=3", "pp=4", "tp=2,pp=2", "dp=2,pp=2"]),
    st.integers(1, 40), st.integers(1, 6000),
)  # fmt: skip
@settings(max_examples=30)
def test_parts_add_up_and_more_to_attend_to_takes_longer(text, sequences, context):
    one = strategy(text)
    taken = one.token(sequences, context)
    assert sum(taken.parts.values()) == pytest.approx(taken.seconds)
    assert min(taken.parts.values()) >= 0
    assert one.token(sequences, 2 * context).seconds >= taken.seconds
    low, high = taken.range(pricing_for(NODE)).low, taken.range(pricing_for(NODE)).high
    assert low < taken.seconds < high


@given(
    st.sampled_from(["tp=8", "dp=8,zero=3", "tp=2,dp=8,zero=3", "cp=2,dp=8,zero=3", "tp=4,pp=4", "dp=2,pp=8", "tp=16"]),
    st.sampled_from(["intra", "inter", "memory", "peaks"]), st.floats(1.1, 50.0), st.integers(1, 64),
    st.sampled_from([get("gpt2"), SMALL]),
)  # fmt: skip
@example("dp=8,zero=3", "peaks", 3.0, 1, get("gpt2"))
@settings(max_examples=200, deadline=None)
def test_a_slower_link_or_device_makes_nothing_faster(text, which, times, sequences, model):
    """Hosts wait less beside a slower device, but no longer than it computes."""
    nodes, layout = Cluster.parse("2x8xH100"), Layout.parse(text)
    layout, device = replace(layout, tp=2) if model.heads % layout.tp else layout, nodes.device
    changed: dict = {
        "memory": {"memory_bandwidth": device.memory_bandwidth / times},
        "peaks": {"peak_flops": {name: flops / times for name, flops in device.peak_flops.items()}},
    }
    change: dict = {"device": replace(device, **changed[which])} if which in changed else {
        which: replace(getattr(nodes, which), bandwidth=getattr(nodes, which).bandwidth / times)
    }  # fmt: skip
    fast, other = (DecodeStrategy(model, layout, TRT, cluster) for cluster in (nodes, replace(nodes, **change)))
    assert other.token(sequences, 1000).seconds >= fast.token(sequences, 1000).seconds * (1 - 1e-9)
    assert other.prompt(1000, 512).seconds >= fast.prompt(1000, 512).seconds * (1 - 1e-9)


def test_gathers_are_exposed_for_a_token_and_hidden_behind_a_long_prompt():
    one = strategy("dp=8,zero=3", LLAMA)
    token, prompt = one.token(1, 1000), one.prompt(8192, 8192)
    assert token.parts["data"] > 0.85 * token.gathers and prompt.parts["data"] < 0.6 * prompt.gathers
    assert token.gathers == pytest.approx(prompt.gathers)


def test_the_gathers_of_a_token_are_those_of_its_units():
    one = strategy("dp=8,zero=3")
    price = pricing_for(NODE).collectives.seconds
    each = [float(price("all_gather_into", 2.0 * unit.padded, 8)) for unit in plan_of(SMALL, one.layout).units]
    assert one.token(1, 100).gathers == pytest.approx(sum(each))


@pytest.mark.parametrize("text", ["dp=8,zero=3", "tp=4", "pp=4"])
def test_tokens_of_many_contexts_take_what_each_one_takes(text):
    one, contexts = strategy(text), range(100, 2000, 450)
    assert [each.seconds for each in one.tokens(4, contexts)] == [one.token(4, n).seconds for n in contexts]


def test_with_infinitely_fast_links_gathering_costs_what_one_rank_computes(monkeypatch):
    monkeypatch.setattr(
        Collectives, "seconds", lambda self, op, nbytes, ranks, stride=1, reads_peers=False: 0.0 * nbytes
    )
    assert strategy("dp=8,zero=3").token(1, 100).seconds == pytest.approx(strategy("").token(1, 100).seconds)


def test_a_pipeline_passes_one_token_on_and_overlaps_several():
    alone, four = (strategy("pp=4", LLAMA).token(count, 1000) for count in (1, 4))
    single = strategy("", LLAMA).token(1, 1000)
    assert single.seconds < alone.seconds < 1.2 * single.seconds and alone.parts["bubble"] == 0
    assert four.seconds < 1.3 * alone.seconds  # four sequences, nearly as fast as one: they are in different stages
    assert four.parts["bubble"] > 0  # the last stage has the head, for which the others wait


def test_a_long_prompt_streams_through_the_stages():
    whole = strategy("").prompt(8192, 512).seconds
    through = strategy("pp=4").prompt(8192, 512)
    assert whole / 4 < through.seconds < whole / 2 and through.parts["bubble"] > 0


def test_llama_3_70b_on_eight_h100():
    found = compare(LLAMA, usual_layouts(LLAMA, NODE), NODE, Asked(1024, 256))
    assert [str(one.layout) for one in found.strategies] == ["tp=8", "dp=8,zero=3", "pp=8"]
    (ratio,) = found.ratios
    assert ratio.blocks == ratio.tokens == 26112.5 and 25_000 < ratio.total < 26_000
    assert 30 <= ratio.seconds <= 50
    assert ratio.faster and ratio.faster < ratio.tokens
    tensor, gathering, pipeline = found.strategies
    assert float(pipeline.round.volume.blocks) == 2 * LLAMA.hidden
    assert gathering.trained.gather < gathering.trained.arithmetic and tensor.trained.gather == 0
    assert all(one.fit.fits and one.growth > 0 for one in found.strategies)
    told = found.to_json()
    assert told["ratios"][0]["blocks"] == 26112.5 and told["strategies"][1]["token"]["growth"] > 0


def test_with_more_sequences_the_ratio_falls():
    layouts = [Layout.parse("tp=8"), Layout.parse("dp=8,zero=3")]
    one, many = (compare(LLAMA, layouts, NODE, Asked(1024, 256, batch)) for batch in (1, 64))
    assert one.ratios[0].blocks == 64 * many.ratios[0].blocks
    assert one.ratios[0].seconds > many.ratios[0].seconds
    assert many.strategies[1].round.volume_of_token.blocks * 64 == one.strategies[1].round.volume_of_token.blocks


def test_the_crossover_is_one():
    gathering, tensor = strategy("dp=8,zero=3", LLAMA), strategy("tp=8", LLAMA)
    tokens = crossover(gathering, tensor)
    assert tokens
    assert gathering.one_pass(tokens / 8).seconds <= tensor.one_pass(tokens).seconds
    assert gathering.one_pass(tokens * 0.9 / 8).seconds > tensor.one_pass(tokens * 0.9).seconds


@pytest.mark.parametrize("first", [2, 3, 4, 79, 80, 5000])
def test_the_crossover_is_found_wherever_it_is(first):
    def taking(seconds):
        return SimpleNamespace(layout=Layout(dp=2), one_pass=lambda tokens: SimpleNamespace(seconds=seconds(tokens)))

    found = crossover(taking(lambda tokens: 1.0), taking(lambda tokens: 1.0 if tokens >= first else 0.0))
    assert first <= found <= first * 1.01 + 1


@given(st.integers(2, 64), st.integers(1, 5_000_000))
def test_the_crossover_is_within_a_hundredth_of_any_threshold(ranks, threshold):
    """Within a hundredth, down to single tokens, after a few passes."""
    passes = []

    def strategy_of(seconds):
        return SimpleNamespace(layout=SimpleNamespace(dp=ranks), one_pass=lambda n: SimpleNamespace(seconds=seconds(n)))

    def gathering(tokens: float) -> float:
        passes.append(tokens)
        assert len(passes) < 60
        return 0.0 if round(tokens * ranks) >= threshold else 2.0

    found = crossover(strategy_of(gathering), strategy_of(lambda tokens: 1.0))
    if threshold > MOST_TOKENS:
        assert found is None
    else:
        assert max(threshold, ranks) <= found <= max(threshold, ranks) * 1.01 + 1


def test_ratios_compare_one_precision():
    layouts = [Layout.parse(text) for text in ("dp=8,zero=3", "tp=8,precision=fp32", "tp=8")]
    (ratio,) = compare(LLAMA, layouts, NODE, Asked(100, 20)).ratios
    assert ratio.tensor == Layout(tp=8) and ratio.blocks == ratio.tokens


def test_questions_that_cannot_be_answered():
    with pytest.raises(UserError, match="knows 8192 positions"):
        compare(LLAMA, [Layout.parse("tp=8")], NODE, Asked(8000, 256))
    with pytest.raises(LayoutError, match="needs 16 ranks, but there are 8"):
        compare(LLAMA, [Layout.parse("tp=16")], NODE, Asked(100, 10))
    crowd = Cluster.parse("999999x8xH100")
    with pytest.raises(UserError, match="has 7,999,992 devices; clusters of up to 65,536 are searched"):
        compare(LLAMA, usual_layouts(LLAMA, crowd), crowd, Asked(100, 10))
    with pytest.raises(UserError, match="twice"):
        compare(LLAMA, [Layout.parse("dp=1,tp=8"), Layout.parse("tp=8")], NODE, Asked(100, 10))
    with pytest.raises(UserError, match="output must be a positive number, not 0"):
        Asked(1, 0)
    with pytest.raises(UserError, match="not runnable"):
        compare(get("bloom-176b"), [Layout.parse("tp=8")], NODE, Asked(100, 10))
    with pytest.raises(UserError, match="not runnable"):
        usual_layouts(get("bloom-176b"), NODE)


def test_an_unknown_bandwidth_is_one_line():
    dark = replace(NODE, device=replace(NODE.device, memory_bandwidth=None))
    with pytest.raises(UserError, match="memory bandwidth is not known"):
        compare(LLAMA, [Layout.parse("tp=8")], dark, Asked(100, 10))


@pytest.mark.parametrize(
    ("model", "cluster"), [("llama-3-70b", "8xH100"), ("gpt2", "2xH100"), ("mixtral-8x7b", "8xH100")]
)
def test_the_training_step_is_estimates(model: str, cluster: str) -> None:
    ranks = Cluster.parse(cluster).devices
    layouts = [Layout.parse(f"tp={ranks}"), Layout.parse(f"dp={ranks},zero=3")]
    for one in compare(get(model), layouts, Cluster.parse(cluster), Asked(64, 8)).strategies:
        step = one.trained
        report = estimate(model, step.layout, Workload(seq=step.seq, batch=ranks), cluster)
        assert (step.seconds, step.peak) == (report.time, max(role.peak_bytes for role in report.roles))
        assert report.room and step.state == report.room["state"]
        assert step.seq == (1024 if model == "gpt2" else 8192)
