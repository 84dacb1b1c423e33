"""Prefill and decoding on devices of their own, and deployments for a rate of requests."""

from dataclasses import replace
from math import inf

import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.planner.disaggregated import MOST_BUSY, Disaggregated, best_apart, cache_bytes, fewest_apart, instances
from shardwise.planner.serving import plan_serving
from shardwise.planner.strategies import CHUNK, serving_engine
from shardwise.predict.time.generation import DecodeStrategy

ENGINE = serving_engine("tensorrt-llm")
AMONG = [(Layout(), 200_000), (Layout(tp=2, dp=3), 900_000), (Layout(pp=2), 500_000), (Layout(tp=4), 2_000_000)]


def requests_per_second(
    model, cluster, work, prefill: tuple[Layout, int], decode: tuple[Layout, int], batch: int
) -> float:
    (read, n), (write, m) = prefill, decode
    reading = DecodeStrategy(model, read, ENGINE, cluster, "bfloat16").prompt(work.prompt, CHUNK)
    busy = reading.seconds - reading.parts.get("bubble", 0.0)
    step = DecodeStrategy(model, write, ENGINE, cluster, "bfloat16").token(batch, work.prompt + work.output / 2)
    token = max(step.seconds, batch * ENGINE.stream_s)
    nbytes = cache_bytes(model, work.prompt) / min(read.ranks, write.ranks)
    link = cluster.intra
    transfer = nbytes / link.bandwidth + link.alpha
    low, high = 0.0, n / busy
    for _ in range(60):
        rate = (low + high) / 2
        load = rate * busy / n
        answer = load * busy / (2 - 2 * load) + reading.seconds + transfer + (work.output - 1) * token
        low, high = (rate, high) if rate * answer < work.concurrency else (low, rate)
    return min(low, m * batch / ((work.output - 1) * token), min(n, m) / transfer)


