"""The dry run observes the very runtime at scales that no machine here has; the closed form must say the same."""

import os
import random
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.cases import from_table, table
from harness.forked import context
from harness.space import MODELS
from harness.today import EVERYTHING, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.model.families import family_of
from shardwise.ops.llama_halves import _side_by_side
from shardwise.predict import estimate
from shardwise.predict.memory.step import predict_bytes
from shardwise.report import compare
from shardwise.report.step_report import Role
from shardwise.runtime import dryrun
from shardwise.runtime.dryrun import dry_run

LARGE = [
    ("llama-3-70b", "dp=128,tp=8,zero=3,sp", 4096, 128),
    ("llama-3-70b", "dp=2048,tp=8,zero=3,sp", 4096, 2048),
    ("llama-3-70b", "dp=256,tp=8,pp=8", 4096, 2048),
]
"""1,024 ranks, and 16,384 without and with a pipeline."""

REST = table(__file__, "REST")
"""Every stage with both decoders, sampled when not all are asked for."""


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes begin where torch is imported already, as clean as they would otherwise."""
    monkeypatch.setattr(dryrun, "multiprocessing", SimpleNamespace(get_context=lambda kind: context()))


def cases() -> list[tuple[str, str, int, int]]:
    if EVERYTHING:
        return [*LARGE, *REST]
    # Thousands of ranks of 70 billion parameters take most of a minute: every third day, in place of another.
    generator = random.Random(seed())
    return generator.sample(LARGE, 1) + generator.sample(REST, 1) if seed() % 3 == 0 else generator.sample(REST, 2)


def test_the_cases_span_stages_and_decoders() -> None:
    seen = {(family_of(get(name)).module, Layout.parse(layout).stage) for name, layout, _, _ in [*LARGE, *REST]}
    assert len([*LARGE, *REST]) >= 16 and seen == {(d, z) for d in ("llama", "gpt") for z in range(4)}


@pytest.mark.parametrize(("model", "layout", "seq", "batch"), cases(), ids=[f"{c[0]}:{c[1]}" for c in cases()])
def test_observed_at_scale_equals_the_closed_form(model: str, layout: str, seq: int, batch: int) -> None:
    asked = get(model), Layout.parse(layout), Workload(seq=seq, batch=batch)
    observed = dry_run(*asked)
    comparison = compare(estimate(*asked), observed)
    assert observed.source == "dry-run" and sum(len(role.ranks) for role in observed.roles) == asked[1].ranks
    assert comparison.equal_ledger
    assert comparison.exact_classes_equal
    assert comparison.peak_error < 0.05


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(UserError, match="a dry run has no disk"):
        dry_run(get("tiny-llama"), Layout.parse("offload=nvme"), Workload(seq=64, batch=2))


@from_table
def test_what_is_the_same_is_observed_once(
    layout: str, batch: int, run: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of those that do the same, and of a long step one with the same steady state: (place, micro-batches)."""
    observe, seen = dryrun._observe_all, []

    def watched(asked: Sequence[tuple[UnitPlan, int]], source: object) -> list[Role]:
        seen.extend([plan.pp_rank, dryrun._run(plan).micro_batches] for plan, _ in asked)
        return observe(asked)

    monkeypatch.setattr(dryrun, "_observe_all", watched)
    asked = get("tiny-llama"), Layout.parse(layout), Workload(seq=64, batch=batch)
    said: list[str] = []
    observed, predicted = dry_run(*asked, progress=said.append), estimate(*asked)
    assert seen == run
    assert said[-1] == f"{len(run)} of {len(run)} kinds of ranks observed" and len(said) == len(run) + 1
    assert [(role.role, role.ranks) for role in observed.roles] == [(role.role, role.ranks) for role in predicted.roles]
    comparison = compare(predicted, observed)
    assert comparison.equal_ledger and comparison.exact_classes_equal
    assert comparison.peak_error < 0.05


SMALL = {"max_positions": 256}
PEAKS = list(table(__file__, "PEAKS"))
PEAKS += [
    ("gpt2", {"hidden": 120, "ffn": 237, "layers": 2},
     "dp=2,tp=4,zero=2,recompute=selective,attention=math,precision=fp32", 12, 2, False, 0),
    ("neox", {"hidden": 144, "head_dim": 16, "ffn": 183, "layers": 2},
     "dp=6,tp=3,zero=3,shard=2,micro=2,recompute=full,precision=fp64", 128, 1, True, 0),
    ("mqa", {"hidden": 120, "head_dim": 12, "ffn": 215, "layers": 2},
     "tp=2,pp=2,stages=2/0,micro=2,recompute=input,precision=fp64", 12, 3, True, 1),
    ("qwen3", {"hidden": 72, "head_dim": 16, "ffn": 141, "vocab": 211, "tied": False, "layers": 6},
     "pp=4,stages=2/2/2/0,micro=2,recompute=input,attention=math,precision=fp32", 64, 4, False, 3),
    ("qwen2", {"layers": 2}, "tp=3,pp=2,zero=1,schedule=naive,stages=0/2,micro=2,attention=math,precision=fp64",
     64, 2, True, 0),
    ("gpt2", {"layers": 2}, "dp=8,tp=4,zero=2,sp,recompute=selective,attention=math", 12, 2, False, 0),
]  # fmt: skip
"""Random pairs whose peak or saved activations were off, by up to 40%: short and parallel blocks, what is kept
for the gradients of weights, stages without blocks, the gradient of learned positions, messages on their way."""


def test_peaks_that_a_search_has_found_wrong() -> None:
    asked = []
    for name, changes, text, seq, count, documents, place in PEAKS:
        layout, model = Layout.parse(text), MODELS[name].replace(**SMALL, **changes)
        workload, rank = Workload(seq, layout.dp * layout.micro * count, documents), Mesh.of(layout, model).rank
        at = rank(pp=place)
        asked.append((unit_plan(model, layout, workload, rank=at), at))
    for (plan, _), role, case in zip(asked, dryrun._observe_all(asked), PEAKS, strict=True):
        predicted = predict_bytes(plan)
        for kind in ("parameters", "gradients", "optimizer", "saved", "comm"):
            assert getattr(predicted, kind) == getattr(role.bytes, kind), (case, kind)
        assert predicted.total == pytest.approx(role.bytes.total, rel=0.03), case


def test_gradients_side_by_side_are_recognized_without_an_address() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = torch.empty(2, 5, 6, 8)
        q, k, v = whole.split([2, 2, 2], 2)
        assert _side_by_side([q, k, v]) is whole
        assert _side_by_side([q, v, k]) is not whole


def test_a_failed_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "_observe_each", _die)
    with pytest.raises(UserError, match="one of its processes was killed"):
        dry_run(get("tiny-llama"), Layout.parse("tp=2"), Workload(seq=64, batch=2))


def _die(pipe: Connection, asked: object) -> None:
    os._exit(9)


def test_ranks_that_are_groups_of_two_axes_sum_for_both_at_a_time() -> None:
    """Experts' replicas are the tensor-parallel ranks in this order of axes: their sums have a room each."""
    layout = Layout.parse("dp=2,tp=2,ep=2,zero=1,sp,attention=math,order=pp-tp-cp-dp")
    plan = unit_plan(get("tiny-mixtral"), layout, Workload(64, 2), backend="gloo")
    ((observed,), predicted) = [role.bytes for role in dryrun._observe_all([(plan, 0)])], predict_bytes(plan)
    assert observed.comm == predicted.comm and observed.total == pytest.approx(predicted.total, rel=0.01)
