import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import table
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import lookup
from shardwise.errors import UserError
from shardwise.predict.time.constants import constants, known_devices
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.network import MEASURED as MEASURED_COLLECTIVES
from shardwise.predict.time.network import Collectives

# ai-dynamo/aiconfigurator 095f58a51c4c (A100, H100), aiconfigurator-core 0.12.0, gemm_perf.parquet, bfloat16: device,
# m, n, k, milliseconds
MEASURED = table(__file__, "MEASURED")
# context_attention_perf.parquet, heads of 128, 8 of keys and values: device, batch, tokens, heads, milliseconds
ATTENTION = table(__file__, "ATTENTION")
DEVICES = sorted(known_devices())
SIZES = st.integers(1, 1 << 17)


def kernels(name: str) -> Kernels:
    return Kernels(constants(lookup(name).device))


@pytest.mark.parametrize(("device", "m", "n", "k", "milliseconds"), MEASURED)
def test_measured_products(device, m, n, k, milliseconds):
    alone = kernels(device)._isolated(m, n, k, "bfloat16", 1.0)
    assert float(alone) * 1e3 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(("device", "batch", "tokens", "heads", "milliseconds"), ATTENTION)
def test_measured_attention(device, batch, tokens, heads, milliseconds):
    found = kernels(device).attention(batch, tokens, tokens, heads, 8, 128)
    assert float(found) * 1e3 == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize("device", dict.fromkeys(row[0] for row in MEASURED))
def test_own_kernels_are_not_corrected_as_a_relatives(device):
    known = constants(lookup(device).device)
    assert known.plateau("bfloat16") == known.value("clock") == 1.0
    assert not any("not measured here" in note for note in known.notes)


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=20, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_product_beats_the_device(name, m, n, k):
    found = kernels(name)
    known = found.constants
    seconds = float(found.matmul(m, n, k))
    assert np.isfinite(seconds)
    assert seconds > 0.9 * 2 * m * n * k / known.peak("bfloat16") * known.value("sustained")


@pytest.mark.parametrize("name", DEVICES)
def test_no_product_is_faster_in_wider_numbers(name):
    found = kernels(name)
    if {"float32", "tfloat32"} & set(found.constants.peaks):
        for shape in ((512, 512, 512), (1024, 4096, 4096), (8192, 8192, 8192)):
            assert found.matmul(*shape, "float32") >= found.matmul(*shape), shape


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=10, deadline=None)
@given(n=st.integers(4096, 1 << 17), k=st.integers(4096, 1 << 15))
def test_few_rows_take_no_longer_than_more(name, n, k):
    """Each such product reads the same weights."""
    seconds = kernels(name).matmul(np.arange(1.0, 257.0), n, k)
    assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()


@pytest.mark.parametrize("op", MEASURED_COLLECTIVES)
@pytest.mark.parametrize("name", ["8xH100", "8xB200", "8xA100", "8xL40S", "2x8xH100"])
def test_more_bytes_take_no_less(op, name):
    """Even where a library was measured to be slower at one size, or a faster link scales what was measured."""
    cluster = Cluster.parse(name)
    price = Collectives(cluster, constants(cluster.device)).seconds
    for ranks in {2, 3, 4, 8, cluster.devices}:
        assert (np.diff(price(op, 2.0 ** np.arange(6, 34, 0.5), ranks)) >= 0).all()


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=2, max_size=8))
def test_arrays_are_numbers(shapes):
    found = kernels("A100")
    m, n, k = (np.array(column) for column in zip(*shapes, strict=True))
    one_by_one = [float(found.matmul(*shape)) for shape in shapes]
    assert found.matmul(m, n, k) == pytest.approx(one_by_one, rel=1e-12)


def test_waves_of_tiles():
    # One row of tiles more than fills a wave takes as long as nearly two.
    found = kernels("A100")
    full, over = found._tiles(np.array([2304.0, 2560.0]), 1536.0, 8192.0, 312e12, np.asarray(1.0))
    assert over / full > 1.2


def test_attention_grows_with_the_square_of_the_sequence():
    found = kernels("H100")
    short, long = (float(found.attention(1, s, s, 32, 8, 128)) for s in (16384, 32768))
    assert 3.5 < long / short < 4.2
    whole = float(found.attention(1, 16384, 16384, 32, 8, 128, causal=False))
    assert 1.8 < whole / short < 2.2


def test_a_window_bounds_attention():
    found = kernels("H100")
    assert float(found.attention(1, 32768, 32768, 32, 8, 128, window=128)) < 0.1 * float(
        found.attention(1, 32768, 32768, 32, 8, 128)
    )


def test_a_device_without_the_type_uses_a_wider_one():
    found = kernels("A100").constants
    assert found.peak("float8_e4m3fn") == found.peak("bfloat16")
    with pytest.raises(UserError, match="computes nothing in complex64"):
        found.peak("complex64")


def test_every_constant_has_a_source():
    for name in DEVICES:
        known = constants(lookup(name).device)
        assert set(known.values) <= set(known.sources)
        assert all(known.sources.values())


def test_a_device_without_constants_is_refused():
    with pytest.raises(UserError, match="no constants of time for CPU"):
        constants(lookup("cpu").device)


def test_a_rank_of_context_parallelism_computes_half_of_its_rectangle():
    # llama-3-8b's heads, 8,192 tokens over two ranks. Half of the rectangle without a mask, as measured on an H100
    # (h100_blocks.json): 0.917 ms, 0.951 ms the causal square.
    found = kernels("H100")
    square, rectangle = (float(found.attention(1, q, 8192, 32, 8, 128)) for q in (8192, 4096))
    half, none = (float(found.attention(1, 4096, 8192, 32, 8, 128, attended=share)) for share in (0.5, 0.0))
    assert square == pytest.approx(0.931e-3, rel=0.01)
    assert rectangle == pytest.approx(square, rel=0.06)
    assert 0.44 <= round(half * 1e3, 2) <= 0.48
    # Only the products are halved, not the traffic and the start.
    assert half - none == pytest.approx((rectangle - none) / 2)
    assert none > 15e-6


@pytest.mark.parametrize("window", [0, 8192, 100_000])
def test_a_window_as_wide_as_the_sequence_is_none(window):
    found = kernels("H100")
    assert float(found.attention(1, 8192, 8192, 32, 8, 128, window=window)) == float(
        found.attention(1, 8192, 8192, 32, 8, 128)
    )


def test_products_in_a_row_run_at_the_rate_that_the_power_limit_leaves():
    # Measured over 4 s on an H100: 679 TFLOP/s of a peak of 989; for a short while, alone, up to 798.
    found = kernels("H100")
    rates = [2.0 * m * n * k / float(found.matmul(m, n, k)) for m, n, k in ((8192, 57344, 8192), (32768, 16384, 16384))]
    assert rates == pytest.approx([6.788e14, 6.788e14])
    alone = 2.0 * 32768 * 16384 * 16384 / float(found._isolated(32768, 16384, 16384, "bfloat16", 1.0))
    assert alone > 7.5e14
    # What does not reach it is as fast as alone.
    assert float(found.matmul(64, 4096, 4096)) == float(found._isolated(64, 4096, 4096, "bfloat16", 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_weights_alone_in_fewer_bits_are_multiplied_at_the_rate_of_16_bits(device):
    known = constants(lookup(device).device)
    if {"bfloat16", "float16"} & known.peaks.keys():
        wide = known.ceiling("bfloat16")
        assert known.ceiling("int8") == known.ceiling("int4") == wide
