"""Models by their classes of transformers: two steps of a split on ranks, the class alone, and the prediction.

`PYTHONPATH=tests python -m harness.class_jobs RESULTS.jsonl` writes docs/model_classes.md, and continues where it was
stopped.
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.module_jobs import LR, SETTINGS, adamw
from harness.pool import RankFailed, run_ranks
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.axes import DP
from shardwise.layout.context import cuts_sequences
from shardwise.layout.layout import traced_cut
from shardwise.model.adapters import stacked_target
from shardwise.model.lora import Lora
from shardwise.predict import estimate
from shardwise.report.compare import ReportComparison, compare
from shardwise.report.step_report import StepReport
from shardwise.runtime import dryrun
from shardwise.runtime.module.adapters import stacks_of
from shardwise.runtime.module.class_model import ClassModel, ClassSplit
from shardwise.runtime.module.class_run import token_loss
from shardwise.runtime.module.comparison import RankDifference, compare_split, first_difference
from shardwise.runtime.module.dry_step import ModuleSource
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.split import split
from shardwise.runtime.module.trace import trace
from shardwise.runtime.module.verify import Verification, VerifyRequest
from shardwise.runtime.transport.comms import Comms

RANK, ROWS, SEQ, STEPS = 3, 4, 16, 2
LAYOUT, PIPED, CUT = "dp=2,tp=2,zero=3", "pp=2", "cp=2"
WIDE, WIDE_SEQ = f"{LAYOUT},micro=2", 512


@dataclass
class ClassOutcome:
    losses: list[float]
    norms: list[float]
    difference: RankDifference | None = None
    report: StepReport | None = None


@dataclass
class ClassCheck:
    """A class under a layout beside the class alone."""

    layout: str
    published: bool
    """Whether the plan is the class's own."""
    tolerance: float
    verification: Verification
    error: float
    """Largest relative error of losses and of gradient norms."""
    predicted: bool | None = None
    """Whether measured collectives and bytes by class are the predicted ones; None without a prediction."""
    peak: float = 0.0
    """How far off the peak is."""


def small(model_type: str, layout: str = LAYOUT) -> tuple[ClassModel, str]:
    """(a small model, the layout, with ep=2 where there are experts)."""
    model = ClassModel({"model_type": model_type}, model_type).small(Layout.parse(layout))
    blank = model.blank()
    if "tp=2" in layout and getattr(blank, "_ep_plan", None) and any(p.dim() == 3 for p in blank.parameters()):
        layout += ",ep=2"
    return model, layout


def batch(model: ClassModel, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, next tokens), [ROWS, SEQ] each."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocab, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(-1, 1)


def rows_of(model: ClassModel, step: int, comms: Comms) -> Any:
    """A rank's rows of a batch, copied: a view would keep all of it."""
    return tuple(x.chunk(comms.size(DP))[comms.index(DP)].clone() for x in batch(model, step))


def plain(model: ClassModel) -> nn.Module:
    """The class, with the same weights wherever it is built, and no factor of an adapter that is zero."""
    torch.manual_seed(0)
    module = deepcopy(model)()  # whose configuration changes
    use_exact_products(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return module.eval()


def adapted(model: ClassModel) -> ClassModel:
    """With adapters beside all of its maps but the head, and its stacked experts."""
    blank = model.blank()
    head = blank.get_output_embeddings()  # type: ignore[operator]
    maps = {name.rpartition(".")[2] for name, child in blank.named_modules()
            if type(child) is nn.Linear and child is not head}  # fmt: skip
    return replace(model, lora=Lora(RANK, 5.0, (*sorted(maps), *sorted({*map(stacked_target, stacks_of(blank))}))))


def one_device(model: ClassModel) -> ClassOutcome:
    module, outcome = plain(model).double(), ClassOutcome([], [])
    optimizer = adamw(p for p in module.parameters() if p.requires_grad)
    for step in range(STEPS):
        loss, count = token_loss(module, batch(model, step))
        optimizer.zero_grad()
        (loss / count).backward()  # type: ignore[no-untyped-call]
        used = [p for p in module.parameters() if p.grad is not None]
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(used, SETTINGS.clip)))
        optimizer.step()
        outcome.losses.append(float(loss.detach() / count))
    return outcome


def train_class(rank: int, payload: tuple[ClassModel, VerifyRequest]) -> ClassOutcome:
    """Verify, then train as `one_device` does. The last step is measured."""
    model, request = payload
    difference = compare_split(request)
    if not difference.result:
        return ClassOutcome([], [], difference)
    example = model.inputs(2, SEQ) if cuts_sequences(request.layout) else None
    module = split(plain(model), request.layout, request.plan, example, parts=request.parts, optimizer=SETTINGS)
    comms, outcome = module.program.comms, ClassOutcome([], [], difference)
    for step in range(STEPS):
        result = module.train_step(token_loss, rows_of(model, step, comms), lr=LR, measure=step == STEPS - 1)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.report = module.report()
    return outcome


