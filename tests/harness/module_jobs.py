"""What ranks run for the tests of a user's own module, and the same training on one device in plain PyTorch."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.compile_jobs import default_backend
from harness.jobs import _errors
from harness.own_modules import (
    ATTENDING,
    COMPILED,
    OWN,
    PARTS,
    PLANS,
    AttentionModel,
    Conditioned,
    GroupedModel,
    llama,
    logits_of,
    mixtral,
    own_batch,
    summed_loss,
    token_example,
)
from harness.pool import run_ranks
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.axes import DP, REPLICA, Axes
from shardwise.layout.context import cuts_sequences
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import Bytes, LedgerRow, StepReport
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.comparison import RankDifference, compare_split, first_difference
from shardwise.runtime.module.initial import MetaValues
from shardwise.runtime.module.split import SplitModule, split
from shardwise.runtime.module.verify import TOLERANCE, Verification, VerifyRequest
from shardwise.runtime.transport.comms import Comms

ROWS, STEPS, LR = 8, 3, 1e-2
MODULES = OWN | ATTENDING | COMPILED | {"grouped": GroupedModel}
SETTINGS = OptimizerConfig(clip=0.5)


@dataclass(frozen=True)
class OwnTraining:
    """Training of one of the tests' own modules. accumulate: micro-batches per step."""

    name: str
    layout: str
    accumulate: int = 1
    save: str = ""
    """Folder for a checkpoint after the first step."""
    load: str = ""
    """Checkpoint to start from, after its steps."""
    transport: str = "auto"


@dataclass
class OwnOutcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    """Parameter -> squared distance of its final values to one device's, over the rank's interval."""
    ledger: tuple[LedgerRow, ...] = ()
    report: StepReport | None = None
    evaluation: float = 0.0
    """Largest error of the trained module's outputs for rows of the rank's own."""
    optimizer: int = 0
    """Elements of master weights on the rank."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    matrices, others = [], []
    for p in parameters:
        (matrices if p.dim() > 1 else others).append(p)
    groups = [{"params": matrices, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], LR, SETTINGS.betas, SETTINGS.eps)


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, outcome: OwnOutcome) -> None:
    """A step of plain PyTorch, which is added to the outcome."""
    loss, count = summed_loss(module, batch)
    optimizer.zero_grad()
    (loss / count).backward()
    trained = [p for p in module.parameters() if p.requires_grad]
    outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, SETTINGS.clip)))
    optimizer.step()
    outcome.losses.append(float(loss.detach() / count))
    outcome.tokens.append(int(count))


def one_device(module: nn.Module, name: str) -> tuple[OwnOutcome, dict[str, Tensor]]:
    """(the steps of a module in float64, final parameters)."""
    optimizer, outcome = adamw(p for p in module.parameters() if p.requires_grad), OwnOutcome()
    for step in range(STEPS):
        plain_step(module, optimizer, own_batch(name, ROWS, step), outcome)
    return outcome, {name: p.detach() for name, p in module.named_parameters()}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


def rows_of(comms: Comms, name: str, step: int, accumulate: int = 1, axes: Axes = DP) -> list[tuple[Tensor, ...]]:
    """This rank's micro-batches of a step. axes: over which the rows are cut."""
    rows = [part.chunk(comms.size(axes))[comms.index(axes)] for part in own_batch(name, ROWS, step)]
    return list(zip(*(part.chunk(accumulate) for part in rows), strict=True))


def distances(module: SplitModule, reference: dict[str, Tensor]) -> dict[str, float]:
    """Parameter -> squared distance of its master weights to a reference, over this rank's interval."""
    errors: dict[str, float] = {}
    for state in module.program.optimizer.states:
        errors |= _errors(state.flat, state.master, reference)
    return errors


def end(module: SplitModule) -> None:
    """Close a module's program, when all ranks are done with it."""
    dist.barrier()
    module.close()
    module.program.comms.close()


def own_split(job: OwnTraining) -> SplitModule:
    torch.manual_seed(0)
    layout = Layout.parse(f"{job.layout},precision=fp64")
    plan = PLANS.get(job.name) if layout.tp > 1 or layout.ep > 1 else None
    return split(
        MODULES[job.name](), layout, plan, own_batch(job.name, 2, 0)[0] if cuts_sequences(layout) else None,
        parts=PARTS.get(job.name), accumulate=job.accumulate, optimizer=SETTINGS, transport=job.transport,
    )  # fmt: skip


