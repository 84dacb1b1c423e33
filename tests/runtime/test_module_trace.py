import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from harness import forked
from harness.cases import from_table, table
from harness.own_modules import OWN, PLANS, Unordered, llama, own_batch, summed_loss
from harness.pool import run_ranks
from harness.today import some_of
from harness.traced_jobs import TracedCase, of_two_rows, token_loss, traced
from shardwise import Blueprint, Layout, UserError, Workload, estimate, trace
from shardwise.errors import LayoutError
from shardwise.layout import unit_plan
from shardwise.layout.layout import traced_cut
from shardwise.model.blueprint import Part
from shardwise.report.compare import ReportComparison, compare
from shardwise.runtime.module.chain import find_chain
from shardwise.runtime.module.describe import describe, find_blocks
from shardwise.runtime.module.trace import _Tracer, traced_modes

NAMES = ("skips", "states", "shared", "llama", "qwen3", "phi3", "gemma3", "gpt2")


def compared(case: TracedCase) -> Iterator[ReportComparison]:
    """A measured step beside its prediction, on each rank."""
    layout = Layout.parse(case.layout)
    model = traced(
        case.name, traced_cut(layout), layout.tp, layout.precision, layout.pp > 1, tuple(traced_modes(layout))
    )
    workload = Workload(seq=model.trace.seq, batch=layout.dp * layout.micro * case.accumulate)
    for report in run_ranks("harness.traced_jobs:measured", layout.ranks, case):
        recorded = report.roles if layout.ep > 1 else ()
        assert all(role.routed for role in recorded)
        result = compare(estimate(model, layout, workload, recorded=recorded), report)
        assert result.equal_ledger, [row for row in result.rows if not row.equal]
        assert result.exact_classes_equal, [row for row in result.bytes if not row.equal]
        assert not result.differences
        yield result


def drawn(count: int) -> list[TracedCase]:
    draw, cases = random.Random(8), []
    while len(cases) < count:
        tp, dp, zero = draw.choice((1, 1, 2)), draw.choice((1, 2, 2, 4)), draw.randrange(4)
        if not 1 < tp * dp <= 4:
            continue
        words = [f"dp={dp}", f"tp={tp}", f"zero={zero}", f"micro={draw.randint(2, 5)}"]
        words += [f"precision={draw.choice(('bf16', 'bf16', 'fp32'))}", f"recompute={draw.choice(('none', 'full'))}"]
        if NAMES[len(cases) % len(NAMES)] == "states":
            words[-2] = "precision=fp32"  # its buffer is
        if dp == 4 and zero:
            words.append("hpz=2" if zero == 3 and draw.random() < 0.5 else "shard=2")
        case = TracedCase(NAMES[len(cases) % len(NAMES)], str(Layout.parse(",".join(words))), draw.choice((1, 1, 2)))
        cases += [case] if case not in cases else []
    return cases


