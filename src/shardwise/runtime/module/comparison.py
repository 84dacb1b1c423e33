"""Comparison of a split module with the module on one device, on one rank: outputs of submodules, then gradients.

Every rank runs the whole module on the whole example itself, so that only verdicts travel.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwise.errors import UserError
from shardwise.layout.axes import CP, DP, TP
from shardwise.layout.modules import fewest_micro_batches
from shardwise.runtime.module.describe import call
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.initial import is_meta, values_of
from shardwise.runtime.module.inputs import in_dtype, row_count, tensors_in
from shardwise.runtime.module.program import ModuleProgram
from shardwise.runtime.module.split import split
from shardwise.runtime.module.verify import Verification, VerifyRequest
from shardwise.runtime.zero.flat_unit import local_values

SEED = 0
NEGLIGIBLE = 1e-6
"""A gradient's error counts as a share of its own norm, or of so much of the norm of all gradients: some gradients are
zero but for rounding."""
ROUNDING = 8
"""Roundings of an output's own precision, where that is below float64, such as a loss that is computed in float32."""


@dataclass
class RankDifference:
    """What one rank found. order: place of the module in the forward pass, then of the parameter among all."""

    result: Verification
    order: tuple[int, int]


class _Outputs:
    """The outputs of every submodule, in the order in which they come; `running`: the modules that are computing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: dict[tuple[str, int], list[Tensor]] = {}
        """(module, number of its run) -> its floating-point outputs."""
        self.running: list[str] = []
        self.on = True
        self.computes: Callable[[str], bool] = lambda name: True
        """Whether a module's output is that of the whole model now."""
        self._runs: dict[str, int] = {}
        for name, child in module.named_modules():
            child.register_forward_pre_hook(lambda child, args, name=name: self.running.append(name))
            child.register_forward_hook(lambda child, args, out, name=name: self._keep(name, out))

    def restart(self) -> None:
        """Forget what has come."""
        self.on = True
        for kept in (self.found, self.running, self._runs):
            kept.clear()

    def _keep(self, name: str, out: Any) -> None:
        while self.running and self.running.pop() != name:
            pass  # a stage of a pipeline leaves the forward passes around its last block
        if self.on and self.computes(name):
            number = self._runs[name] = self._runs.get(name, -1) + 1
            self.found[name, number] = [tensor.detach().clone() for tensor in _floating(out)]


class _Place:
    """This rank's rows of a batch, and its part of what tensor-parallel ranks share."""

    def __init__(self, program: ModuleProgram, rows: int) -> None:
        self.whole, comms = rows, program.comms
        self.dp, self.tp = (comms.size(DP), comms.index(DP)), (comms.size(TP), comms.index(TP))
        self.cut, self.pieces = program.rows, comms.size(CP)
        self.counts = not comms.index(DP + CP)
        """Whether it counts the tokens of the loss, which is a sum over all ranks."""

    def has_rows(self, x: Any) -> bool:
        """Whether it is a tensor over the whole batch."""
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self.whole

    def rows_of(self, x: Any) -> Any:
        """This rank's rows of a tensor over the whole batch; anything else as it is."""
        count, at = self.dp
        return x.chunk(count)[at] if self.has_rows(x) else x

    def tokens_of(self, x: Tensor, shape: torch.Size) -> Tensor:
        """This rank's tokens of a tensor of whole sequences that has this shape here, but for the shards under sp; any
        other as it is."""
        if self.cut is None or x.dim() < 2 or len(shape) < 2 or x.shape[1] not in self._lengths(shape[1]):
            return x
        return x[:, self.cut.places(x.shape[1])]

    def _lengths(self, here: int) -> tuple[int, int]:
        return here * self.pieces, here * self.pieces * self.tp[0]

    def factors(self, number: int, x: Tensor) -> Tensor:
        """What an output here is multiplied with: its part of what that of the whole batch is."""
        tokens = [x.shape[1] * self.pieces] if x.dim() > 1 else []
        return self.tokens_of(_factors(number, self.whole, (*tokens, *x.shape[2:])), x.shape)

    def like(self, expected: Tensor, shape: torch.Size) -> Tensor | None:
        """The part of a whole tensor that has this shape here; None where there is none."""
        own = self.tokens_of(self.rows_of(expected), shape)
        if own.shape != shape and own.dim() and own.shape[-1] == self.tp[0] * shape[-1]:
            own = own.chunk(self.tp[0], -1)[self.tp[1]]
        if own.shape != shape and own.dim() > 2 and own.shape[1] == self.tp[0] * shape[1]:  # sequences under sp
            own = own.chunk(self.tp[0], 1)[self.tp[1]]
        return own if own.shape == shape else None


