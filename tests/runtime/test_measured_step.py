"""One rank's share of a step: its ledger is the predicted one, its waits last as long as they should, and a step is
composed of what the shares took."""

import json
import time
from dataclasses import replace

import pytest
import torch

from harness.cases import table
from harness.measured_cpu import cluster
from harness.pool import run_ranks
from harness.today import some_of
from shardwise.decoder import random
from shardwise.emulate import measured_step
from shardwise.emulate.measured_step import MeasuredStep, ShareSettings, check_memory, measure_step, plan_shares
from shardwise.emulate.share import ShareRun
from shardwise.emulate.share_composition import differences, meeting, stage_times
from shardwise.emulate.share_job import Share, ShareJob, ShareStep, ShareWait
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.runtime.tensor.lowering import vocabulary_range
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.transport.waits import HostTimer, WaitTransport

SEQ, BATCH = 64, 8
SAMPLED = table(__file__, "SAMPLED")


@pytest.fixture
def pooled(monkeypatch, tmp_path):
    """Shares run on the tests' pool of processes, which have loaded torch."""

    def whole(module, job, ranks, **options):
        out = tmp_path / "shares.json"
        run_ranks(f"{module}:run", ranks, ShareJob(**job(str(out))))
        return json.loads(out.read_text())

    monkeypatch.setattr(measured_step, "whole", whole)


def measured(model: str, text: str, backend: str, here=None, repeats: int = 2, **more) -> MeasuredStep:
    layout, config = Layout.parse(text), get(model)
    workload = Workload(SEQ, max(BATCH, layout.dp))
    here = here or cluster(ranks=layout.ranks)
    report = estimate(config, layout, workload, here, backend=backend)
    settings = ShareSettings("cpu", backend, "a test", warm=1, repeats=repeats)
    return measure_step(config, layout, workload, here, report, replace(settings, **more))


@pytest.mark.parametrize(("model", "text", "backend"), some_of(SAMPLED, 6, "measured shares"))
def test_the_ledger_of_a_share_is_the_predicted_one(pooled, model, text, backend):
    step = measured(model, text, backend)
    assert step.ledger_differs == ()
    assert step.parts["forward"] > 0 and step.parts["backward"] > 0 and step.parts["optimizer"] > 0
    assert bool(step.waits) == (Layout.parse(text).ranks > 1)
    assert len(step.repeats) == 2 and min(step.repeats) <= step.seconds <= max(step.repeats)
    whole = sum(step.parts.values()) + sum(wait.waited for wait in step.waits) + step.others
    assert whole >= 0.99 * step.seconds