HOMES = of_two_rows(
    ("llama", "tp=2,sp", 1),
    ("qwen3", "dp=2,tp=2,sp,zero=3", 2),
    ("phi3", "tp=2,sp,recompute=full", 2),
    ("gemma3", "dp=2,tp=2,sp,zero=1,offload=cpu", 1),
    ("skips", "dp=2,zero=3,offload=cpu", 2),
    ("gpt2", "dp=2,zero=3,offload=cpu,offload_params=cpu", 2),
    ("qwen3", "dp=2,zero=2,offload=cpu,recompute=full", 2),
    ("llama", "tp=2,offload=cpu", 1),
    ("shared", "dp=2,zero=3,offload=cpu,offload_params=cpu,recompute=full", 1),
    ("gemma3", "dp=2,tp=2,zero=3,offload=cpu,offload_params=cpu,recompute=full", 2),
    ("mixtral", "dp=2,zero=3", 2),
    ("mixtral", "dp=2,tp=2,zero=1,recompute=full", 1),
    ("deepseek", "dp=2,zero=2", 1),
    ("llama", "dp=2,zero=1,micro=1", 2),
    ("gemma3", "tp=2,offload_activations=cpu,micro=3", 2),
    ("gemma3", "dp=2,zero=1,sync=local,every=2,outer=nesterov,outer_bits=4,recompute=full", 2),
    ("mixtral", "dp=2,ep=2,zero=3,offload_activations=cpu,recompute=full", 2),
)
"""Sequence parallelism, homes off the device, mixtures whose experts all ranks have, and single rows."""
CUTS = of_two_rows(
    ("mixtral", "dp=2,ep=2,zero=3", 2),
    ("deepseek", "dp=2,tp=2,ep=2,zero=1", 1),
    ("mixtral", "dp=2,tp=2,ep=2,etp=2,recompute=full", 2),
    ("deepseek", "dp=4,ep=4,zero=2", 2),
    ("mixtral", "cp=2,tp=2,ep=4", 1),
    ("llama", "cp=2,precision=fp32", 2),
    ("qwen3", "dp=2,cp=2,cpkind=ulysses,zero=3", 2),
    ("phi3", "cp=2,cpkind=allgather,recompute=full", 2),
    ("llama", "tp=2,cp=2,sp,zero=1,recompute=full", 1),
    ("llama", "pp=2,cp=2", 2),
    ("qwen3", "dp=2,tp=2,zero=3,recompute=selective", 2),
    ("mixtral", "dp=2,ep=2,recompute=selective", 1),
    ("mixtral", "dp=2,pp=2,ep=2,zero=1", 2),
)
"""Experts and sequences that are spread over ranks, and attention that is computed again."""


@pytest.mark.parametrize(
    "case",
    [
        case
        for of, what in ((drawn(24), "modules"), (HOMES, "homes"), (CUTS, "cuts"))
        for case in some_of(of, 1, f"traced {what}")
    ],
    ids=str,
)
def test_a_measured_step_is_that_of_the_trace(case):
    for result in compared(case):
        assert result.peak_error < 0.02, [row for row in result.bytes if not row.equal]


def test_experts_are_units_of_their_own_only_where_a_degree_splits_them():
    """Whatever degrees a mixture was traced with: the description has the largest one's."""
    module = TracedCase("mixtral", "dp=1").build()
    described = {tp: describe(module, Layout(tp=tp), None, find_blocks(module, None)).blueprint for tp in (1, 2)}
    assert described[1].routes is False and described[2].routes is True
    for layout in map(Layout.parse, ("dp=2,zero=3", "dp=2,tp=2,zero=3")):
        plans = [unit_plan(each, layout, Workload(seq=12, batch=4)) for each in (described[2], described[layout.tp])]
        names, sizes = ([[getattr(unit, key) for unit in plan.units] for plan in plans] for key in ("name", "padded"))
        assert names[0] == names[1] and sizes[0] == sizes[1]
        assert ("model.layers.0.experts" in names[0]) == (layout.tp == 2)


@pytest.fixture(scope="module")
def skips() -> Blueprint:
    return trace(OWN["skips"], own_batch("skips", 4, 0), PLANS["skips"], loss=summed_loss, tp=[1, 2])


def test_a_trace_is_read_back_from_json(skips):
    assert Blueprint.from_json(json.loads(json.dumps(skips.to_json()))) == skips


