from dataclasses import replace

import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.planner.serving import TYPES, plan_serving
from shardwise.planner.strategies import Asked, compare, usual_layouts, usual_server
from shardwise.predict.memory.capacity import usable_bytes
from shardwise.predict.memory.serving import ServingSetup, fit_on_cluster
from shardwise.predict.time import engine
from shardwise.predict.time.requests import closed_loop

SMALL, LLAMA = get("llama-3-8b"), get("llama-3-70b")
NODE = Cluster.parse("8xH100")
ASKED = Workload(prompt=1000, output=200, concurrency=24)


def test_every_deployment_is_priced_as_it_would_be_alone():
    found = plan_serving(SMALL, NODE, ASKED, top=10_000)
    assert len(found.ranked) == found.fitting > 50
    assert {one.weights for one in found.ranked} == set(TYPES)
    for one in found.ranked[::7]:
        alone = found.strategy(one)
        token = alone.token(one.batch * one.layout.dp, ASKED.prompt + ASKED.output / 2).seconds
        read = alone.prompt(ASKED.prompt, ASKED.prompt).seconds
        if one.batch <= 8:  # stages' messages aside
            together = engine(found.engine).most_tokens / ASKED.prompt
            clients = float(one.batch)
            mean = closed_loop(token, read, read / one.layout.pp, clients, clients, ASKED.output, together)
            assert one.first_token == pytest.approx(mean.first, rel=0.02)
            assert one.token == pytest.approx(mean.each, rel=0.01)
        assert token * (1 - 1e-9) < one.token < 1.5 * token


def test_bytes_are_those_of_the_fit():
    found = plan_serving(SMALL, NODE, ASKED, top=10_000)
    for one in found.ranked:
        served = ServingSetup(
            1200, one.batch, weights=found.words(one.weights), cache_type=one.cache, engine=engine(found.engine)
        )
        assert one.held == fit_on_cluster(SMALL, one.layout, served, NODE).held.total
        assert one.held <= found.usable < usable_bytes(NODE)


def test_clients_times_tokens_are_rate_times_answer():
    """Little's law: each client has one answer after the other."""
    asked = Workload(prompt=4000, output=500, concurrency=150)
    found = plan_serving(LLAMA, Cluster.parse("4xH100"), asked, top=10_000).ranked
    assert {one.first_token > 10 for one in found} == {True, False}  # some have no room for all clients at once
    for one in found:
        answer = one.first_token + (asked.output - 1) * one.token
        assert one.tokens_per_second * answer == pytest.approx(150 * 500, rel=0.02)


def test_one_client_has_one_answer_at_a_time():
    """Whatever else could be served: its rate is that of its own tokens, and one replica answers."""
    asked = Workload(prompt=1024, output=256, concurrency=1)
    found = plan_serving(LLAMA, NODE, asked, top=10_000).ranked
    for one in found:
        assert one.layout.stage == 3 or one.layout.dp == 1
        assert one.tokens_per_second * (one.first_token + 255 * one.token) == pytest.approx(256)
    sixteen = [one for one in found if one.weights == "bfloat16" and one.layout.stage == 0]
    assert str(sixteen[0].layout) == "tp=8" and sixteen[0].batch == 1


@pytest.mark.parametrize("prompt", [100, 2048, 6000])
def test_the_first_token_is_when_a_comparison_has_it(prompt):
    """Whatever the prompt's length and the strategy: in as many chunks, through as many stages."""
    found = plan_serving(LLAMA, NODE, Workload(prompt=prompt, output=100, concurrency=1), top=10_000).ranked
    of_layout = {one.layout: one.first_token for one in found if one.weights == "bfloat16"}
    layouts = [Layout.parse(text) for text in ("tp=8", "tp=4,pp=2", "pp=8", "dp=8,zero=3", "tp=2,dp=4,zero=3")]
    for one in compare(LLAMA, layouts, NODE, Asked(prompt, 100)).strategies:
        assert of_layout[one.layout] == pytest.approx(one.prompt.seconds)


@pytest.mark.parametrize("clients", [4, 5, 7, 9, 24])
def test_replicas_with_one_client_more_are_slower_and_the_others_are_not(clients):
    """dp=4 gives what four replicas give alone, each with its own clients."""

    def rate(concurrency: int, dp: int) -> float:
        asked = Workload(prompt=2000, output=20, concurrency=concurrency)
        found = plan_serving(SMALL, NODE, asked, top=10_000).ranked
        return next(
            one.tokens_per_second for one in found if one.weights == "bfloat16" and one.layout == Layout(dp=dp, tp=2)
        )

    fewer, more = divmod(clients, 4)
    alone = (4 - more) * rate(fewer, 1) + (more * rate(fewer + 1, 1) if more else 0.0)
    assert rate(clients, 4) == pytest.approx(alone)


def test_ranks_that_gather_count_the_clients_that_there_are():
    for clients in (1, 7, 9):
        asked = Workload(prompt=1000, output=100, concurrency=clients)
        one = plan_serving(SMALL, NODE, asked).gathering
        assert one.tokens_per_second * (one.first_token + 99 * one.token) == pytest.approx(clients * 100)


@pytest.mark.parametrize("clients", [1, 64])
def test_an_answer_of_one_token_is_its_prompt(clients):
    asked = Workload(prompt=1000, output=1, concurrency=clients)
    for one in plan_serving(SMALL, NODE, asked, top=10_000).ranked:
        assert one.tokens_per_second == pytest.approx(clients / one.first_token)


