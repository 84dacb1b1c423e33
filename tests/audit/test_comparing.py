"""Recorded steps beside the plan of their layout: what is missing, too much, twice, or of another type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.cases import from_table
from shardwise.audit.calls import Call
from shardwise.audit.job import AuditedJob
from shardwise.audit.reading import RankRecording, StepMark
from shardwise.audit.result import Audit, audit_of, failures_of
from shardwise.layout import Layout
from shardwise.model.catalog import resolve
from shardwise.model.parameters import parameters

SHAPES = {f"{n}.{name}": shape for n in range(2) for name, shape in
          {"up.weight": [64, 16], "up.bias": [64], "down.weight": [16, 64], "down.bias": [16]}.items()}  # fmt: skip
BLOCK = 64 * 16 * 2 + 64 + 16
TWO = (0, 1)


def call(op: str, elements: int, phase: str = "backward", engine: str = "fsdp", **more: Any) -> Call:
    values = {"dtype": "float32", "where": "train.py:7", "group": TWO, "step": 2, **more}
    size = elements * {"float32": 4, "bfloat16": 2, "int32": 4}[values["dtype"]]
    return Call(0, 0, op, phase=phase, engine=engine, inputs=size, outputs=size, **values)


def audited(calls: Sequence[Call], local: int = 1, expect: str = "", zero: int | None = None, **held: int) -> Audit:
    """The audit of two ranks that make these calls in a step. local: ranks over which parameters are sharded."""
    rows = [[name, shape, "float32", True, [-(-shape[0] // local), *shape[1:]]] for name, shape in SHAPES.items()]
    classes = {"parameters": 0, "gradients": 0, "optimizer": 0, "saved": 0, "total": 0, "peak": 0} | held
    steps = tuple(StepMark(n + 1, float(n), classes) for n in range(4))
    ranks = [
        RankRecording(rank, tuple(replace(one, rank=rank, order=at) for at, one in enumerate(calls)), 2, steps=steps,
                      model=("Net", 0, None, rows), zero=zero)
        for rank in TWO
    ]  # fmt: skip
    return audit_of(AuditedJob(0, 1.0, ranks, None, False), "", Layout.parse(expect) if expect else None)


DDP = [call("all_reduce", 2 * BLOCK, engine="ddp")]
GATHERS = [call("all_gather_into", BLOCK, "forward")] * 2
FSDP = [*GATHERS, *[call("all_gather_into", BLOCK)] * 2, *[call("reduce_scatter", BLOCK)] * 2]
HALF = "gradients: a reduce_scatter would send half the bytes"


def notes(audit: Audit, wrong: bool = True) -> list[str]:
    return [f"{row.what}: {row.note}" for row in audit.traffic if row.note and row.wrong == wrong]


@pytest.mark.parametrize(("calls", "local"), [(DDP, 1), (DDP * 3, 1), (FSDP, 2), (FSDP * 2, 2)])
def test_clean_steps_are_equal_to_the_plan(calls, local) -> None:
    audit = audited(calls, local)
    assert notes(audit) == [] and audit.exit_code == 0 and audit.beyond == ()
    again = [row for row in audit.traffic if row.elements != row.due]
    gathered = ("parameters", "backward", "all_gather_into")
    assert [(row.what, row.phase, row.op) for row in again] == [gathered] * (local - 1)
    assert all(row.note.endswith("elements are gathered again that this runtime keeps") for row in again)


@from_table
def test_deepspeed_reduces_after_the_backward_pass(stage, ops, local, layout, note) -> None:
    """And gathers after the update. Its engine says which stage it is; from 2 on it reduces every micro-batch."""
    more = {"phase": "", "engine": "deepspeed"}
    calls = [*(call(op, 2 * BLOCK, **more) for op in ops), call("all_reduce", 1, **more)]
    audit, again = (audited(some, local, zero=stage) for some in (calls, [calls[0], *calls]))
    assert notes(again) == (["gradients: 2 times what is due"] if (stage or 0) < 2 else [])
    assert audit.understood.layout == Layout.parse(f"{layout},precision=fp32")
    assert notes(audit) == [] and notes(audit, False) == ([note] if note else [])
    assert [row.what for row in audit.traffic if row.due == row.elements] == ["gradients", "parameters"][: len(ops)]


def test_a_failure_behind_the_end_of_every_rank() -> None:
    """torch 2.14's gloo threads may abort a process while Python shuts down, also without an audit."""
    for exits in ((9.0, 9.0), (9.0, None)):
        ranks = [RankRecording(rank, (), 2, exit=at) for rank, at in enumerate(exits)]
        cause = audit_of(AuditedJob(1, 1.0, ranks, None, False), "").cause
        assert ("while Python shut down" in cause) == all(exits) and cause.startswith("calls of all ranks meet")


def test_micro_batches_that_do_not_reduce_gather_more_often() -> None:
    assert notes(audited(FSDP[:4] * 2 + FSDP, 2)) == []


@from_table
def test_mistakes_of_a_step(calls, local, note) -> None:
    audit = audited(calls, local)
    assert notes(audit) == [note] and audit.exit_code == 1


