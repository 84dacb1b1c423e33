"""One layout of an engine on its ranks: three steps, compared with the plain model.

Every rank trains the plain model itself, so that only verdicts and the first wrong tensors travel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.certify.adapter import OPTIMIZER, Adapter, EngineRun
from shardwise.certify.kinds import Evidence, guess
from shardwise.certify.reference import SEED, Reference, StepTrace, Tensors, share_of
from shardwise.certify.result import PROPERTIES, Cell
from shardwise.certify.tiny import STEPS
from shardwise.codec import Json
from shardwise.errors import UserError

Meet = Callable[[str], list[str]]
"""Tell all ranks a text; theirs, in order."""
_NAMES = [*PROPERTIES]
_INDEX = {name: place for place, name in enumerate(_NAMES)}
_TRACES = {"loss": "losses", "norm": "norms", "steps": "parameters"}
AFTER_LOAD = "gradients after the load"
_OTHER = "the start of the layout that loads"
CHAIN = ("gradients", "norm", "clipped", "steps")
"""Each follows from the one before: what is wrong in one is wrong in the others."""


@dataclass(frozen=True)
class Case(Json):
    """What one job of the ranks compares."""

    layout: str
    model: str
    variant: str
    other: str
    """Layout under which the checkpoint is loaded."""


@dataclass
class Observed:
    """What a rank saw."""

    trace: StepTrace = field(default_factory=StepTrace)
    loaded: Tensors = field(default_factory=dict)
    """Parameters after the load, the gradients of the next step, and parameters after it."""
    after: Tensors = field(default_factory=dict)
    resumed: Tensors = field(default_factory=dict)
    data: tuple[int, int] = (0, 1)
    stopped: dict[str, Cell] = field(default_factory=dict)
    """Property -> its cell, where an error came first."""


@dataclass(frozen=True, order=True)
class Wrong:
    """A difference on a rank. Ordered by step, then property, then parameter, then the largest error."""

    step: int
    property: int
    order: int
    error: float
    """Negative."""
    name: str


def compare_case(adapter: Adapter, reference: Reference, case: Case, folder: Path, meet: Meet) -> dict[str, Cell]:
    """Property -> cell, the same on all ranks. folder: for the checkpoint, the same on all ranks. Raises
    `RuntimeError` when ranks fail in different ways, after which they cannot continue together."""
    layout = adapter.parse(case.layout)
    observed = _observe(adapter, reference, case, folder, meet)
    differences, largest = _differences(adapter, reference, observed)
    held = {name for parameters in observed.trace.parameters[:1] for name in parameters}
    gathered = _gathered((differences, largest, held))
    wrong = sorted(item for one, _, _ in gathered for item in one)
    if observed.trace.parameters:
        anywhere = set().union(*(names for _, _, names in gathered))
        lost = [name for name in reference.names if name not in anywhere]
        wrong = [Wrong(0, _INDEX["gradients"], reference.names.index(name), -1.0, name) for name in lost] + wrong
    errors = {name: max(most.get(name, -1.0) for _, most, _ in gathered) for name in PROPERTIES}
    return _cells(adapter, reference, layout, observed, wrong, errors)


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _cells(
    adapter: Adapter, reference: Reference, layout: dict[str, Any], observed: Observed, wrong: list[Wrong],
    errors: dict[str, float],
) -> dict[str, Cell]:  # fmt: skip
    """errors: property -> largest error of any rank, negative where it was not compared."""
    cells = {
        name: Cell("not run", note="the engine does not show it") if error < 0
        else Cell("proven", error, reference.bounds[name])
        for name, error in errors.items()
    }  # fmt: skip
    cells |= observed.stopped
    chain = next((item for item in wrong if _NAMES[item.property] in CHAIN), None)
    loss = next((item for item in wrong if _NAMES[item.property] == "loss"), None)
    resume = next((item for item in wrong if _NAMES[item.property] == "resume"), None)
    if chain is not None:
        first = _NAMES[chain.property]
        for name in (*CHAIN[CHAIN.index(first) :], "resume"):
            cells[name] = Cell("not run", note=f"follows from {first}, which are wrong")
        if loss is not None and loss.step > chain.step:
            loss, cells["loss"] = None, Cell("proven", note=f"before step {chain.step + 1}")
    if chain is None and resume is not None and not resume.name:
        cells["resume"] = Cell("wrong", -resume.error, reference.bounds["gradients"], "", STEPS, AFTER_LOAD, "resume")
        resume = None
    for item in (loss, chain, resume if chain is None else None):
        if item is None:
            continue
        name = _NAMES[item.property]
        parts = _gathered(_seen(observed, name, item))
        evidence = Evidence(adapter, reference, layout, name, item.step, item.name, parts)
        cells[name] = Cell(
            "wrong", abs(item.error), reference.bounds[name], item.name, item.step + 1, guess(evidence), name
        )
    return cells


def _seen(observed: Observed, name: str, wrong: Wrong) -> Any:
    """What this rank has of the first wrong thing; None for nothing."""
    if name == "resume":
        return observed.resumed if wrong.step == STEPS - 1 else observed.loaded
    return getattr(observed.trace, _TRACES.get(name, name))[wrong.step]


def _start(adapter: Adapter, reference: Reference, layout: str, seed: int) -> EngineRun:
    """A trainer that starts with the reference's weights, or with others where the engine sets them (`broadcasts`, and
    before a checkpoint is loaded)."""
    parsed, rank = adapter.parse(layout), dist.get_rank()
    model = reference.module().train()
    if seed != SEED:
        torch.manual_seed(seed)
        changed = [p for p in model.parameters() if adapter.saves_frozen or p.requires_grad]
        for tensor in (*changed, *(b for b in model.buffers() if adapter.broadcasts)):
            tensor.data.add_(torch.randn_like(tensor) if tensor.is_floating_point() else 0)
    run = EngineRun(model, parsed, adapter.data_place(parsed, rank), adapter.logits, reference.most)
    run.engine = adapter.parallelize(model, parsed)
    run.model = run.engine if adapter.rebuilds else model
    run.optimizer = adapter.optimizer(run, **OPTIMIZER)
    return run


def _step(adapter: Adapter, reference: Reference, run: EngineRun, step: int, trace: StepTrace) -> None:
    ids, labels = reference.rows(step, reference.share(*run.data), adapter.masks(run.layout, dist.get_rank())[2])
    loss = adapter.backward(run, ids, labels, reference.tokens[step])
    trace.losses.append(None if loss is None else _number(loss, "backward"))
    trace.gradients.append(_tensors(adapter.gradients(run), "gradients", reference))
    trace.norms.append(_number(adapter.clip(run, reference.most), "clip"))
    trace.clipped.append(
        _tensors(adapter.gradients(run), "gradients", reference) if "clipped" not in adapter.skips else {}
    )
    adapter.step(run)
    trace.parameters.append(_tensors(adapter.parameters(run), "parameters", reference))


def _number(value: Any, function: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{function} returned {str(value)[:40]}, and must return a number") from None


def _tensors(values: Any, function: str, reference: Reference) -> Tensors:
    if not isinstance(values, dict) or not all(isinstance(item, torch.Tensor) for item in values.values()):
        raise UserError(f"{function} returned {str(values)[:40]}, and must return a dict of name -> whole tensor")
    if values and not any(name in reference.start for name in values):
        raise UserError(f"{function} has names that the model has not, such as {next(iter(values))}")
    return values


def _observe(adapter: Adapter, reference: Reference, case: Case, folder: Path, meet: Meet) -> Observed:
    observed, trace, runs = Observed(), StepTrace(), []
    observed.trace = trace

    def start() -> None:
        seed = SEED + dist.get_rank() if adapter.broadcasts else SEED
        runs.append(_start(adapter, reference, case.layout, seed))
        observed.data = runs[0].data

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            _step(adapter, reference, runs[0], step, trace)

    def resume() -> None:
        adapter.load(runs[1], str(folder))
        observed.loaded, again = adapter.parameters(runs[1]), StepTrace()
        _step(adapter, reference, runs[1], STEPS - 1, again)
        observed.resumed, observed.after = again.parameters[0], again.gradients[0]

    every, train = list(PROPERTIES), [*PROPERTIES][:-1]
    stages: list[tuple[str, list[str], Callable[[], object]]] = [
        ("the start", every, start),
        ("a step", every, lambda: steps(0, STEPS - 1)),
        ("save", ["resume"], lambda: adapter.save(runs[0], str(folder))),
        ("a step after save", train, lambda: steps(STEPS - 1, STEPS)),
        (_OTHER, ["resume"], lambda: runs.append(_start(adapter, reference, case.other, SEED + 100))),
        (f"load under {case.other}", ["resume"], resume),
    ]
    for place, stops, stage in stages:
        if set(stops) <= observed.stopped.keys() or (stops == ["resume"] and "resume" in adapter.skips):
            continue
        if cell := _failed(place, stage, meet):
            observed.stopped |= dict.fromkeys(stops, cell)
            if len(stops) > 1:
                break
    return observed


def _failed(place: str, stage: Callable[[], object], meet: Meet) -> Cell | None:
    """The cell of a stage that fails on all ranks; None where it does not. Raises where ranks differ."""
    words = ""
    try:
        stage()
    except UserError as error:
        words = str(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        lines = str(error).strip().splitlines() or [""]
        # Of an error with the tracebacks of all ranks, the last one's.
        last = max((i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception):", line)), default=0)
        text = re.sub(r"/\S*/site-packages/", "", " ".join(" ".join(lines[last:]).split()))
        words = f"{type(error).__name__}: {text[:300]}"
    answers = meet(words)
    if not all(answers):
        if words := next(filter(None, answers), ""):
            raise RuntimeError(f"in {place}: {words}")
        return None
    if place == _OTHER:
        return Cell("not run", note=f"the layout that loads: {words}")
    return Cell("refused", note=words) if place == "the start" else Cell("failed", note=f"in {place}: {words}")


def _differences(adapter: Adapter, reference: Reference, observed: Observed) -> tuple[list[Wrong], dict[str, float]]:
    """(differences of this rank, property -> its largest error)."""
    mine, right, bounds = observed.trace, reference.trace, reference.bounds
    wrong: list[Wrong] = []
    largest: dict[str, float] = {}

    def note(name: str, step: int, parameter: str, error: float) -> None:
        largest[name] = max(largest.get(name, 0.0), error)
        if not error <= bounds[name]:
            order = reference.names.index(parameter) if parameter else 0
            wrong.append(Wrong(step, _INDEX[name], order, -error, parameter))

    for step, held in enumerate(mine.parameters):
        loss = mine.losses[step]
        if loss is not None:
            share = slice(None) if adapter.global_loss else reference.share(*observed.data)
            note("loss", step, "", share_of(loss, reference.of_rows(step, share)[0]))
        for name in {"gradients", "clipped"} - {*adapter.skips}:
            expected = {parameter: t for parameter, t in getattr(right, name)[step].items() if parameter in held}
            note(name, step, *reference.errors(getattr(mine, name)[step], expected, bounds[name]))
        if "norm" not in adapter.skips:
            note("norm", step, "", share_of(mine.norms[step], right.norms[step]))
        note("steps", step, *reference.moved(step, held, bounds["steps"]))
    if observed.resumed:
        note("resume", STEPS - 2, *reference.moved(STEPS - 2, observed.loaded, bounds["resume"]))
        whole = {name: tensor for name, tensor in right.gradients[-1].items() if name in observed.resumed}
        first, error = reference.errors(observed.after, whole, bounds["gradients"])
        if first and not any(item.property == _INDEX["resume"] for item in wrong):
            # Of what is no parameter, or of the layout that loads.
            wrong.append(Wrong(STEPS - 1, _INDEX["resume"], -1, -error, ""))
        note("resume", STEPS - 1, *reference.moved(STEPS - 1, observed.resumed, bounds["resume"]))
    return wrong, largest