def tokens(rank: int, job: ShareJob) -> list[int]:
    share = ShareRun(job, job.ranks[0])
    batches = share.batches.step(0, share.workload.batch, random.key(0, "dropout", 0))
    return [
        token for batch, targets in batches for token in (*batch.ids.flatten().tolist(), *targets.flatten().tolist())
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_has_tokens_of_its_own_part_of_the_vocabulary(rank):
    """Others have no embedding on its rank: through rows of zeros gradients of a deep model grew to infinity."""
    model, layout, workload = get("tiny-llama"), Layout.parse("tp=2,sp"), Workload(SEQ, 2)
    here = cluster(ranks=2)
    report = estimate(model, layout, workload, here, backend="shared")
    settings = ShareSettings("cpu", "shared", "a test", warm=0, repeats=2)
    job = plan_shares(model, layout, workload, here, report, settings).job([rank], "")
    (found,) = run_ranks(f"{__name__}:tokens", 1, job)
    first, end = vocabulary_range(unit_plan(model, layout, workload, rank=rank, backend="shared"))
    assert len(found) == 2 * 2 * SEQ and first <= min(found) < max(found) < end


def test_a_slow_network_shows_in_the_step_by_its_length(pooled):
    """Ten milliseconds more for each of the step's all-reduces over tp: a step takes as much longer."""
    quick = cluster()
    slow = quick.device.measured | {"collectives": dict(quick.device.measured["collectives"])}
    table = slow["collectives"]["all_reduce"]["2"]
    slow["collectives"]["all_reduce"] = {"2": [seconds + 0.01 for seconds in table]}
    slower = replace(quick, device=replace(quick.device, measured=slow))
    steps = [measured("tiny-llama", "tp=2,micro=4,precision=fp32", "shared", here) for here in (quick, slower)]
    calls, waited = ([[getattr(w, name) for w in step.waits if w.op == "all_reduce"] for step in steps]
                     for name in ("calls", "waited"))  # fmt: skip
    assert calls[0] == calls[1] and sum(calls[0]) > 20
    # A busy machine waits longer, never shorter.
    assert sum(waited[1]) >= 0.01 * sum(calls[1])
    arithmetic = sum(steps[1].parts.values())
    assert steps[1].seconds > 0.95 * (sum(waited[1]) + arithmetic)


def test_layouts_without_shares_are_rejected_in_one_line():
    for text, words in (
        ("dp=2,sync=local,every=4", "sync=local"),
        ("dp=2,algorithm=ring", "algorithm=ring"),
        ("dp=2,zero=1,offload=nvme", "offload=cpu"),
    ):
        with pytest.raises(UserError, match=words):
            measured("tiny-llama", text + ",precision=fp32", "shared")


def test_shares_that_do_not_fit_this_machine_are_rejected(monkeypatch):
    layout, config = Layout.parse("dp=2,precision=fp32"), get("tiny-llama")
    report = estimate(config, layout, Workload(SEQ, BATCH), cluster())
    need = 2 * (report.roles[0].peak_bytes + measured_step.PROCESS_BYTES)
    monkeypatch.setattr(measured_step, "machine_memory", lambda: round(need) + 1)
    check_memory(report, [[0, 1]], "cpu")
    monkeypatch.setattr(measured_step, "machine_memory", lambda: round(need) - 1)
    with pytest.raises(UserError, match=r"2 shares of this layout need .* in this machine's memory"):
        check_memory(report, [[0, 1]], "cpu")


# -- the transport


def transport(seconds: float, background: bool = False, place: int = 1) -> WaitTransport:
    return WaitTransport((0, 1, 2), place, lambda op, nbytes, ranks: seconds, HostTimer(background))


def test_a_wait_lasts_from_the_call_or_from_the_issue():
    x = torch.ones(6)
    for background in (False, True):
        started = time.perf_counter()
        work = transport(0.1, background).all_reduce(x)
        assert not work.is_completed()
        time.sleep(0.06)
        work.wait()
        took = time.perf_counter() - started
        assert (0.099 if background else 0.159) < took < (0.15 if background else 0.25)
        assert work.is_completed() == background
    late = transport(0.02, background=True).all_reduce(x)
    time.sleep(0.03)
    started = time.perf_counter()
    late.wait()
    assert time.perf_counter() - started < 0.01


def test_results_are_made_of_the_own_part():
    group = transport(0.0)
    out, piece = torch.zeros(6), torch.tensor([1.0, 2.0])
    group.all_gather(out, piece).wait()
    assert out.tolist() == [1.0, 2.0] * 3
    narrow = torch.zeros(6, dtype=torch.bfloat16)
    group.all_gather(narrow, piece).wait()
    assert narrow.tolist() == [1.0, 2.0] * 3
    place = torch.ones(2)
    group.reduce_scatter(torch.arange(6.0), lambda: Target(place, adds=True)).wait()
    assert place.tolist() == [3.0, 4.0]
    received = torch.zeros(6, 1)
    group.all_to_all(received, torch.arange(3.0)[:, None], [3, 1, 2], [2, 1, 0]).wait()
    assert received.flatten().tolist() == [0.0, 1.0, 0.0, 2.0, 0.0, 0.0]
    message = torch.zeros(2, 500)
    group.receive(message, 0).wait()
    assert 0.01 < float(message.std()) < 0.03
    whole = torch.ones(3, dtype=torch.int64)
    group.receive(whole, 0).wait()
    assert whole.tolist() == [0, 0, 0]


# -- the composition


def step(seconds: float, *waits: tuple[float, float], ranks=(0, 1), **more) -> ShareStep:
    rows = tuple(ShareWait("all_reduce", "tp", ranks, stop - start, start, stop) for start, stop in waits)
    return ShareStep(seconds, {"forward": seconds}, rows, more.get("began", 0.0), more.get("spans", ()))


def test_shares_meet_where_their_collectives_do():
    one = step(10.0, (2.0, 3.0), (7.0, 8.0))
    other = step(10.0, (4.0, 5.0), (7.0, 8.0))
    # The second is later at the first meeting, the first takes longer to the next one: 4 + 1 + 4 + 1 + 2.
    assert meeting([one, other]) == pytest.approx(12.0)
    assert meeting([one]) == pytest.approx(10.0)
    apart = [
        replace(share, waits=tuple(replace(w, ranks=(i,)) for w in share.waits)) for i, share in enumerate((one, other))
    ]
    assert meeting(apart) == pytest.approx(10.0)
    assert meeting([one, step(11.0, (2.0, 3.0))]) == 11.0


def test_stages_take_the_mean_of_their_computations():
    plan = unit_plan(get("tiny-llama"), Layout.parse("pp=2,precision=fp32"), Workload(SEQ, 4), rank=1)
    # The last stage's F I W F I W ..., 1, 2 and 4 seconds, between idle times; a half more in every second micro-batch.
    spans = [
        (10.0 * m + at, 10.0 * m + at + took) for m in range(4) for at, took in ((0, 1.0), (2, 2.0), (5, 4.0 + m % 2))
    ]
    assert stage_times(plan, step(40.0, spans=tuple(spans))) == {1: pytest.approx((1.0, 2.0, 4.5))}


def test_a_ledger_that_differs_is_named():
    report = estimate("tiny-llama", "dp=2,precision=fp32", Workload(SEQ, BATCH), cluster())
    ledger = report.roles[0].ledger
    rows = tuple((r.phase, r.op, r.axes, r.unit, r.dtype, r.elements, r.count) for r in ledger)
    assert differences([Share(0, (), rows)], {0: ledger}, routed=False) == ()
    (words,) = differences([Share(0, (), rows[1:])], {0: ledger}, routed=False)
    assert ledger[0].op in words and f"0 recorded, {ledger[0].count} predicted" in words