def train_on(rank: int, payload: tuple[ClassModel, Layout, ClassSplit, Path]) -> tuple[float, float]:
    """Loss and gradient norm of the next step, from the newest checkpoint of a folder, and another checkpoint."""
    model, layout, parts, folder = payload
    module = split(plain(model), layout, parts.plan, parts=parts.parts, optimizer=SETTINGS)
    step, comms = module.load(folder) if any(folder.iterdir()) else 0, module.program.comms
    result = module.train_step(token_loss, rows_of(model, step, comms), lr=LR)
    module.save(folder)
    return result.loss, result.grad_norm


def resumed(model_type: str, layouts: Sequence[str], folder: Path) -> float:
    """The largest relative error of losses and gradient norms of a step under each layout, in turn, to one device's."""
    model, first = small(model_type, layouts[0])
    alone, errors = one_device(model), []
    for step, text in enumerate((first, *layouts[1:])):
        layout = Layout.parse(f"{text},precision=fp64")
        parts = model.split(layout, SEQ)
        loss, norm = run_ranks("harness.class_jobs:train_on", layout.ranks, (model, layout, parts, folder))[0]
        errors += [abs(loss / alone.losses[step] - 1), abs(norm / alone.norms[step] - 1)]
    return max(errors)


def measured_in_bf16(rank: int, payload: tuple[ClassModel, Layout, Mapping[str, str] | None]) -> StepReport:
    """A step in bf16, in which experts compute by the products of theirs that a trace knows."""
    model, layout, plan = payload
    module = split(model().eval(), layout, plan, optimizer=SETTINGS)
    for step in range(STEPS):
        module.train_step(token_loss, rows_of(model, step, module.program.comms), lr=LR, measure=step == STEPS - 1)
    return module.report()