def test_operations_have_products_with_their_flops(skips):
    """[4, 16] x [16, 48] of `up`, and in backward the gradients of its inputs and weights, of half under tp=2."""
    for tp in (1, 2):
        step = skips.trace.step(tp, "bf16", "none")
        (blocks,) = (part for part in step.operations if "blocks.0" in part.parts)
        assert blocks.parts == ("blocks.0", "blocks.1", "blocks.2")
        (up,) = (op for op in blocks.operations if op.kind == "product" and op.module == "up")
        assert up.flops[0] == 2 * 4 * 16 * 48 // tp and up.flops[1] == 2 * up.flops[0]
        assert up.sizes == ((1, 1), (4, 8), (48 // tp, 48 // tp), (16, 16))
        backward = sum(op.flops[0] * op.count for op in blocks.operations if op.phase == "backward")
        assert backward == 2 * 2 * up.flops[0]
        assert all(op.nbytes[1] >= op.nbytes[0] > 0 for op in blocks.operations)


def test_saved_bytes_are_of_the_part_that_saves_them(skips):
    saved = dict(skips.trace.step(1, "bf16", "none").saved)
    assert list(saved) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert saved["blocks.0"] == saved["blocks.1"]


@pytest.mark.parametrize(
    "layout", ["dp=2,pp=2", "dp=2,tp=2,sp", "dp=2,zero=1,offload_activations=cpu", "compile=block"]
)
def test_what_was_not_traced_has_no_numbers(skips, layout):
    with pytest.raises(LayoutError):
        estimate(skips, layout, Workload(seq=1, batch=8))


def test_single_rows_are_traced_where_a_module_has_them():
    """A batch norm has no statistics of one."""
    normed = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9))
    for model, options, singles in ((Uneven, {}, 2), (Uneven, {"single": False}, 0), (normed, {}, 0)):
        steps = trace(model, (X,), precisions=["fp32"], **options).trace.steps
        assert sum(step.single for step in steps) == singles and not steps[0].single
        assert not any(step.operations for step in steps if step.single)


def test_other_degrees_and_sequences_are_named(skips):
    with pytest.raises(LayoutError, match=r"tp=4,precision=bf16,recompute=none was not traced; the trace has tp=1\|2"):
        estimate(skips, "tp=4", Workload(seq=1, batch=8))
    with pytest.raises(UserError, match=r"traced with rows of 1 elements, not 7: choose seq=1"):
        estimate(skips, "dp=2", Workload(seq=7, batch=8))


def test_blocks_are_in_the_order_of_the_loss():
    blueprint = trace(Unordered, own_batch("nested", 2, 0), loss=summed_loss, precisions=["fp32"], single=False)
    assert [part.name for part in blueprint.parts] == ["root", "first.0", "first.1", "last.1"]


def test_a_loss_calls_methods_and_an_example_may_be_wide():
    def halves(model: Uneven, batch: tuple[Tensor]) -> Tensor:
        return model.halved(batch[0]).square().mean()

    (step, _) = trace(Uneven, (X.double(),), loss=halves, precisions=["fp32"], single=False).trace.steps
    assert [op.module for part in step.operations for op in part.operations if op.kind == "product"][:2] == [
        "up",
        "down",
    ]


# -- modules that cannot be traced


class ByValue(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class ByRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) < 7 else super().forward(x) * 2


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.ones(3, 3)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def halved(self, x: Tensor) -> Tensor:
        return 0.5 * self(x)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(6, 6)
        self.a, self.b = nn.Parameter(both[:3]), nn.Parameter(both[3:])