def compare_split(request: VerifyRequest) -> RankDifference:
    """Compare on this rank. Raises `UserError` for an example or a module that cannot be split."""
    torch.manual_seed(SEED)
    example = in_dtype(request.example() if callable(request.example) else request.example, torch.float64)
    module = (request.model if isinstance(request.model, nn.Module) else request.model()).eval()
    if is_meta(module):
        raise UserError("the module is on the meta device and has no values to compare: give a function that builds it")
    use_exact_products(module)
    micro_batches = fewest_micro_batches(request.layout)
    rows = _rows(example, request.layout.dp, micro_batches)
    plain = _OneDevice(copy.deepcopy(module).double(), example, rows, request.layout.dp * micro_batches)
    program = split(
        module, request.layout, request.plan, example, blocks=request.blocks, parts=request.parts,
        accumulate=micro_batches,
    ).program  # fmt: skip
    place, outputs = _Place(program, rows), _Outputs(module)
    plain.run_alone(place.dp[1] * micro_batches)
    failure = _split_pass(program, outputs, example, place)
    result, order = _compare_outputs(outputs, plain, place, request.tolerance)
    if result and failure:
        result = replace(result, module=_name(outputs.running[-1] if outputs.running else "", module), reason=failure)
    if not result:
        return RankDifference(result, (order, 0))
    return _compare_gradients(program, plain.gradients, result, request.tolerance)


def first_difference(differences: Sequence[RankDifference]) -> Verification:
    """The verdict over all ranks: the first difference of any, or that there is none."""
    first = min(differences, key=lambda each: (bool(each.result), each.order)).result
    return replace(first, error=max(each.result.error for each in differences))


def _floating(tree: Any) -> list[Tensor]:
    return [x for x in tensors_in(tree) if x.is_floating_point()]


def _rows(example: Any, dp: int, micro_batches: int) -> int:
    if (rows := row_count(example)) % (dp * micro_batches):
        over = f"dp = {dp}" + (f" and {micro_batches} micro-batches" if micro_batches > 1 else "")
        raise UserError(
            f"the example's {rows} rows cannot be divided among {over}: give a multiple of {dp * micro_batches}"
        )
    return rows


def _name(name: str, module: nn.Module) -> str:
    return name or type(module).__name__


