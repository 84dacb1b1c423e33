"""Serving: what a decode step is made of, capacity, and deployments that do not fit."""

from dataclasses import replace

import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.model.catalog import get
from shardwise.predict.time import Pricing, ServedModel, ServingLayout, engine
from shardwise.predict.time.serving import cache_bytes_per_token, captured, weight_bytes

LLAMA, BIG = get("llama-3.1-8b"), get("llama-3.1-70b")
FP8 = ServingLayout("float8_e4m3fn", "float8_e4m3fn")
H100 = Pricing(Cluster.parse("1xH100"))
TRT, FAST = engine("tensorrt-llm"), engine("gpt-fast")
SERVED = ServedModel(LLAMA, FP8, TRT, H100)


def test_cache_and_weights_in_bytes():
    assert cache_bytes_per_token(LLAMA, FP8) == 2 * 32 * 8 * 128
    assert weight_bytes(LLAMA, ServingLayout()) == pytest.approx(2 * 8_030_261_248, rel=1e-6)
    norms = 2 * 65 * 4096  # every rank has them
    assert weight_bytes(LLAMA, ServingLayout(tp=2)) * 2 == weight_bytes(LLAMA, ServingLayout()) + norms


def test_one_sequence_reads_every_weight_once():
    a100 = Pricing(Cluster.parse("1xA100"))
    step = ServedModel(LLAMA, ServingLayout(), FAST, a100).decode_step(1.0, 100.0)
    least = 2 * (8_030_261_248 - LLAMA.vocab * LLAMA.hidden) / a100.constants.bandwidth
    assert least < float(step.seconds) < 2 * least
    assert sum(step.parts.values()) == pytest.approx(float(step.seconds))


def test_more_sequences_cost_less_each_and_arrays_are_numbers():
    batch = np.array([1.0, 8.0, 64.0, 256.0])
    together = SERVED.decode_step(batch, 1000.0).seconds
    one_by_one = [float(SERVED.decode_step(b, 1000.0).seconds) for b in batch]
    assert together == pytest.approx(one_by_one, rel=1e-9)
    assert (np.diff(together / batch) < 0).all()


@pytest.mark.parametrize("name", ["A100", "M4-Max", "H20", "RTX-3090", "RTX-4090", "L4", "MI300X", "TPU-v5e"])
@pytest.mark.parametrize("known", [TRT, FAST])
def test_narrower_weights_decode_faster(known, name):
    """A sequence's products are bound by what they read, however few FLOP/s a device has for that."""
    pricing, before = Pricing(Cluster.parse(f"1x{name}")), np.inf
    for weights in (ServingLayout(each) for each in ("bfloat16", "int8", "int4-g128z")):
        seconds = float(ServedModel(LLAMA, weights, known, pricing).decode_step(1.0, 100.0).parts["weights"])
        read = weight_bytes(LLAMA, weights) - LLAMA.vocab * LLAMA.hidden * 2
        assert 1 / 2 < seconds * pricing.constants.bandwidth / read < 2.1 and seconds < before / 1.2
        before = seconds


# llama.cpp, BF16, one sequence: ggml-org/llama.cpp pull requests 14262, 15131, 24216
def test_published_decoding_on_cards_without_measured_kernels():
    rates = {"RTX-3090": ("llama-3-8b", 58.06), "RTX-4090": ("llama-3-8b", 65.21), "RTX-5090": ("llama-3.2-1b", 652.28)}
    for device, (name, rate) in rates.items():
        served = ServedModel(get(name), ServingLayout(), TRT, Pricing(Cluster.parse(f"1x{device}")))
        assert 1 < float(served.decode_step(1.0, 256.0).seconds) * rate < 1.6


def test_prefill_grows_with_the_prompt():
    short, long = (float(SERVED.prefill(1.0, p).seconds) for p in (1024.0, 8192.0))
    assert 5 < long / short < 12


def test_capacity_and_what_does_not_fit():
    assert SERVED.capacity(22000) < SERVED.capacity(2000) <= TRT.most_sequences
    with pytest.raises(UserError, match="does not fit"):
        ServedModel(BIG, ServingLayout(), TRT, H100).capacity(4096)


def test_waves():
    # Twice the requests take twice as long once they fill several waves.
    known = replace(TRT, most_sequences=64)
    once, twice = (float(ServedModel(LLAMA, FP8, known, H100).throughput(128, 128, 64 * n).seconds) for n in (1, 2))
    assert twice == pytest.approx(2 * once)
    partly = float(ServedModel(LLAMA, FP8, known, H100).throughput(128, 128, 65).seconds)
    assert once < partly < twice


def test_tensor_parallelism_pays_for_its_sums():
    node = Pricing(Cluster.parse("8xA100"))
    one, eight = (
        float(ServedModel(BIG, ServingLayout("int8", tp=tp), FAST, node).decode_step(1.0, 100.0).seconds)
        for tp in (1, 8)
    )
    assert one / 8 < eight < one / 3


def test_a_batch_is_padded_to_its_graph():
    padded = replace(TRT, graph_sizes=(64, 512))
    batch = np.array([65.0, 512.0, 600.0])
    assert captured(batch, padded).tolist() == [512.0, 512.0, 600.0]
    assert captured(batch, TRT).tolist() == batch.tolist()
    with_more, exact = (ServedModel(LLAMA, FP8, known, H100).decode_step(65.0, 1000.0).parts for known in (padded, TRT))
    full = SERVED.decode_step(512.0, 1000.0).parts
    assert float(with_more["weights"]) == float(full["weights"]) > float(exact["weights"])
    assert float(with_more["attention"]) == float(exact["attention"])  # padding has no cache


def test_hosts_of_a_pipeline_go_through_all_requests_where_the_engine_does():
    def host(pp, batch, known):
        return float(ServedModel(LLAMA, replace(FP8, pp=pp), known, H100).decode_step(batch, 1000.0).parts["host"])

    once = replace(TRT, stages_see_all=False)
    for pp in (1, 2, 8):
        more = [host(pp, 128.0, known) - host(pp, 64.0, replace(known, request_s=0.0)) for known in (TRT, once)]
        assert more[0] - more[1] == pytest.approx((pp**2 - 1) * 128 * TRT.request_s)


def test_requests_of_a_saturated_front_end_have_the_rate_of_its_tokens():
    free = replace(TRT, stream_s=0.0)
    few, many = (SERVED.requested(200, 200, clients) for clients in (10, 400))
    assert few.answer.seconds == pytest.approx(replace(SERVED, engine=free).requested(200, 200, 10).answer.seconds)
    assert many.answer.seconds == pytest.approx(400 * 200 * TRT.stream_s)
    for one in (*few, *many):
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
    alone = SERVED.requested(200, 200, 1)
    assert alone.first.parts["host"] == pytest.approx(H100.constants.value("iteration_s"))