class Prompted(nn.Module):
    """Its maps see a batch, and a prompt of six rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(6, 8))
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        prompt, x = (self.down(self.up(y)) for y in (self.prompt, x))
        return x + prompt.mean()


X = torch.ones(4, 6)


def twice(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (x,) = batch
    return (model(x) - model(2 * x)).square().mean()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: ByValue(6, 6), {}, r"ByValue cannot be traced: it decides by the values of tensors .*split"),
        (lambda: ByRows(6, 6), {}, r"it runs other operations for other numbers of rows; split and verify"),
        (lambda: Failing(6, 6), {}, r"Failing cannot be traced: RuntimeError: .*; split and verify"),
        (lambda: 3, {}, r"trace takes an nn.Module or a function that builds one, not int"),
        (nn.Identity, {}, r"has no parameters"),
        (Uneven, {"plan": {"up": "column", "down": "row"}, "tp": [2]}, r"tp=2 does not divide the 9 outputs of up"),
        (Uneven, {"tp": [1], "cuts": ["ep=2,etp=2"]}, "cuts: 'ep=2,etp=2' needs tp=2: trace that degree, too"),
        (Uneven, {"tp": [2]}, r"tp=2 needs a plan, and Uneven publishes none"),
        (Uneven, {"plan": {"upp": "column"}}, r"no map is named 'upp'; did you mean up"),
        (Uneven, {"loss": twice}, r"the loss calls the module twice with gradients, and a prediction has one pass"),
        (Overlapping, {}, r"a and b are different parameters in one memory"),
        (OWN["plain"], {"parts": ["enter", "block.*"], "loss": summed_loss}, r"no module is named 'block.\*'"),
        (Uneven, {"example": 7}, r"no tensor with rows"),
        (Uneven, {"example": {"x": X, "y": torch.ones(3)}}, r"same number of rows.*\[4, 6\], \[3\]"),
    ],
)
def test_bad_input_is_one_line(model, options, message):
    with pytest.raises(UserError, match=message) as caught:
        trace(model, **{"example": (X,)} | options)
    assert "\n" not in str(caught.value)


def test_calls_are_the_same_at_both_sizes_whichever_is_larger():
    """Four rows are fewer than the prompt's, and eight more. At six one call is like the other."""
    plan = {"up": "column", "down": "row"}
    model = trace(Prompted(), torch.ones(4, 8), plan, tp=[2], single=False)
    step = model.trace.step(2, "bf16", "none")
    pairs = {(row.phase, row.elements) for row in step.collectives}
    assert pairs == {(phase, pair) for phase in ("forward", "backward") for pair in ((48, 48), (32, 64))}
    with pytest.raises(
        UserError, match="collectives differ between numbers of rows: trace an example with another one"
    ):
        trace(Prompted(), torch.ones(6, 8), plan, tp=[2], single=False)


def test_sequence_parallelism_that_a_degree_cannot_have_is_not_tried_for_larger_ones(monkeypatch):
    tried, step = [], _Tracer._on_shards
    monkeypatch.setattr(_Tracer, "_on_shards", lambda self, tp, *more: tried.append(tp) or step(self, tp, *more))
    model = trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8), {"0": "column", "1": "row"})
    assert model.trace.degrees == [1, 2, 4, 8] and "blocks of Sequential" in model.trace.uncut
    assert tried == [2]


def test_the_sums_of_a_reduce_scatter_are_no_operations_of_the_module():
    """gloo adds them up in chunks, more of them for more rows."""
    module = llama(hidden_size=64, num_hidden_layers=1, num_key_value_heads=4, max_position_embeddings=4096)
    example = {"input_ids": torch.zeros(2, 4096, dtype=torch.long)}
    assert trace(module, example, loss=token_loss, tp=[4]).trace.uncut == ""


def test_degrees_that_do_not_suit_are_left_out():
    model = trace(Uneven, (X,), {"up": "column", "down": "row"})
    assert model.trace.degrees == [1]


