"""Bytes of an audit beside what the program declares itself, and beside torch.profiler's in one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.audited_programs import HEAD, MODELS, STEP, Program
from harness.cases import table
from harness.today import some_of
from shardwise.audit.result import audit_of

SIZES = {"width": 1024, "micro": 1, "steps": 3}
KINDS = ("ddp", "by hand", "fsdp2", "fsdp2 kept", "fsdp1", "tp")
PROFILED = table(__file__, "PROFILED")
DECLARED = table(__file__, "DECLARED")
WRITTEN = table(__file__, "WRITTEN")
CALL = "model(torch.randn(4, 1024)).square().mean().backward()"
PACKED = """saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(torch.randn(4, 1024)).square().mean()
        loss.backward()"""


def _program(kind: str) -> Program:
    ranks, layout, model = MODELS[kind]
    sizes = SIZES | {"layers": 8 if kind == "tp" else 4}  # 8 MB are buffers of the libraries
    step = STEP.format(**sizes).replace("    opt.zero_grad()\n", WRITTEN).replace(CALL, PACKED)
    head = HEAD.format(mistake="", rank=0, step=0, **sizes)
    return Program(kind, ranks, layout, PROFILED + head + model.replace("{{", "{").replace("}}", "}") + DECLARED + step)


def _profiled(trace: Path) -> tuple[int, int]:
    """(bytes at the end, the most) of a profile."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    totals = [event["args"]["Total Allocated"] for event in sorted(events, key=lambda event: event["ts"])]
    return totals[-1], max(totals)


@pytest.mark.parametrize("kind", some_of(KINDS, 1, "memory"))
def test_bytes_are_the_program_s_and_the_profiler_s(kind, audits, tmp_path) -> None:
    job = audits.audit(_program(kind), tmp_path)
    assert job.code == 0, (tmp_path / "log").read_text()
    audit = audit_of(job, kind)
    held, recorded = audit.bytes, job.recordings[1].steps[2].bytes
    assert held is not None and recorded is not None
    declared = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [held.parameters, held.gradients, held.optimizer, held.saved] == declared[0] == declared[1]
    # Of the same rank: gloo's threads free the buffers of collectives at another moment in each.
    profiled = dict(zip(("total", "peak"), _profiled(tmp_path / "trace.json"), strict=True))
    print(f"{kind}: " + "; ".join(f"{name} {recorded[name]:,} of {size:,}" for name, size in profiled.items()))
    assert all(recorded[name] == pytest.approx(size, rel=0.03) for name, size in profiled.items())
