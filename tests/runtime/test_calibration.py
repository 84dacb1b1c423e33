"""What `calibrate device` times is what it says: the operations' results, and a sample for each probe."""

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise.predict.time import Kernels, constants
from shardwise.predict.time.measuring import device_of
from shardwise.runtime.job.launch import supervise
from shardwise.runtime.measure import calibration
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
