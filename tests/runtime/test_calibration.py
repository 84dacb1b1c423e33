"""What `calibrate device` times is what it says: the operations' results, and a sample for each probe."""

import errno
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cli.calibrate_device import _check_limits
from shardwise.errors import UserError
from shardwise.predict.time import Kernels, constants
from shardwise.predict.time.measuring import _attention, device_of
from shardwise.runtime.job.launch import RunFailed, supervise
from shardwise.runtime.measure import calibration, host
from shardwise.runtime.measure import hardware as disk
from shardwise.runtime.measure.calibration import DeviceBench
from shardwise.runtime.measure.probes import (
    DTYPES,
    HOT,
    MODEL,
    TURNS,
    CalibrationJob,
    _collective,
    attentions,
    passes,
    products,
    usual_job,
)
from shardwise.runtime.measure.samples import MORE, Probed, above_limits, within_limits

CPU = torch.device("cpu")


def tiny(out: str) -> CalibrationJob:
    job = usual_job("cpu", 0.3, "auto", out)
    return replace(job, axes=[[8, 16]] * 3, widths=[16], lengths=[16, 32], tokens=8, sizes=[1024, 4096])


def test_products_have_the_shape_that_is_told():
    probes = list(products(tiny(""), CPU, float("inf")))
    assert len(probes) == len(DTYPES) * 8 * len(TURNS)
    for _, (dtype, _), (m, n, _), make in probes:
        out = make()()
        assert out.shape == (m, n) and str(out.dtype) == f"torch.{dtype}"
    assert all(2 * m * n * k <= 5000 for *_, (m, n, k), _ in products(tiny(""), CPU, 5000.0))