def test_a_module_on_the_meta_device_needs_no_memory():
    """300 GB of weights."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(4)))
    model = trace(module, torch.ones(2, 1 << 17, device="meta"), {"0": "column", "1": "row"}, tp=[2])
    report = estimate(model, "dp=2,tp=2,zero=3,micro=2", Workload(seq=1, batch=8))
    assert report.roles[0].bytes.parameters > 4e10


def test_parameters_need_not_be_contiguous():
    module = Uneven()
    module.up.weight = nn.Parameter(torch.randn(6, 9).t())
    plain, other = trace(Uneven, (X,)), trace(module, (X,))
    workload = Workload(seq=1, batch=8)
    assert estimate(plain, "dp=2,micro=4", workload).roles == estimate(other, "dp=2,micro=4", workload).roles


def test_a_job_is_no_place_for_fake_ranks():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="a process of a job cannot trace"):
            trace(Uneven, (X,))
    finally:
        dist.destroy_process_group()


NET = table(__file__, "NET")


def shardwise(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "net.py").write_text(NET)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return forked.shardwise(*(word.format(folder) for word in words), environment=environment, timeout=120)


def test_the_command_writes_what_other_commands_read(tmp_path):
    words = ["trace", "{}/net.py:build", "--loss", "loss", "--plan", "suggest", "--tp", "1,2", "--json"]
    done = shardwise(tmp_path, *words, "--out", "{}/net.json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["suggestion"]["plan"] == {"0": "column", "2": "row"} and data["tp"] == [1, 2]
    assert data["parameters"] == 8 * 32 + 32 + 32 * 8 + 8
    assert data["sp"] == [] and not data["pipelines"]
    assert "blocks of Sequential" in data["left_out"]["sp"] and "--parts" in data["left_out"]["pipelines"]
    (part,) = data["parts"]
    assert part["flops"] == 2 * 4 * 8 * 32 * (2 + 4)
    options = ["--layout", "dp=2,tp=2,zero=3,micro=4", "--cluster", "4xH100", "--batch", "16", "--json"]
    done = shardwise(tmp_path, "estimate", "{}/net.json", *options)
    assert done.returncode == 0 and json.loads(done.stdout)["time"] > 0


@from_table
def test_bad_words_are_one_line_and_code_2(words, message, tmp_path):
    done = shardwise(tmp_path, "trace", *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


# -- Pipelines of traced modules


CASES = [
    TracedCase("plain", "pp=2,micro=4", 4),
    TracedCase("plain", "pp=2,micro=3,precision=fp32", 3),
    TracedCase("plain", "pp=2,schedule=zb-h1,dp=2,zero=2,micro=2", 4),
    TracedCase("plain", "pp=2,stages=0/4,micro=4", 2),
    TracedCase("plain", "pp=2,stages=4/0,micro=3,schedule=zb-h2", 4),
    TracedCase("tied", "pp=2,dp=2,zero=1,micro=3", 2),
    TracedCase("states", "pp=2,tp=2,micro=4,precision=fp32", 2),
    TracedCase("llama", "pp=2,micro=3", 4),
    TracedCase("llama", "pp=4,micro=2,precision=fp32", 4),
    TracedCase("llama", "pp=2,dp=2,zero=1,micro=2", 2),
    TracedCase("llama", "pp=2,dp=2,zero=2,micro=4,schedule=gpipe", 3),
    TracedCase("llama", "pp=2,dp=2,zero=3,micro=2", 3),
    TracedCase("llama", "pp=2,dp=2,zero=3,micro=3,recompute=full", 4),
    TracedCase("llama", "pp=2,virtual=2,schedule=interleaved,micro=2", 4),
    TracedCase("llama", "pp=2,virtual=2,schedule=breadth-first,dp=2,zero=3,micro=2", 4),
    TracedCase("llama", "pp=2,schedule=zb-h1,micro=2", 4),
    TracedCase("llama", "pp=2,schedule=zb-h1,micro=2,recompute=full", 4),
    TracedCase("llama", "pp=2,tp=2,micro=3", 2),
    TracedCase("gpt2", "pp=2,dp=2,zero=1,micro=2", 2),
    TracedCase("gpt2", "pp=2,tp=2,micro=2", 2),
    TracedCase("qwen3", "pp=2,recompute=full,micro=4", 4),
    TracedCase("gemma3", "pp=2,dp=2,zero=2,micro=2", 4),
    TracedCase("phi3", "pp=2,stages=1/3,micro=2", 2),
]


@pytest.mark.parametrize("case", some_of(CASES, 1, "pipelines of traced modules"), ids=str)
def test_a_measured_step_of_stages_is_that_of_the_trace(case):
    for result in compared(case):
        assert len(result.a.roles) >= Layout.parse(case.layout).pp
        assert result.peak_error < 0.05, [row for row in result.bytes if not row.equal]


def without_shards(part: Part) -> Part:
    """A part as it is without sequence parallelism, which pipelines do not have."""
    return replace(part, parameters=tuple(replace(p, sees_shards=False) for p in part.parameters))


@pytest.mark.parametrize(("name", "tp"), some_of([("plain", 1), ("tied", 2), ("gpt2", 2)], 1, "parts of stages"))
def test_stages_have_the_parts_of_split(name, tp):
    """Both find entry, blocks and exit, and the table that the ends share."""
    case, model = TracedCase(name, "pp=2"), traced(name, "", tp, "bf16", True)
    module = case.build()
    blocks = find_blocks(module, None)
    chain = find_chain(module, case.parts, blocks)
    described = describe(module, Layout(tp=tp), case.plan, blocks, chain).blueprint
    assert [without_shards(part) for part in model.piped.parts] == list(described.parts)
    assert Blueprint.from_json(json.loads(json.dumps(model.to_json()))) == model


class Frozen(nn.Module):
    """Blocks; the first one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OWN["plain"]()
        self.inner.enter.requires_grad_(False)

    def forward(self, x):
        return self.inner(x)