def beside_prediction(
    model: ClassModel, parts: ClassSplit, layout: Layout, report: StepReport
) -> ReportComparison | None:
    """A measured step beside its prediction; None where there is none."""
    try:
        blueprint = trace(parts.module.eval(), batch(model, 0), parts.plan, loss=token_loss, parts=parts.parts,
                          tp=[layout.tp], precisions=[layout.precision], cuts=[traced_cut(layout)])  # fmt: skip
    except UserError:
        return None
    recorded = report.roles if layout.ep > 1 else ()
    layout = replace(layout, micro=ROWS // layout.dp)
    return compare(estimate(blueprint, layout, Workload(seq=SEQ, batch=ROWS), recorded=recorded), report)


def check(model_type: str, layout: str = LAYOUT, lora: bool = False) -> ClassCheck:
    """lora: with adapters. Raises `UserError` for a layout that the class cannot have."""
    model, layout = small(model_type, layout)
    model = adapted(model) if lora else model
    parsed = Layout.parse(layout)
    parts, wanted = model.split(parsed, SEQ), model.verification(parsed)
    exact = Layout.parse(f"{layout},precision=fp64")
    request = VerifyRequest(
        partial(plain, model), exact, wanted["example"], parts.plan, None, model.tolerance, parts.parts
    )
    outcomes, alone = run_ranks("harness.class_jobs:train_class", parsed.ranks, (model, request)), one_device(model)
    verification = first_difference([outcome.difference for outcome in outcomes])
    published = parts.plan is None
    if not verification:
        return ClassCheck(layout, published, model.tolerance, verification, float("nan"))
    mine = outcomes[0]
    pairs = [*zip(mine.losses, alone.losses, strict=True), *zip(mine.norms, alone.norms, strict=True)]
    report, at = mine.report, exact
    if parsed.ep > 1:
        at = Layout.parse(layout)
        try:
            report = run_ranks("harness.class_jobs:measured_in_bf16", at.ranks, (model, at, parts.plan))[0]
        except RankFailed:  # a class with buffers in fp32 that meet weights in bf16
            report = None
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    beside = None if report is None else beside_prediction(model, parts, at, report)
    if beside is None:
        return ClassCheck(layout, published, model.tolerance, verification, error)
    equal = beside.equal_ledger and beside.exact_classes_equal
    return ClassCheck(layout, published, model.tolerance, verification, error, equal, beside.peak_error)


def wide(model_type: str) -> ClassModel:
    """Two layers of the widths that the class publishes, as defaults of its configuration."""
    model = ClassModel({"model_type": model_type}, model_type)
    return model._with_text(model._cut([0, 1]))


def at_full_width(model_type: str) -> tuple[StepReport, StepReport]:
    """(predicted, observed on fake tensors) of a step of two micro-batches in bf16."""
    layout, model = Layout.parse(WIDE), wide(model_type)
    workload = Workload(seq=WIDE_SEQ, batch=2 * layout.dp * layout.micro)
    described, source = ModuleSource.of_class(model, layout, workload)
    blueprint = trace(source.build(), source.example(), source.plan, loss=token_loss, tp=[layout.tp])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    observed = dryrun._observe_module(unit_plan(described, layout, workload), 0, fake, source)
    predicted = estimate(blueprint, layout, workload)
    return predicted, replace(predicted, source="dry-run", roles=(replace(observed, ranks=predicted.roles[0].ranks),))


PAGE = Path(__file__).parents[2] / "docs" / "model_classes.md"
HEAD = """# Classes of transformers that were tried

`PYTHONPATH=tests python -m harness.class_jobs RESULTS.jsonl` wrote this page, with transformers {version}: small
models with random weights, {layout} and ep=2 where the class publishes a plan for experts, in float64 against the class
on one device.

- Plans for tp are the class's own, except suggested ones of {suggested}.
- \\*: measured collectives and bytes by class equal the predicted ones, with adapters or without, and peaks are within
  {peak}; none were predicted of the others. †: with ep=2, whose bytes are those of a step in bf16.
- Tests check tokens with tp=2 against `transformers`' own of {generating}.
- At the published width with 2 layers, {wide} and rows of {seq} tokens, ledger, bytes and peaks (within {error}) on
  fake tensors are the predicted ones of {widths}.

*Base* is the largest relative error of any module's output, any parameter's gradient, and losses and gradient norms of
two steps of AdamW, *LoRA* the same with adapters beside all maps and stacked experts, *cp* under {cut}; empty where
not tried, or rejected: tokens meet elsewhere than in causal attention.

| family | base | LoRA | cp |
|---|---|---|---|
"""


KINDS = {"base": LAYOUT, "lora": LAYOUT, "cp": CUT}
"""Kinds of checks -> their layouts."""


def measure(results: Path, families: Iterable[str], wide_ones: Iterable[str]) -> None:
    """Append a line for every check that a file of results lacks."""
    done = {(row["family"], row["kind"]) for row in _rows(results)}
    for kind, family in (*product(KINDS, families), *product(["wide"], wide_ones)):
        if (family, kind) in done:
            continue
        row: dict[str, Any] = {"family": family, "kind": kind}
        try:
            if kind == "wide":
                both = compare(*at_full_width(family))
                peak = both.b.roles[0].bytes.total / 1e9
                row |= {"ok": both.equal_ledger and both.exact_classes_equal, "error": both.peak_error,
                        "words": f"{family} ({wide(family).config.hidden_size} wide, {peak:.1f} GB)"}  # fmt: skip
            else:
                result = check(family, KINDS[kind], lora=kind == "lora")
                row |= {"published": result.published, "layout": result.layout, "predicted": result.predicted,
                        "peak": result.peak, "verify": result.verification.error, "steps": result.error,
                        "why": str(result.verification), "ok": bool(result.verification)}  # fmt: skip
        except (UserError, AssertionError) as error:
            row |= {"ok": False, "why": str(error)[-200:]}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _rows(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def page(rows: Sequence[Mapping[str, Any]], generating: Sequence[Sequence[str]]) -> str:
    """The table of all families that have a result, behind what they have in common."""
    import transformers

    found = {(row["family"], row["kind"]): row for row in rows}
    bases = {family: found.get((family, "base"), {}) for family in sorted({row["family"] for row in rows})}
    lines = []
    for family, base in bases.items():
        cut = found.get((family, "cp"), {})
        cells = [_error(row) for row in (base, found.get((family, "lora"), {}), cut if "verify" in cut else {})]
        equal = any(found.get((family, kind), {}).get("predicted") for kind in KINDS)
        marks = "\\*" * equal + "†" * ("ep=2" in base.get("layout", ""))
        lines.append(f"| {family}{marks} | {' | '.join(cells)} |")
    wide_ones = [row for row in rows if row["kind"] == "wide" and row["ok"]]
    head = HEAD.format(
        version=transformers.__version__, layout=LAYOUT, cut=CUT,
        suggested=", ".join(family for family, base in bases.items() if base.get("published") is False),
        peak=f"{max((row['peak'] for row in rows if row.get('predicted')), default=0):.1%}",
        wide=WIDE, seq=WIDE_SEQ, error=f"{max((row['error'] for row in wide_ones), default=0):.1%}",
        widths=", ".join(row["words"] for row in wide_ones),
        generating=", ".join(f"{family} ({axes})" for family, axes in generating),
    )  # fmt: skip
    return head + "\n".join(lines) + "\n"


def _error(row: Mapping[str, Any]) -> str:
    if not row:
        return ""
    return f"{max(row['verify'], row['steps']):.0e}" if row["ok"] else f"fails: {row['why']}"


def main(results: Path) -> None:
    cases = tomllib.loads((PAGE.parents[1] / "tests/runtime/cases.toml").read_text())["test_model_classes"]
    measure(results, cases["FAMILIES"], cases["WIDE"])
    PAGE.write_text(page(_rows(results), cases["GENERATING"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
