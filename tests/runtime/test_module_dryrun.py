"""The dry run of a user's module: its own code on fake tensors, beside what its trace predicts."""

from dataclasses import replace
from functools import partial

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.today import some_of
from harness.traced_jobs import TracedCase, of_two_rows, traced
from shardwise import Layout, Workload, estimate
from shardwise.layout import Mesh, unit_plan
from shardwise.layout.layout import traced_cut
from shardwise.report.compare import compare
from shardwise.report.step_report import StepReport
from shardwise.runtime import dryrun
from shardwise.runtime.module.dry_step import ModuleSource
from shardwise.runtime.module.trace import traced_modes

CASES = of_two_rows(
    ("llama", "dp=64,tp=2,zero=3", 1),
    ("llama", "dp=4,tp=2,pp=2,zero=1", 8),
    ("qwen3", "dp=16,tp=2,sp,zero=2", 4),
    ("gpt2", "dp=32,zero=3,shard=8,recompute=full", 5),
    ("phi3", "dp=8,zero=3,hpz=4", 2),
    ("gemma3", "dp=16,zero=3,offload=cpu,offload_params=cpu", 4),
    ("mixtral", "dp=8,ep=4,zero=3", 3),
    ("deepseek", "dp=8,tp=2,ep=2,zero=1", 2),
    ("llama", "dp=4,cp=2,zero=3", 4),
    ("qwen3", "cp=2,cpkind=ulysses,tp=2,sp", 1),
    ("skips", "dp=512,zero=3", 4),
    ("llama", "pp=4,schedule=zb-h1", 12),
    ("gpt2", "pp=2,dp=2,schedule=interleaved,virtual=2", 8),
    ("mixtral", "dp=4,tp=2,pp=2,ep=2,etp=2,zero=1", 4),
    ("mixtral", "dp=4,tp=2,etp=1,zero=3", 2),
    ("llama", "dp=2,tp=2,recompute=selective", 4),
    ("llama", "dp=4,tp=2,zero=3,recompute=full,micro=1", 2),
    ("skips", "dp=2,zero=2,offload=cpu,sync=local,every=2,micro=1", 1),
    ("mixtral", "dp=8,pp=2,ep=2,zero=1,sync=local,every=4,replicas=2,moments=average,micro=1", 4),
    ("qwen3", "dp=4,tp=2,sp,zero=3,sync=local,every=3,replicas=2,outer=nesterov,outer_bits=8,micro=1", 2),
    ("gpt2", "dp=8,zero=2,offload=cpu,offload_activations=cpu,micro=1", 3),
    ("deepseek", "dp=4,ep=2,zero=1,offload_activations=cpu", 3),
    ("phi3", "dp=2,tp=2,sp,recompute=selective,offload_activations=cpu", 2),
)
"""At scales without processes, and steps so long that a shorter one stands for them."""


@pytest.fixture(scope="module")
def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("case", some_of(CASES, 3, "dry runs of modules"), ids=str)
def test_its_own_code_does_what_its_trace_predicts(case: TracedCase, fake: FakeTensorMode) -> None:
    layout = Layout.parse(case.layout)
    cut, modes, piped = traced_cut(layout), tuple(traced_modes(layout)), layout.pp > 1
    model = traced(case.name, cut, layout.tp, layout.precision, piped, modes)
    workload = Workload(seq=model.trace.seq, batch=layout.dp * layout.micro * case.accumulate)
    plan, parts = case.plan if layout.tp > 1 else None, case.parts if piped else None
    source = ModuleSource(layout, case.build, partial(case.batch, 2), case.loss(), plan, None, parts)
    ranks = [Mesh.of(layout, model).rank(pp=place) for place in range(layout.pp)]
    predicted = estimate(model, layout, workload)
    roles = [
        replace(dryrun._observe_module(unit_plan(model, layout, workload, rank=rank), rank, fake, source),
                role=said.role, ranks=said.ranks)
        for rank, said in zip(ranks, predicted.roles, strict=True)
    ]  # fmt: skip
    if layout.ep > 1:
        predicted = estimate(model, layout, workload, recorded=roles)
    observed = StepReport("dry-run", predicted.model, str(layout), predicted.workload, predicted.cluster, tuple(roles))
    result = compare(predicted, observed)
    assert result.equal_ledger, [row for row in result.rows if not row.equal]
    assert result.exact_classes_equal, [row for row in result.bytes if not row.equal]
    assert result.peak_error < 0.02, [row for row in result.bytes if not row.equal]