class HeadLeftOut(OWN["plain"]):
    """Publishes an order in which a part with parameters is missing."""

    _pp_plan: ClassVar = {"enter": (["inputs"], ["x"]), "blocks": (["x"], ["x"])}


class Pairs(OWN["plain"]):
    """Publishes an order of blocks that return more than the tensor that travels."""

    _pp_plan: ClassVar = {**HeadLeftOut._pp_plan, "head": (["x"], ["y"])}

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(_paired, block.forward)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def _paired(forward, x):
    return forward(x), None


def plain(build=OWN["plain"], parts=None, **options) -> Blueprint:
    return trace(build, own_batch("plain", 4, 0), loss=summed_loss, parts=parts, tp=[1], **options)


@from_table
def test_without_an_order_of_parts_there_are_no_pipelines(build, parts, message):
    model = plain(build, parts)
    estimate(model, "dp=2", Workload(seq=1, batch=8))
    with pytest.raises(LayoutError, match=message) as caught:
        estimate(model, "pp=2", Workload(seq=1, batch=8))
    assert "\n" not in str(caught.value)


@from_table
def test_what_a_pipeline_cannot_have_is_one_line(layout, message):
    model = traced("plain", "", 1, "bf16", True)
    with pytest.raises(LayoutError, match=message) as caught:
        estimate(model, layout, Workload(seq=1, batch=8))
    assert "\n" not in str(caught.value)


def test_files_of_an_earlier_release_say_how_to_get_pipelines():
    model = traced("plain", "", 1, "bf16", True)
    earlier = replace(model, trace=replace(model.trace, ends=None))
    with pytest.raises(LayoutError, match="PlainMLP has no predictions for pipelines: trace it again"):
        estimate(earlier, "pp=2", Workload(seq=1, batch=8))


# -- Commands of docs/your_own_model.md print what the page has


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your_own_model.md"


def test_the_page_has_what_the_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# model.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    blocks = re.findall(r"^```console\n(\$ shardwise (.*?)\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [words.split()[0] for _, words in blocks] == ["trace", "estimate", "plan"]
    for block, words in blocks:
        done = forked.shardwise(*words.split(), environment=environment, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [f"$ shardwise {words}", *(line.rstrip() for line in done.stdout.splitlines())]
        if block.endswith("\n...\n"):  # the page has the first lines alone
            lines[block.count("\n") - 1 :] = ["..."]
        page = page.replace(block, "\n".join([*lines, ""]))
    if os.environ.get("SHARDWISE_SNAPSHOTS") == "write":
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