def _factors(number: int, rows: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def _loss(out: Any, rows: int, factors: Callable[[int, Tensor], Tensor]) -> Tensor:
    """A random linear function of every output that has so many rows. factors: (number of the output, output) -> what
    it is multiplied with. Where no output has rows, the sum of the scalar ones."""
    total = torch.zeros((), dtype=torch.float64)
    used = _with_rows(out, rows)
    for number, x in enumerate(used):
        total = total + (x.double() * factors(number, x)).sum()
    if not used:
        scalars = [x for x in _floating(out) if x.requires_grad and not x.dim()]
        if not scalars:
            raise UserError(
                "no output that depends on the parameters is a scalar or has the example's rows, so there is no "
                "gradient"
            )
        for x in scalars:
            total = total + x.double()
    return total


def _with_rows(out: Any, rows: int) -> list[Tensor]:
    return [x for x in _floating(out) if x.requires_grad and x.dim() and x.shape[0] == rows]


class _OneDevice:
    """The whole module on one device: outputs of all submodules, and the gradient of every parameter. chunks: parts of
    the rows that the ranks compute one by one."""

    def __init__(self, module: nn.Module, example: Any, rows: int, chunks: int) -> None:
        self._module, self._example, self._rows, self._chunks = module, example, rows, chunks
        self._outputs = _Outputs(module)
        out = call(module, example)
        self.whole = dict(self._outputs.found)
        """Outputs for the whole batch."""
        self.alone = self.whole
        """Outputs for the rows of one chunk. A loss, and any other output over all rows of a pass, is compared with
        these: a rank's mean is over the tokens of its own rows, however many the others have."""
        self._outputs.on = False

        def loss(out: Any, count: int) -> Tensor:
            return _loss(out, count, lambda number, x: _factors(number, rows, x.shape[1:]))

        if _with_rows(out, rows):
            loss(out, rows).backward()
        else:
            for number in range(chunks):
                loss(call(module, self._chunk(number)), rows // chunks).backward()
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in module.named_parameters()
        }  # fmt: skip

    def _chunk(self, number: int) -> Any:
        def rows_of(x: Any) -> Any:
            over_rows = isinstance(x, Tensor) and x.dim() and x.shape[0] == self._rows
            return x.chunk(self._chunks)[number] if over_rows else x

        return _pytree.tree_map(rows_of, self._example)

    @torch.no_grad()
    def run_alone(self, number: int) -> None:
        """Compute the outputs for one chunk."""
        if self._chunks > 1:
            self._outputs.restart()
            call(self._module, self._chunk(number))
            self.alone = self._outputs.found


def _split_pass(program: ModuleProgram, outputs: _Outputs, example: Any, place: _Place) -> str:
    """Forward and backward of the split module; what failed in it, empty where nothing did."""
    count = program.plan.micro_batches
    local = place.whole // (place.dp[0] * count)

    def rows_of(number: int, x: Any) -> Any:
        return place.rows_of(x).chunk(count)[number] if place.has_rows(x) else x

    def loss(run: Callable[..., Any], batch: tuple[int, Any]) -> tuple[Tensor, int]:
        number, rows = batch
        out = call(run, rows)
        outputs.on = False
        total = _loss(out, local, lambda which, x: rows_of(number, place.factors(which, x)))
        return total, int(place.counts and number == 0)

    try:
        micro_batches = [(n, program.of_rows(_pytree.tree_map(partial(rows_of, n), example))) for n in range(count)]
        program.learn_shapes(loss, micro_batches)
        if program.stages is not None:
            outputs.computes = program.stages.computes
        outputs.restart()
        program.gradients(loss, micro_batches)
    except UserError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _compare_outputs(outputs: _Outputs, plain: _OneDevice, place: _Place, tolerance: float) -> tuple[Verification, int]:
    """(the first module whose output differs, its place in the forward pass). Outputs without a counterpart of their
    shape, which tensor-parallel ranks have parts of in another way, are left out, and so is what is inside of experts:
    each rank's have other tokens."""
    result, compared = Verification(""), set()
    inside = tuple(f"{name}." for name, child in outputs.module.named_modules() if _stacks_experts(child))
    for order, (run, whole) in enumerate(plain.whole.items()):
        name, _ = run
        if name.startswith(inside):
            continue
        for x, reference, alone in zip(outputs.found.get(run, []), whole, plain.alone.get(run, whole), strict=False):
            part = place.like(reference if place.has_rows(reference) else alone, x.shape)
            if part is None:
                continue
            compared.add(name)
            error = _error(x, part)
            result = replace(result, error=max(result.error, error), modules=len(compared))
            if not error <= max(tolerance, ROUNDING * torch.finfo(x.dtype).eps):
                reason = f"its output differs by {error:.1e} of its norm"
                return replace(result, module=_name(name, outputs.module), reason=reason), order
    return result, len(plain.whole)


def _stacks_experts(module: nn.Module) -> bool:
    return any(p.dim() == 3 for p in module.parameters(recurse=False)) and any(True for _ in module.children())


def _error(x: Tensor, expected: Tensor) -> float:
    """Norm of the difference as a share of the expected one. Equal elements that are not finite do not differ: a mean
    over no tokens, and a mask's infinities."""
    x, expected = x.double(), expected.double()
    equal = (x == expected) | (x.isnan() & expected.isnan())
    norm = float(torch.linalg.vector_norm(expected.where(expected.isfinite(), 0.0)))
    return float(torch.linalg.vector_norm((x - expected).masked_fill(equal, 0.0))) / (norm or 1.0)


def _compare_gradients(
    program: ModuleProgram, gradients: Mapping[str, Tensor], result: Verification, tolerance: float
) -> RankDifference:
    """The first parameter whose gradient differs, in the part of it that this rank has."""
    everything = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    errors = _gradient_errors(program, gradients)
    result = replace(result, parameters=len(gradients))
    for place, name in enumerate(gradients):
        if name not in errors:
            continue
        norm = max(float(torch.linalg.vector_norm(gradients[name].double())), NEGLIGIBLE * everything)
        error = errors[name] / (norm or 1.0)
        result = replace(result, error=max(result.error, error))
        if not error <= tolerance:
            reason = f"it differs by {error:.1e} of its norm"
            return RankDifference(replace(result, parameter=name, reason=reason), (sys.maxsize, place))
    return RankDifference(result, (sys.maxsize, len(gradients)))


def _gradient_errors(program: ModuleProgram, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Parameter -> norm of the error of its gradient over this rank's interval."""
    errors: dict[str, float] = {}
    values = values_of(gradients)
    for flat in program.engine.trained:
        mine = flat.grads_interval
        for start, placed in zip(flat.unit.offsets, flat.unit.placed, strict=True):
            a, b = max(start, flat.start), min(start + placed.numel, flat.stop)
            if a < b:
                reference = local_values(placed, a - start, b - start, values, mine.device)
                error = mine[a - flat.start : b - flat.start].double() - reference
                errors[placed.name] = float(torch.linalg.vector_norm(error))
    return errors
