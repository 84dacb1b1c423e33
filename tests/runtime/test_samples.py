"""Physical limits of what `calibrate device` measures, on invented times: no device is needed."""

from dataclasses import asdict, replace

import pytest

from harness.cases import from_table
from shardwise.cli.calibrate_device import _check_limits
from shardwise.predict.time.measuring import _attention
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.measure.samples import MORE, Probed, above_limits, within_limits

PEAK, BANDWIDTH = 700e12, 3e12
LAUNCH = 60e-6
"""Seconds of the host's call, which short kernels take instead of their own."""
ATTENTION, ADDITION, ROW = (1, 8192, 32, 128), (8192, 1024), (4096, 4096)
ATTENTION_FLOPS = 4.0 * 32 * 128 * 8192 * 8193 / 2


def samples(attention: float = 0.6, addition: float = 0.9, row: float = 0.8) -> list[Probed]:
    """Of a device with these shares of its limits."""
    return [
        Probed("product", ("bfloat16", "forward"), (8192, 8192, 8192), 2.0 * 8192**3 / PEAK),
        Probed("product", ("bfloat16", "forward"), (32, 32, 32), LAUNCH),
        Probed("attention", ("bfloat16", "forward"), ATTENTION, ATTENTION_FLOPS / PEAK / attention),
        Probed("copy", (), (1 << 29,), 2.0 * (1 << 29) / BANDWIDTH),
        Probed("pass", ("", "bfloat16"), ADDITION, 3 * 2.0 * 8192 * 1024 / BANDWIDTH / addition),
        Probed("row", ("bfloat16",), ROW, 2.0 * 4096**2 / BANDWIDTH / row),
        Probed("block", (), (), LAUNCH),
    ]


def test_what_a_device_can_do_is_not_measured_again() -> None:
    assert above_limits(samples(), "cuda") == {}
    assert within_limits(samples(), "cuda", lambda at, more: pytest.fail("measured again")) == samples()
    assert above_limits(samples(addition=1.5), "cpu") == {}  # its cache


@from_table
def test_what_no_device_can_do_is_measured_again_and_then_rejected(shares, at, words) -> None:
    wrong, right = samples(**shares), samples()
    asked: list[tuple[int, int]] = []

    def again(index: int, more: int) -> float:
        asked.append((index, more))
        return right[index].seconds

    assert within_limits(wrong, "cuda", again) == right
    limit = 0 if "attention" in words else 3
    assert sorted(asked) == sorted([(at, MORE), (limit, MORE)])
    _check_limits([asdict(sample) for sample in right], "cuda")
    # A clock that is wrong remains so.
    remains = within_limits(wrong, "cuda", lambda index, more: wrong[index].seconds)
    assert above_limits(remains, "cuda") == {at: words}
    with pytest.raises(RunFailed, match=f"measured {words}, which no device can do: nothing is written; measure again"):
        _check_limits([asdict(sample) for sample in remains], "cuda")


def test_bf16_attention_may_be_as_fast_as_fp32_products() -> None:
    """A CPU without bf16 instructions: its attention kernels compute in fp32, faster than its bf16 products."""
    flops = 2.0 * 8192**3
    slow = [replace(samples()[0], seconds=10 * flops / PEAK), *samples(attention=0.6)[1:]]
    wide = Probed("product", ("float32", "forward"), (8192, 8192, 8192), flops / PEAK)
    assert above_limits([*slow, wide], "cpu") == {}
    assert list(above_limits([*slow, replace(wide, seconds=2 * wide.seconds)], "cpu")) == [2]


@pytest.mark.parametrize(("slow", "beyond"), [(0, [2]), (3, [4, 5])])
def test_a_disturbed_limit_is_measured_again_with_what_seemed_beyond_it(slow, beyond) -> None:
    """Another program had the core while the best product, or the copy, was measured: all else seems too quick."""
    right = samples()
    wrong = [replace(s, seconds=9 * s.seconds) if at == slow else s for at, s in enumerate(right)]
    assert list(above_limits(wrong, "cuda")) == beyond
    assert within_limits(wrong, "cuda", lambda at, more: right[at].seconds) == right


def test_attention_s_efficiency_stays_below_the_best_product_where_calls_take_longer_than_kernels() -> None:
    """Short calls cost what the host takes: a line through them alone would end far above the device's rate."""
    taken = []
    for length in (512, 2048, 8192):
        shape = 1, length, 8, 128
        flops = 4.0 * 8 * 128 * length * (length + 1) / 2
        seconds = LAUNCH + flops / (0.9 * PEAK)
        taken += [Probed("attention", ("bfloat16", "forward"), shape, seconds)]
        taken += [Probed("attention", ("bfloat16", "both"), shape, 3.5 * seconds)]
    quick = [replace(s, seconds=s.seconds * 0.8) if s.shape[1] == 8192 else s for s in taken]
    for some in (taken, quick):
        form = _attention([asdict(sample) for sample in some], "bfloat16", PEAK, BANDWIDTH)["128"]
        assert 0 < form["efficiency"] <= 1 and form["short_tokens"] >= 0