@pytest.mark.parametrize("hand", [{"phase": ""}, {"phase": "backward"}])
def test_gradients_of_few_elements(hand) -> None:
    """A program that reduces every gradient by itself sends a bias of a few bytes at the line of all others."""
    calls = [call("all_reduce", size, engine="", **hand) for size in (2 * BLOCK - 2, 2)]
    assert notes(audited([*calls, call("all_reduce", 1, "", "", where="train.py:9")])) == []


def test_what_is_in_no_plan() -> None:
    """Metrics are no gradients where DDP reduces these, and neither are its own counts of used parameters."""
    extra = call("all_reduce", 500, "", "", where="train.py:9")
    used = call("all_reduce", 8, engine="ddp", dtype="int32")
    audit = audited([*DDP, extra, call("all_reduce", 1, "", ""), used])
    assert notes(audit, False) == ["program: in no plan of the layout"] and audit.exit_code == 0
    assert [row.where for row in audit.traffic if row.note] == ["train.py:9"]


def test_an_expected_layout_is_what_is_due() -> None:
    """Without one, the recorded types and reductions are those of the program's layout."""
    wide = [replace(one, dtype="float32") for one in FSDP]
    audit = audited(wide, 2, "dp=2,zero=3")
    assert "parameters: float32 on the wire, bfloat16 expected: 2 times the bytes" in notes(audit)
    audit = audited([call("all_reduce", 1, "", "")], 1, "dp=2,precision=fp32")
    assert notes(audit) == [f"gradients: never sent: {2 * BLOCK:,} elements in 2 calls are due"]
    assert notes(audited([call("all_reduce", 1, "", "")])) == []


def test_an_unmet_expectation_is_the_cause() -> None:
    """Before what differs from a layout that the program does not have; a budget is behind what is wrong."""
    few = [call("all_reduce", 2 * BLOCK - 16, engine="ddp")]
    for calls, expect, first in ((few, "dp=4", "layout: "), (DDP, "", "bytes: "), (few, "", "wrong: gradients")):
        audit, layout = audited(calls, 1, expect), Layout.parse(expect) if expect else None
        assert replace(audit, failures=failures_of(audit, layout, {"bytes": 1})).cause.startswith(first)


@pytest.mark.parametrize("missing", [0, 128])
def test_a_given_model_is_what_is_due(missing) -> None:
    """Where the program's own parameters are not seen."""
    model = resolve("tiny-llama")
    total = sum(one.numel for one in parameters(model))
    sent = replace(call("all_reduce", total - missing, engine="ddp"), rank=0)
    ranks = [RankRecording(r, (replace(sent, rank=r),), 2, steps=(StepMark(1, 0.0, None),) * 4) for r in TWO]
    (row,) = audit_of(AuditedJob(0, 1.0, ranks, None, False), "", model=model).traffic
    assert row.due == total and row.wrong == bool(missing)
    assert row.note.startswith("128 elements are never reduced" if missing else "")
    assert not audit_of(AuditedJob(0, 1.0, ranks, None, False), "").traffic


def test_state_beyond_the_plan() -> None:
    whole = 8 * BLOCK
    fits = {"parameters": whole // 2, "gradients": whole // 2, "optimizer": whole + 32}
    assert audited(FSDP, 2, **fits).beyond == ()
    audit = audited(FSDP, 2, "dp=2,zero=3,precision=fp32", **fits | {"optimizer": 2 * whole})
    assert audit.beyond == ("optimizer take 34.0 kB, where the layout needs 17.0 kB",)
    failures = failures_of(audit, Layout.parse("dp=2,zero=3,precision=fp32"), {})
    assert failures[-1].startswith("beyond the plan: optimizer")


@pytest.mark.parametrize("engine, more", [("dtensor", []), ("", []), ("", [("reduce_scatter", "backward")])])
def test_sequence_parallel_activations(engine, more) -> None:
    made = [("all_gather_into", "forward"), ("reduce_scatter", "forward"), ("all_gather_into", "backward"), *more]
    audit = audited([call(op, 64, phase, engine, shape=(4, 16)) for op, phase in made])
    assert str(audit.understood.layout) == "tp=2,sp,precision=fp32"
    assert {row.what for row in audit.traffic} == {"activations"} and not any(row.note for row in audit.traffic)


def test_tensor_parallel_activations() -> None:
    """The first map's input needs no gradient."""
    more = {"shape": (4, 16), "engine": "dtensor"}
    forward, backward = (call("all_reduce", 64, phase, **more) for phase in ("forward", "backward"))

    def of(calls: Sequence[Call]) -> list[tuple[int, int | None, str, bool]]:
        rows = {"up.weight": [32, 16], "up.bias": [32], "down.weight": [16, 32], "down.bias": [16]}
        model = [[n, s, "float32", True, rows[n[2:]]] for n, s in SHAPES.items()]
        steps = (StepMark(1, 0.0, None),) * 4
        ranks = [RankRecording(r, tuple(calls), 2, steps=steps, model=("Net", 0, None, model)) for r in TWO]
        audit = audit_of(AuditedJob(0, 1.0, ranks, None, False), "")
        return [(row.elements, row.due, row.note, row.wrong) for row in audit.traffic]

    assert of([forward, forward, backward]) == [
        (64, 128, "64 elements less: a first input that needs no gradient", False), (128, 128, "", False),
    ]  # fmt: skip
    assert of([forward, forward, *[backward] * 4]) == [(256, 128, "2 times what is due", False), (128, 128, "", False)]