def train_own(rank: int, payload: tuple[OwnTraining, dict[str, Tensor]]) -> OwnOutcome:
    """Train as `one_device` does. The last step is measured."""
    job, reference = payload
    module = own_split(job)
    first = module.load(Path(job.load)) if job.load else 0
    outcome, comms = OwnOutcome(), module.program.comms
    for step in range(first, STEPS):
        micro, last = rows_of(comms, job.name, step, job.accumulate), step == STEPS - 1
        loss, norm, tokens = module.train_step(summed_loss, micro, lr=LR, measure=last)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
        outcome.tokens.append(tokens)
        if job.save and step == 0:
            module.save(Path(job.save))
            return outcome
    outcome.errors = distances(module, reference)
    outcome.ledger, outcome.report = comms.ledger(), module.report()
    plain = MODULES[job.name]().double()
    plain.load_state_dict(reference, strict=False)
    inputs = own_batch(job.name, 2, comms.index(DP))[0]
    with torch.no_grad():
        logits, expected = logits_of(module(inputs)), module.program.of_rows(logits_of(plain(inputs)))
    # Only the last stage of a pipeline has them.
    outcome.evaluation = float((logits - expected).abs().max()) if logits is not None else 0.0
    end(module)
    return outcome


def train_compiled(rank: int, payload: tuple[OwnTraining, dict[str, Tensor]]) -> tuple[OwnOutcome, int]:
    """As `train_own`, by a compiler that generates no code, and how many graphs it has had."""
    torch.compiler.reset()
    compile_graph, graphs = torch._dynamo.lookup_backend("aot_eager"), 0

    def counted(*graph: Any, **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return compile_graph(*graph, **options)

    with default_backend(counted):
        outcome = train_own(rank, payload)
    return outcome, graphs


def refused_cut(rank: int, kind: str) -> str:
    """What is said of a loss, a batch or a split that cannot have its sequences cut."""
    ids, targets = own_batch("attends", 2, 0)

    def shifted(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        logits = model(batch[0])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum"), logits.shape[1]

    losses: dict[str, Any] = {
        "shifted": shifted, "labels": lambda model, batch: model(batch[0], labels=batch[1]),
        "mean": lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    }  # fmt: skip
    try:
        example = {"no example": None, "longer": ids[:, :4]}.get(kind, ids)
        module = split(MODULES["attends"](), "cp=2", example=example)
        end = 7 if kind == "odd" else None
        module.train_step(losses.get(kind, summed_loss), (ids[:, :end], targets[:, :end]))
    except UserError as error:
        return str(error)
    return ""


class Styled(AttentionModel):
    """With numbers of a row before its tokens."""

    def forward(self, style: Tensor, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(ids, position_ids) * style.mean(1)[:, None, None]


def styled_loss(rank: int, layout: str) -> float:
    """The loss of a first step. On one device where there is no layout."""
    torch.manual_seed(0)
    batch = torch.rand(2, 4, dtype=torch.float64), *own_batch("attends", 2, 0)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
        logits, targets = model(*batch[:2]).flatten(0, 1), batch[2].flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), len(targets)

    module = Styled()
    if layout:
        return split(module, f"{layout},precision=fp64", example=batch[:2]).train_step(loss, batch).loss
    total, count = loss(module.double(), batch)
    return float(total.detach() / count)


EVERY = 2
"""Steps of a round of replicas that train apart."""


@dataclass
class LocalOutcome:
    replica: int
    losses: list[float]
    errors: dict[str, float]
    saved: list[str]
    """What each attempt to save has said; empty where it has saved."""


def replicas_alone(name: str, replicas: int, steps: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """(losses of each replica, weights after the last round), of replicas that agree on the mean of their weights."""
    modules = [made(name) for _ in range(replicas)]
    optimizers = [adamw(module.parameters()) for module in modules]
    outcomes = [OwnOutcome() for _ in modules]
    for step in range(steps):
        for number, own in enumerate(zip(modules, optimizers, strict=True)):
            rows = tuple(x.chunk(replicas)[number] for x in own_batch(name, ROWS, step))
            plain_step(*own, rows, outcomes[number])
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for parts in zip(*(module.parameters() for module in modules), strict=True):
                    mean = torch.stack([p.detach() for p in parts]).mean(0)
                    for p in parts:
                        p.copy_(mean)
    return [each.losses for each in outcomes], {name: p.detach() for name, p in modules[0].named_parameters()}


def train_local(rank: int, payload: tuple[OwnTraining, dict[str, Tensor], int]) -> LocalOutcome:
    """Train for so many steps as `replicas_alone` does; `save` is tried after each of them, or `load` precedes them."""
    job, reference, steps = payload
    module = own_split(job)
    comms, losses, saved = module.program.comms, [], []
    for step in range(module.load(Path(job.load)) if job.load else 0, steps):
        micro = rows_of(comms, job.name, step, job.accumulate, REPLICA + DP)
        losses.append(module.train_step(summed_loss, micro, lr=LR).loss)
        if job.save:
            try:
                module.save(Path(job.save))
                saved.append("")
            except UserError as error:
                saved.append(str(error))
    errors = distances(module, reference)
    end(module)
    return LocalOutcome(comms.index(REPLICA), losses, errors, saved)


@dataclass
class OffloadOutcome:
    """What a rank has trained, and what it has measured of what is off the device."""

    losses: list[float]
    norms: list[float]
    state: dict[str, str]
    """Unit -> digest of its master weights and moments."""
    copies: dict[tuple[str, ...], int]
    """(phase, operation, axes, unit, dtype, elements) -> count, of the last step."""
    bytes: Bytes
    host: Bytes
    disk: Bytes
    plan: UnitPlan


def train_offloaded(rank: int, payload: tuple[OwnTraining, str, str]) -> OffloadOutcome:
    """Train on this rank's rows, with a file in a folder, and lora. The last step is measured."""
    job, folder, lora = payload
    torch.manual_seed(0)
    layout = Layout.parse(f"{job.layout},precision=fp64")
    module = split(
        OWN[job.name](), layout, PLANS[job.name] if layout.tp > 1 or layout.ep > 1 else None, parts=PARTS.get(job.name),
        accumulate=job.accumulate, optimizer=SETTINGS, lora=lora or None, offload_dir=folder,
    )  # fmt: skip
    program, steps = module.program, []
    for step in range(STEPS):
        micro = rows_of(program.comms, job.name, step, job.accumulate)
        steps.append(module.train_step(summed_loss, micro, lr=LR, measure=step == STEPS - 1))
    state = {}
    for unit in program.optimizer.states:
        every = torch.stack([unit.get(kind, 0, unit.flat.stop - unit.flat.start) for kind in range(3)])
        state[unit.flat.unit.name] = hashlib.sha1(every.numpy().tobytes()).hexdigest()
    role = next(role for role in module.report().roles if rank in role.ranks)
    copies = {
        (r.phase, r.op, r.axes, r.unit, r.dtype, r.elements): r.count
        for r in program.comms.ledger()
        if r.axes in ("host", "disk")
    }
    end(module)
    return OffloadOutcome(
        [s.loss for s in steps], [s.grad_norm for s in steps], state, copies, role.bytes, role.host, role.disk,
        program.plan,
    )  # fmt: skip


def from_meta(rank: int, layout: str) -> tuple[float, float]:
    """(squared distance of a Llama's initial weights to what its classes give, largest one of its logits)."""
    with torch.device("meta"):
        blank = llama()
    values, module = MetaValues(blank), split(blank, f"{layout},precision=fp32")
    whole = {}
    for p in module.blueprint.parameters():
        owner, _, leaf = p.name.rpartition(".")
        whole[p.name] = values.made(owner).get_parameter(leaf).detach()
    states = module.program.optimizer.states
    errors = [error for state in states for error in _errors(state.flat, state.master, whole).values()]
    plain = llama()
    plain.load_state_dict(whole)
    example = token_example()
    out = module(**example)
    if out is None:  # only the last stage of a pipeline has them
        return sum(errors), 0.0
    with torch.no_grad():
        difference = out.logits - plain(**example).logits
    return sum(errors), float(difference.abs().max())


def mixed(rank: int, payload: tuple[str, str]) -> tuple[list[float], set[str], set[str]]:
    """(losses, dtypes of parameters, dtypes of optimizer state) in bf16."""
    name, layout = payload
    torch.manual_seed(0)
    plan = PLANS[name] if "tp" in layout or "ep" in layout else None
    module = split(OWN[name](), layout, plan, parts=PARTS.get(name), optimizer=SETTINGS)
    comms, losses = module.program.comms, []
    for step in range(STEPS):
        losses.append(module.train_step(summed_loss, rows_of(comms, name, step), lr=LR).loss)
    dtypes = {str(p.dtype) for p in module.parameters() if not p.is_meta}
    return losses, dtypes, {str(state.master.dtype) for state in module.program.optimizer.states}


def implemented(rank: int, name: str) -> tuple[float, float, float]:
    """(largest error of Mixtral's logits over two ranks' experts in fp32, gradient norm, one device's), with one of
    `transformers`' implementations of experts."""

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
        logits = model(input_ids=ids, use_cache=False).logits
        return logits.square().sum(), logits[..., 0].numel()

    ids = token_example()["input_ids"]
    torch.manual_seed(0)
    plain = mixtral(experts_implementation="eager")
    total, count = loss(plain, ids)
    (total / count).backward()
    torch.manual_seed(0)
    module = split(mixtral(experts_implementation=name), "dp=2,ep=2,precision=fp32")
    mine = ids.chunk(2)[rank]
    with torch.no_grad():
        error = (module(input_ids=mine, use_cache=False).logits - plain(input_ids=mine).logits).abs().max()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    return float(error), module.train_step(loss, mine).grad_norm, float(norm)


def buffers_of(rank: int, payload: tuple[str, str, str]) -> dict[str, Tensor]:
    """Persistent buffers of the plain module: those of a checkpoint, or, where that is empty, new ones, saved there."""
    layout, folder, checkpoint = payload
    module = own_split(OwnTraining("plain", layout, accumulate=2))
    if checkpoint:
        module.load(Path(checkpoint))
    else:
        stages = module.program.stages
        for number, (name, buffer) in enumerate(module.module.named_buffers()):
            # What a rank does not compute with is not the whole model's.
            here = stages is None or stages.chain.home(name) in module.program.plan.parts
            buffer.fill_(number + 1 if here else -1)
        module.save(Path(folder))
    return {name: buffer.clone() for name, buffer in module.module.named_buffers()}


def passes(rank: int, layout: str) -> list[float]:
    module = own_split(OwnTraining("plain", layout, accumulate=2))
    rows = own_batch("plain", 4, 0)
    module.train_step(summed_loss, list(zip(*(part.chunk(2) for part in rows), strict=True)))
    parts = module.program.plan.parts
    return [float(b) for name, b in module.module.named_buffers() if name.endswith("runs") and name[:8] in parts]


def compare(rank: int, request: VerifyRequest) -> RankDifference:
    return compare_split(request)


def conditioned(rank: int, layout: str) -> str:
    """What is said of blocks that take a result of the first stage's."""
    module = split(Conditioned(), f"{layout},precision=fp32", parts=PARTS["plain"], accumulate=2)
    with pytest.raises(UserError) as caught:
        module.train_step(summed_loss, [own_batch("plain", 4, 0)] * 2)
    return str(caught.value)


def outside(rank: int, layout: str) -> str:
    """What is said of a map of the root, and of a block, that are called where no weights are gathered."""
    module, x = own_split(OwnTraining("plain", layout)), own_batch("plain", 2, 0)[0]
    said = set()
    for use in (module.enter, module.blocks[1]):
        with pytest.raises(UserError) as caught:
            use(x)
        said.add(str(caught.value))
    return said.pop() if len(said) == 1 else str(said)


def verdict(
    model: Any, layout: str, example: Any, plan: Any = None, parts: Any = None, tolerance: float = TOLERANCE
) -> Verification:
    at = Layout.parse(f"{layout},precision=fp64")
    request = VerifyRequest(model, at, example, plan and dict(plan), None, tolerance, parts)
    return first_difference(run_ranks("harness.module_jobs:compare", at.ranks, request))


@cache
def reference(name: str) -> tuple[OwnOutcome, dict[str, Tensor]]:
    return one_device(made(name), name)


def trained(job: OwnTraining) -> list[OwnOutcome]:
    _, final = reference(job.name)
    outcomes = run_ranks("harness.module_jobs:train_own", Layout.parse(job.layout).ranks, (job, final))
    assert_as_one_device(job.name, outcomes)
    return outcomes


def assert_as_one_device(name: str, outcomes: list[OwnOutcome], tolerance: float = 1e-9) -> None:
    expected, final = reference(name)
    for outcome in outcomes:
        steps = len(outcome.losses)
        assert outcome.tokens == expected.tokens[-steps:]
        assert outcome.losses == pytest.approx(expected.losses[-steps:], rel=tolerance)
        assert outcome.evaluation < tolerance
        assert outcome.norms == pytest.approx(expected.norms[-steps:], rel=tolerance)
    assert_weights([outcome.errors for outcome in outcomes], final, tolerance)


def assert_weights(errors: list[dict[str, float]], final: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    """errors: of each rank, parameter -> squared distance over its interval."""
    for name, whole in final.items():
        error = math.sqrt(sum(of_rank.get(name, 0.0) for of_rank in errors))
        assert error <= tolerance * float(whole.norm()), name
    assert {name for of_rank in errors for name in of_rank} == set(final)