@pytest.mark.parametrize(("prompt", "output", "clients"), [(1000, 200, 16), (8000, 20, 64), (64, 2000, 256)])
def test_the_best_pair_is_that_of_all_loops(prompt: int, output: int, clients: int) -> None:
    model = get("llama-3-8b")
    cluster = Cluster.parse("4xH100")
    work = Workload(prompt=prompt, output=output, concurrency=clients)
    among = instances(AMONG)
    assert {one.layout for one in among} == {Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=4)}
    found = best_apart(model, cluster, work, ENGINE, "bfloat16", among, among)
    assert isinstance(found, Disaggregated) and found.devices <= 4
    best = 0.0
    for read in among:
        for write in among:
            most = min(write.cache_tokens // (-(-(prompt + output) // 16) * 16), clients)
            for n in range(1, 4):
                m = (4 - n * read.layout.ranks) // write.layout.ranks
                for batch in {most, *(1 << k for k in range(most.bit_length()))} if m > 0 else ():
                    pair = (read.layout, n), (write.layout, m)
                    best = max(best, requests_per_second(model, cluster, work, *pair, batch))
    assert found.tokens_per_second / output == pytest.approx(best, rel=2e-3)


def test_a_cache_goes_over_whole_and_no_faster_than_its_link() -> None:
    model, cluster = get("llama-3-8b"), Cluster.parse("2x8xH100")
    work = Workload(prompt=1000, output=100, concurrency=64)
    found = plan_serving(model, cluster, work, kv_cache="bf16").apart
    assert found and found.cache_bytes == 63 * 16 * 32 * 2 * 8 * 128 * 2
    sending = min(found.prefill.tp * found.prefill.pp, found.decode.tp * found.decode.pp)
    assert found.transfer > found.cache_bytes / sending / cluster.inter.bandwidth
    requests = found.tokens_per_second / work.output
    assert requests * (found.first_token + (work.output - 1) * found.token) <= work.concurrency


def test_nothing_is_apart_where_nothing_can_be() -> None:
    for cluster, output in (("1xH100", 100), ("8xH100", 1)):
        assert plan_serving("llama-3-8b", cluster, Workload(prompt=100, output=output, concurrency=4)).apart is None


def test_instances_apart_stream_no_faster_than_others():
    """A small model's tokens are bound by each replica's front end, wherever its prompts are read."""
    work = Workload(prompt=512, output=200, concurrency=1000)
    found = plan_serving("gpt2", "4xH100", work, engine="tensorrt-llm")
    assert found.apart.tokens_per_second <= 200 / 199 * found.apart.decode.dp / ENGINE.stream_s
    assert found.apart.tokens_per_second < found.ranked[0].tokens_per_second


def test_what_goes_over_has_the_caches_type():
    work = Workload(prompt=1000, output=100, concurrency=16)
    wide, narrow = (
        plan_serving("llama-3-8b", "2xH100", work, engine="vllm", weights=["bf16"], kv_cache=kind).apart
        for kind in ("bf16", "fp8")
    )
    assert wide.cache_bytes == 2 * narrow.cache_bytes == cache_bytes(get("llama-3-8b"), 1000)
    assert narrow.token < wide.token or narrow.batch > wide.batch


@pytest.mark.parametrize("rate", [0.5, 20, 40])
def test_the_fewest_devices_that_read_and_decode_a_rate_apart(rate: float) -> None:
    model, cluster, work = get("llama-3-8b"), Cluster.parse("8xA100"), Workload(prompt=500, output=100, concurrency=64)
    among = instances([(Layout(), 200_000), (Layout(tp=2), 900_000), (Layout(pp=2), 500_000)])
    found = fewest_apart(model, cluster, work, ENGINE, "bfloat16", among, among, rate)
    assert found and found.tokens_per_second >= rate * work.output
    for read in among:
        reading = DecodeStrategy(model, read.layout, ENGINE, cluster, "bfloat16").prompt(work.prompt, CHUNK)
        busy = reading.seconds - reading.parts.get("bubble", 0.0)
        for write in among:
            for batch in (2**n for n in range(7)):
                n, m = -(-rate * busy // MOST_BUSY), 1
                while requests_per_second(model, cluster, replace(work, concurrency=10**9),
                                          (read.layout, 10**6), (write.layout, m), batch) < rate:  # fmt: skip
                    m += 1
                assert n * read.layout.ranks + m * write.layout.ranks >= found.devices
    planned = plan_serving(model, "8xA100", Workload(prompt=500, output=100), rate=rate, engine="tensorrt-llm")
    assert planned.apart and planned.to_json()["disaggregated"]["devices"] == planned.apart.devices <= 8
    assert planned.apart.tokens_per_second >= rate * work.output
    assert fewest_apart(model, cluster, work, ENGINE, "bfloat16", among, among, 1e6) is None


@pytest.mark.parametrize("rate", [0.5, 20, 40])
def test_a_rate_is_answered_on_the_fewest_devices(rate: float) -> None:
    model, work = get("llama-3-8b"), Workload(prompt=1000, output=100)
    found = plan_serving(model, "4xA100", work, rate=rate, top=1000)
    assert all(one.tokens_per_second >= rate * work.output for one in found.ranked)
    assert [one.devices for one in found.ranked] == sorted(one.devices for one in found.ranked)
    usual = found.price and found.price.per_million_tokens(found.winner.devices, rate * work.output)
    assert found.usd(found.winner) == usual
    if fewer := found.winner.devices - 1:
        with pytest.raises(UserError, match=r"answers|does not fit"):
            plan_serving(model, f"{fewer}xA100", work, rate=rate)


@pytest.mark.parametrize(("rate", "text"), [(1e9, "at most"), (0, "positive"), (-1, "positive"), (inf, "positive")])
def test_rates_that_cannot_be_answered_say_why(rate: float, text: str) -> None:
    with pytest.raises(UserError, match=text):
        plan_serving("llama-3-8b", "1xH100", Workload(prompt=1000, output=100), rate=rate)