def test_every_pass_runs_forward_and_backward():
    for what, of, _, make in passes(replace(tiny(""), tokens=4), CPU):
        call = make()
        out = [call(), call()][-1]
        grads = [each for each in out if isinstance(each, torch.Tensor)] if isinstance(out, tuple) else []
        assert all(torch.isfinite(grad.float()).all() for grad in grads), (what, of)
    for *_, make in attentions(tiny(""), CPU):
        make()()


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("elements", [64, HOT // 4 + 2])
def test_a_collective_is_timed_after_the_work_that_made_its_tensor(op, elements):
    seen: list[tuple[int, ...]] = []

    class Two:
        """Communicators of two ranks that write down what they are given."""

        def size(self, axes):
            return 2

        def all_reduce(self, tensor, *_):
            seen.append((tensor.numel(), tensor.data_ptr()))

        def all_gather(self, out, piece, *_):
            seen.append((out.numel(), piece.data_ptr()))

        def reduce_scatter(self, full, *_):
            seen.append((full.numel(), full.data_ptr()))

    probe = _collective(Two(), op, elements)
    for _ in range(8):
        probe.compute()
        probe()
    assert {numel for numel, _ in seen} == {elements}
    # What the cache holds is one tensor again and again; of what it does not hold there are enough to fill it.
    pieces = 1 if 4 * elements <= HOT or op == "all_gather" else 8
    assert len({pointer for _, pointer in seen}) == pieces


class Clock:
    """Time that passes when it is looked at, a little, and when a call takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("making", "calling"), [(0.0, 0.15), (0.02, 0.001), (0.2, 0.0)])
def test_it_takes_about_the_seconds_that_were_given(monkeypatch, making, calling):
    """Whatever tensors take to be made, and calls to be measured: all of it once, and again as far as time goes."""
    clock, started = Clock(), 0
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=clock, thread_time=clock))

    monkeypatch.setattr(calibration, "matrix_product", lambda *_: lambda: partial(clock.take, 0.003))

    class Slow(calibration.DeviceBench):
        def _probes(self, most, together, more=1):
            def make():
                nonlocal started
                started += 1
                clock.take(making)
                return partial(clock.take, calling)

            yield "copy", (), (1,), lambda: partial(clock.take, 1e-6)
            for number in range(49):
                yield "block", (), (number,), make

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = Slow(replace(tiny(""), seconds=10.0)).run()
    finally:
        dist.destroy_process_group()
    assert len([sample for sample in found if sample.what == "block"]) == 49
    assert clock.now < 1.1 * max(10.0, 49 * (making + 2 * calling)) and started >= 49
    assert started == 98 or clock.now > 9.0


def test_a_gpu_is_timed_by_its_own_clock_and_the_calls_of_a_block_by_the_hosts(monkeypatch):
    """Every call takes 2 s on the device, and 3 ms on the host."""
    clock = Clock()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=clock, thread_time=clock))
    seen = []

    class Queue:
        def seconds(self, call, count, waits):
            seen.append((count, waits))
            return 2.0

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bench = DeviceBench(tiny(""))
        bench._queue = Queue()
        call = partial(clock.take, 3e-3)
        assert bench._seconds(call, 0.1) == 2.0
        assert bench._seconds(call, 0.1, host=True) == pytest.approx(3e-3, rel=0.01)
    finally:
        dist.destroy_process_group()
    # The device waits for the host, but never for long.
    assert {count for count, _ in seen} == {2} and {waits for _, waits in seen} == {5e-3}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_measure_all_of_it(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, file = tmp_path / "samples.json", tmp_path / "job.json"
    job = tiny(str(out))
    file.write_text(json.dumps(asdict(job)))
    ending = supervise([sys.executable, "-m", "shardwise.runtime.measure.calibration", str(file)], ranks, patience=5.0)
    assert not ending.code, ending.line
    told = json.loads(out.read_text())
    counts = Counter(sample["what"] for sample in told["samples"])
    assert counts["product"] == 48 and counts["attention"] == 8 and counts["block"] == counts["copy"] == 1
    assert counts["collective"] == (8 if ranks == 2 else 0)
    taken = [sample["seconds"] for sample in told["samples"] if sample["what"] == "taken"]
    assert len(taken) == 1 and taken[0] > -0.01
    assert all(0 < sample["seconds"] < 60 for sample in told["samples"] if sample["what"] != "taken")
    device = device_of(told, "CPU here", "cpu", 1, MODEL, "a test")
    assert float(Kernels(constants(device)).matmul(16, 16, 16, "float32")) > 0
    assert constants(device).value("taken") == pytest.approx(max(taken[0], 0.0), rel=1e-3, abs=1e-9)
    assert ("collectives" in device.measured) == (ranks == 2)


# -- Physical limits of what `calibrate device` measures, on invented times: no device is needed


PEAK, BANDWIDTH = 700e12, 3e12
LAUNCH = 60e-6
"""Seconds of the host's call, which short kernels take instead of their own."""
ATTENTION, ADDITION, ROW = (1, 8192, 32, 128), (8192, 1024), (4096, 4096)
ATTENTION_FLOPS = 4.0 * 32 * 128 * 8192 * 8193 / 2


def samples(attention: float = 0.6, addition: float = 0.9, row: float = 0.8) -> list[Probed]:
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


# -- Rates of the host: what is measured is positive, and a disk that cannot be measured is one line


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    try:
        rates = disk.disk_rates(tmp_path, 2 * disk.REQUEST)
    except UserError as error:
        assert "no direct I/O" in str(error)
        return
    assert rates.read > 0 and rates.write > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "it is read-only"),
        (errno.ENOSPC, "it is full"),
        (errno.EINVAL, "its file system has no direct I/O"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_what_the_disk_says_is_one_line_and_the_file_is_removed(tmp_path, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "pwrite", fail)
    with pytest.raises(UserError, match="choose another folder") as raised:
        disk.disk_rates(tmp_path, disk.REQUEST)
    assert "\n" not in str(raised.value)
    if "no direct I/O" not in str(raised.value):
        assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_short_write_is_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "O_DIRECT", 0)
    monkeypatch.setattr(disk.os, "pwrite", lambda *_: 4096)
    with pytest.raises(UserError, match="it is full"):
        disk.disk_rates(tmp_path, disk.REQUEST)


@pytest.mark.parametrize("elements", [1000, host.CHUNK, host.CHUNK + 1])
def test_the_host_is_measured(elements):
    rates = host.host_rates(torch.device("cpu"), elements, 0.0)
    assert min(rates.down, rates.up, rates.adamw) > 0


RATES = st.floats(1.0, 1e12)


@given(st.lists(st.builds(host.HostRates, RATES, RATES, RATES), min_size=1, max_size=8))
def test_a_nodes_rates_are_those_of_its_ranks(every):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "gather_objects", lambda _: every)
        node = host.of_all_ranks(every[0])
    assert node["adamw_rate"] == pytest.approx(sum(rates.adamw for rates in every))
    slowest, quickest = min(min(r.down, r.up) for r in every), max(min(r.down, r.up) for r in every)
    assert slowest * 0.999 <= node["link_bandwidth"] <= quickest * 1.001
