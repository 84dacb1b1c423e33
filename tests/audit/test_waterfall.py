"""Traces: last arrivers, waits, and parts of a step that add up to it."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.recordings import dumps, entry, kernel, span, trace
from shardwise.audit.calls import Call
from shardwise.audit.files.result import audit_files
from shardwise.audit.waits import call_spans
from shardwise.audit.waterfall import CLASSES, bars, waterfall
from shardwise.report import StepReport
from shardwise.report.exposure import union, without
from shardwise.report.time_parts import STEP

STEP_NAME = "ProfilerStep#3"


def device_step(late: float = 0.0, begin: float = 0.0) -> list:
    """40 ms: 10 of computing, 6 of which hide a collective; a copy; the loader; launches. late: milliseconds."""
    return [
        span(STEP_NAME, "user_annotation", begin, 40 + late),
        span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", begin, 4),
        span("aten::mm", "cpu_op", begin + 4, 2),
        span("cudaLaunchKernel", "cuda_runtime", begin + 5, 1, correlation=1),
        span("gemm", "kernel", begin + 6, 10, 7, correlation=1),
        kernel("allreduce", begin + 10 + late, 10),
        span("Memcpy HtoD", "gpu_memcpy", begin + 20 + late, 3, 8),
        span("cudaDeviceSynchronize", "cuda_runtime", begin + 24 + late, 10),
    ]


def parts(result, rank):
    (one,) = (one for one in result.waterfalls if one.rank == rank)
    assert sum(part.time for part in one.parts) == one.time
    return {(part.group, part.name): part.time for part in one.parts}


def test_the_parts_of_a_device_s_step(tmp_path):
    result = audit_files([trace(tmp_path / "rank0.json.gz", 0, device_step(), world=1)])
    ms = 1_000_000
    assert parts(result, 0) == {
        ("computing", "computing"): 10 * ms, ("copies", "copies"): 3 * ms, ("communication", "all_reduce"): 4 * ms,
        ("data loading", "data loading"): 4 * ms, ("host", "host"): 2 * ms, ("idle", "idle"): 17 * ms,
    }  # fmt: skip


def test_a_late_rank_is_named_with_its_milliseconds(tmp_path, audit):
    for rank, begin in enumerate((10, 40, 15)):
        events = [event for event in device_step(30) if not event["name"].startswith("nccl")]
        trace(tmp_path / f"t{rank}.pt.trace.json", rank, [*events, kernel("allreduce", begin, 50 - begin)], world=3)
    result = audit_files([tmp_path])
    (late,) = result.late
    assert (late.rank, late.op, late.nbytes, late.calls) == (1, "all_reduce", 4000, 1)
    assert late.late == pytest.approx(0.025) and late.waited == pytest.approx(0.030)
    assert result.waiting == pytest.approx({0: 0.030, 1: 0.0, 2: 0.025})
    # Rank 0 waits from 10 to 40 ms, of which computing hides 6.
    assert parts(result, 0)["waiting", "waiting for rank 1"] == 24_000_000
    assert result.missing == ()
    code, out, _ = audit(tmp_path)
    assert code == 0 and out.startswith("rank 1 is late at all_reduce of 4.00 kB: by 25.0 ms\n")
    assert "rank 1 came last to all_reduce over ranks 0-2" in " ".join(out.split())


def test_the_late_rank_of_real_processes(recorded):
    """Three sleeps of 200 ms before sums of 1,000 elements."""
    result = audit_files([recorded])
    late = result.late[0]
    assert (late.rank, late.op, late.nbytes, late.calls) == (1, "all_reduce", 4000, 3)
    assert {one.rank for one in result.waterfalls} == {0, 1, 2}
    for rank in range(3):
        assert ("waiting", "waiting for rank 1") in parts(result, rank) or rank == 1
    assert [file.kind for file in result.files] == ["Kineto"] * 3 + ["execution trace"] * 3
    (axis,) = result.axes
    assert axis.calls == {"all_reduce": 3.0, "barrier": 3.0} and axis.nbytes["all_reduce"] == 12000


def test_dumps_tell_who_came_last_and_at_which_line(tmp_path):
    ranks = [[entry("all_reduce", i, at=i + 0.25 * (rank == 1 and i == 1)) for i in range(3)] for rank in range(2)]
    result = audit_files([dumps(tmp_path / "d", ranks, {"0": [0, 1]})])
    worst = result.late[0]
    assert (worst.rank, worst.where) == (1, "/home/me/train.py:10")
    assert worst.late == pytest.approx(0.25, abs=1e-6) and result.bars == ()


def test_clocks_of_hosts_are_set_by_the_ends_of_collectives(tmp_path):
    """Host b is an hour ahead, and its rank 20 ms late."""
    for rank, (host, late, base) in enumerate([("a", 0, 0), ("b", 20, 3_600_000_000_000)]):
        events = [kernel("allreduce", at + late, 30 - late) for at in (0, 100, 200)]
        trace(tmp_path / f"t{rank}.json", rank, events, host=host, base=base + 10**18)
    result = audit_files([tmp_path])
    assert [(one.rank, one.calls) for one in result.late] == [(1, 3)]
    assert result.late[0].late == pytest.approx(0.06, abs=1e-5) and "clocks" in result.notes[0]
    for rank in (0, 1):
        assert sum(parts(result, rank).values()) == 230_000_000 - 20_000_000 * rank


def test_traces_of_other_steps_have_no_waits(tmp_path):
    for rank, begin in enumerate((0, 400)):
        events = [kernel("allreduce", begin + at, 5) for at in (0, 100, 250)]
        trace(tmp_path / f"t{rank}.json", rank, events[rank:] + events[:rank], host="a")
    late = [kernel("allreduce", at, 1) for at in (0, 10, 500)]
    trace(tmp_path / "t1.json", 1, late, host="a")
    result = audit_files([tmp_path])
    assert result.late == () and "do not match in time" in result.notes[0]


def test_an_operation_around_a_wait_does_not_compute(tmp_path):
    events = [
        span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 50),
        span("_c10d_functional::wait_tensor", "cpu_op", 10, 30),
        span("gloo:all_reduce", "user_annotation", 5, 33, tid=2),
    ]
    mine = parts(audit_files([trace(tmp_path / "rank0.json", 0, events, world=1)]), 0)
    assert mine == {
        ("computing", "computing"): 20_000_000, ("communication", "all_reduce"): 28_000_000,
        ("idle", "idle"): 2_000_000,
    }  # fmt: skip


def test_a_dump_names_groups_and_lines_of_a_trace(tmp_path):
    """The trace has the last two of three calls, which gloo began in another order, and two groups."""
    for rank in range(2):
        events = [
            span("gloo:all_reduce", "user_annotation", 9000 - 1000 * at + 30 * rank * (at == 1), 100, **{
                "Input Dims": [[8]], "Input type": ["float"], "Record function id": at,
            })
            for at in (2, 1)
        ]  # fmt: skip
        trace(tmp_path / f"t{rank}.json", rank, events)
        data = json.loads((tmp_path / f"t{rank}.json").read_text())
        data["distributedInfo"]["pg_config"].append({"pg_name": "1", "ranks": [0]})
        (tmp_path / f"t{rank}.json").write_text(json.dumps(data))
    assert audit_files([tmp_path]).late == ()
    dumps(tmp_path, [[entry("all_reduce", i, line=i, backend="gloo") for i in range(3)]] * 2, {"0": [0, 1]})
    result = audit_files([tmp_path])
    assert [row.where for row in result.late if row.late] == ["/home/me/train.py:1"]


def test_the_launch_tells_what_a_kernel_of_old_torch_is(tmp_path):
    events = [
        span("nccl:all_to_all", "user_annotation", 1, 2, **{"Input Dims": [[64, 4]], "Input type": ["c10::Half"]}),
        span("cudaLaunchKernel", "cuda_runtime", 2, 0.5, correlation=5),
        span("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "kernel", 4, 3, 7, correlation=5),
        span("nccl:all_reduce", "user_annotation", 6, 1),
    ]
    result = audit_files([trace(tmp_path / "rank0.json", 0, events)])
    (axis,) = result.axes
    assert (axis.size, axis.calls, axis.nbytes) == (2, {"all_to_all": 1.0}, {"all_to_all": 512.0})
    assert result.missing == (1,)


def test_planned_and_measured_add_up(tmp_path):
    planned = {part: 0.001 * (i + 1) for i, part in enumerate(STEP)}
    result = audit_files([trace(tmp_path / "rank0.json", 0, device_step(), world=1)])
    rows = bars(result.waterfalls, planned)
    assert sum(row.measured for row in rows) == pytest.approx(0.040, abs=1e-12)
    assert sum(row.planned for row in rows) == pytest.approx(sum(planned.values()), abs=1e-12)
    assert all(sum(part[1] for part in row.parts) == pytest.approx(row.measured, abs=1e-12) for row in rows)


def test_the_plan_is_next_to_the_measured_step(tmp_path, audit):
    own = StepReport("predicted", {}, "dp=2", {}, "", (), 0.03, {"parts": {"matmul": 0.02, "data": 0.01}})
    (tmp_path / "plan.json").write_text(json.dumps(own.to_json()))
    file = trace(tmp_path / "rank0.json", 0, device_step(), world=1)
    code, out, _ = audit(file, "--plan", tmp_path / "plan.json")
    lines = [line.split()[:3] for line in out.splitlines()]
    assert code == 0 and ["computing", "20.0", "ms"] in lines and ["communication", "10.0", "ms"] in lines


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))))


@given(SPANS, SPANS, SPANS, SPANS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30))), st.integers(1, 80))
def test_parts_always_add_up(compute, copies, loading, host, collectives, end):
    moments = [(at / 1e9, (at + lasts) / 1e9) for at, lasts in collectives]
    calls = [Call(0, i, "all_reduce", (0, 1), begin=begin, end=end) for i, (begin, end) in enumerate(moments)]
    spans = {"compute": compute, "copies": copies, "loading": loading, "host": host}
    one = waterfall(0, "", (0, end), spans, call_spans(calls))
    assert sum(part.time for part in one.parts) == one.time == end
    assert [part.group for part in one.parts] == sorted((p.group for p in one.parts), key=CLASSES.index)
    whole, covered = union(compute), union(copies)
    rest = without(whole, covered)
    assert rest == union(rest) and set(ticks(rest)) == set(ticks(whole)) - set(ticks(covered))
    assert sum((Fraction(row.measured).limit_denominator(10**9) for row in bars([one])), Fraction()) * 10**9 == end


def ticks(intervals):
    return (tick for a, b in intervals for tick in range(a, b))