def test_orders_and_the_curve():
    for by, key in (("throughput", lambda o: -o.tokens_per_second), ("cost", lambda o: -o.rate)):
        ranked = plan_serving(LLAMA, NODE, ASKED, by=by).ranked
        assert list(ranked) == sorted(ranked, key=key)
    curve = plan_serving(LLAMA, NODE, ASKED, by="pareto").curve
    pairs = [(one.token, one.tokens_per_second) for one in curve]
    assert pairs == sorted(pairs) and len(pairs) > 3
    assert [rate for _, rate in pairs] == sorted(rate for _, rate in pairs)


def test_no_deployment_beats_the_curve_that_experts_spread_over_ranks_are_on():
    found = plan_serving("mixtral-8x7b", Cluster.parse("2xH100"), replace(ASKED, concurrency=64), top=10_000)
    assert any(one.layout.ep > 1 for one in found.curve)
    for one in found.ranked:  # fewer clients on the curve are as fast, or as many tokens come as soon
        assert any(each.token <= one.token * 1.01 for each in found.curve)
        best = max(each.tokens_per_second for each in found.curve if each.token <= one.token * 1.01)
        assert best >= one.tokens_per_second * 0.99


def test_the_best_without_loss_may_have_fewer_clients_within_the_bounds():
    found = plan_serving(LLAMA, NODE, prompt=1024, output=256, ttft=0.5, tpot=0.02)
    assert found.winner.lossy and not found.lossless.lossy and found.lossless.token <= 0.02
    assert f"with {found.lossless.batch} clients" in str(found) and found.lossless.batch < found.workload.concurrency


def test_no_device_of_another_maker_runs_tensorrt() -> None:
    usual = {name: usual_server(Cluster.parse(name)) for name in ("1xH100", "1xL4", "1xMI300X", "1xTPU-v5e", "1xCPU")}
    assert list(usual.values()) == ["tensorrt-llm", "tensorrt-llm", "vllm", "vllm", "shardwise-cpu"]


def test_what_was_weighed():
    found = plan_serving(LLAMA, NODE, ASKED)
    fewer, split = found.quantised
    assert fewer.weights != "bfloat16" == split.weights and fewer.devices <= split.devices / 2
    assert found.gathering.layout.stage == 3 and found.gathering.tokens_per_second < found.winner.tokens_per_second
    ranks, tokens = found.crossover
    assert ranks == 8 and 1_000 < tokens < 100_000
    assert found.to_json()["crossover"] == {"ranks": 8, "tokens": tokens}


def test_eight_bits_of_floating_point_need_a_device_that_has_them():
    kinds = {one.weights for one in plan_serving(SMALL, Cluster.parse("4xA100"), ASKED, top=10_000).ranked}
    assert kinds == {"bfloat16", "int8", "int4"}


def test_types_that_the_engine_has_no_constants_for_are_left_out():
    found = plan_serving(LLAMA, NODE, ASKED, engine="gpt-fast", top=10_000)
    assert {one.weights for one in found.ranked} == {"bfloat16", "int8", "int4"}


def test_one_device_has_nothing_to_split():
    found = plan_serving(SMALL, Cluster.parse("1xH100"), ASKED)
    assert found.gathering is None and found.crossover is None and {o.devices for o in found.ranked} == {1}


def test_questions_that_cannot_be_answered():
    with pytest.raises(UserError, match=r"does not fit 1xL4: the leanest .* needs .* more than its"):
        plan_serving(LLAMA, Cluster.parse("1xL4"), ASKED)
    with pytest.raises(UserError, match="serving needs --prompt, --output and --concurrency"):
        plan_serving(LLAMA, NODE, Workload(prompt=10, output=10))
    with pytest.raises(UserError, match="knows 8192 positions"):
        plan_serving(LLAMA, NODE, Workload(prompt=8000, output=1000, concurrency=1))
    with pytest.raises(UserError, match="1,000,000 devices; clusters of up to 65,536"):
        plan_serving(LLAMA, Cluster.parse("125000x8xH100"), ASKED)
    with pytest.raises(UserError, match="--top must be"):
        plan_serving(LLAMA, NODE, ASKED, top=0)


def test_experts_are_spread_over_ranks_where_that_serves_most():
    """Every candidate with ep is legal, fits, and has the bytes of the fit."""
    mixtral = get("mixtral-8x7b")
    plan = plan_serving(mixtral, NODE, ASKED, top=10_000)
    found = plan.ranked
    spread = [one for one in found if one.layout.ep > 1]
    assert {one.layout.ep for one in spread} == {2, 4, 8} and {one.layout.tp for one in spread} == {1, 2, 4, 8}
    for one in spread[::5]:
        served = ServingSetup(
            1200, one.batch, weights=plan.words(one.weights), cache_type=one.cache, engine=engine(plan.engine)
        )
        assert one.held == fit_on_cluster(mixtral, one.layout, served, NODE).held.total
    best = {ep: max(one.tokens_per_second for one in found if (one.layout.ep > 1) == ep) for ep in (True, False)}
    assert best[True] > best[False]
    assert not [one for one in plan_serving(SMALL, NODE, ASKED, top=10_000).ranked if one.layout.ep > 1]


def test_comparison_of_experts_with_tensor_parallelism():
    found = compare(get("mixtral-8x7b"), usual_layouts(get("mixtral-8x7b"), NODE), NODE, Asked(1024, 256))
    assert [str(one.layout) for one in found.strategies] == ["tp=8", "dp=8,zero=3", "pp=8", "tp=8,ep=8", "dp=8,ep=8"]
    inside, outside = found.expert_ratios
    assert (inside.blocks, inside.total) == (1, 1) and 0.8 < inside.seconds < 1.2
    assert 0.5 < outside.blocks < 0.6 and outside.to_json()["tensor"] == "tp=8"
