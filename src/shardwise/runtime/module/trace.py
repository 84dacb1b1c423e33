"""`trace`: a `Blueprint` of any `nn.Module`, observed in steps of the runtime on fake tensors.

Parts and parameters are the ones that `split` finds. Each combination of tensor-parallel degree, with and without
sequence parallelism, precision and recomputation is one traced step, at two sizes of a micro-batch, and another one of
a single row. `predict` reads them without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import LayoutError, UserError, brief
from shardwise.layout import Layout
from shardwise.layout.axes import CP, ETP, TP
from shardwise.layout.context import cuts_sequences
from shardwise.layout.experts import spreads_experts
from shardwise.layout.layout import cut_layout, suits_cut, traced_cut
from shardwise.layout.state_rows import state_rows
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Blueprint
from shardwise.model.trace import Trace, TracedCollective, TracedMoment, TracedOp, TracedPart, TracedStep
from shardwise.model.traced_stages import Pair, TracedEnds
from shardwise.runtime.fake_group import fake_ranks
from shardwise.runtime.module.chain import Chain
from shardwise.runtime.module.context import check_positions, check_tokens
from shardwise.runtime.module.describe import DescribedModule, describe, find_blocks
from shardwise.runtime.module.fake_step import (
    MICRO_BATCHES,
    default_loss,
    fake_copy,
    fake_order,
    fake_stages,
    fake_step,
)
from shardwise.runtime.module.initial import is_meta
from shardwise.runtime.module.inputs import built, in_dtype, row_count, row_length, usual_masks, with_rows
from shardwise.runtime.module.program import LossFunction
from shardwise.runtime.module.recorder import RawOp, RawStep
from shardwise.runtime.module.repeats import GROUPS, NAMED, UnlikeRepeats, Whole, find_repeats, shortened
from shardwise.runtime.module.stage_recorder import MICRO_BATCHES as STAGE_MICRO_BATCHES
from shardwise.runtime.module.traced_chain import CallCounts, call_counts, joined_stages, same_calls, traced_chain

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are traced where none are named, as far as they suit the module."""
PRECISIONS = ("bf16",)
RECOMPUTE = ("none", "full")
SINGLE = (1, 1)
"""Sizes of the traced step of a single row."""
T = TypeVar("T")
STILL = "split and verify run it all the same, without a prediction"
"""What works for a module that cannot be traced."""


def trace(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    plan: Mapping[str, str] | None = None,
    *,
    loss: LossFunction | None = None,
    blocks: Sequence[str] | None = None,
    parts: Sequence[str | nn.Module] | None = None,
    tp: Sequence[int] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    cuts: Sequence[str] = ("",),
    modes: Sequence[str] = RECOMPUTE,
    single: bool = True,
) -> Blueprint:
    """Describe a module by its parts, parameters and traced steps, for `estimate` and `plan`. No weight is read.

    model: the module, on any device, or a function that builds it. example: a micro-batch as `loss` takes it, or as the
    module does; its number of rows, and twice that, are traced, and other numbers follow from these.
    plan, blocks, parts: as for `split`; without an order of parts pipelines have no predictions. loss: as for
    `train_step`; None is the sum of the outputs, or their `loss`.
    tp: degrees; None is 1, 2, 4 and 8, as far as a plan allows. precisions: those of layouts; bf16, a layout's
    default, alone. cuts: other keys of a layout under which it is traced, such as "ep=2" or "cp=2,cpkind=ulysses", each
    at all of these degrees; "" for none. That tokens meet in attention alone under cp is seen with weights and without
    `loss`, else by `split` only. modes: recompute modes; "none" gives the operations. single: whether single rows,
    which need fewer copies, are traced, too; without them `micro=1` follows from the others.
    Raises `UserError` for a module that `split` rejects, that depends on values of tensors, or inside a job.
    """
    module = built(model, "trace")
    example = example() if callable(example) else example
    if isinstance(cuts, str) or not cuts:
        raise UserError('cuts takes a list of texts, in which "" is none of them')
    if any(cuts_sequences(cut_layout(cut)) for cut in cuts):
        check_positions(module)
        if loss is None and not is_meta(module):
            check_tokens(module, example)
    tracer = _Tracer(module, example, plan, blocks, parts, loss or default_loss, modes, single)
    try:
        if short := tracer.shortened():
            return short.blueprint(tp, precisions, cuts)
    except (UserError, UnlikeRepeats):
        pass  # the whole module says what is wrong, or works all the same
    return tracer.blueprint(tp, precisions, cuts)


def traced_modes(layout: Layout) -> list[str]:
    """Modes of recomputation with which a module is traced for a layout: without any it shows its operations."""
    return sorted({"none", layout.recompute})


class _Tracer:
    def __init__(
        self, module: nn.Module, example: Any, plan: Mapping[str, str] | None, blocks: Sequence[str] | None,
        parts: Sequence[str | nn.Module] | None, loss: LossFunction, modes: Sequence[str] = RECOMPUTE,
        single: bool = True,
    ) -> None:  # fmt: skip
        self.modes, self.single = modes, single
        self.module, self.example, self.plan, self.loss, self.parts = module, example, plan, loss, parts
        self.whole: Whole | None = None
        """How a shortened module's steps become those of the whole one."""
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        rows = max(2, row_count(example))
        self.rows, self.seq = (rows, 2 * rows), row_length(example)
        self.blocks, self.blocks_named = find_blocks(module, blocks), list(blocks or ())
        if self.blocks:
            with usual_masks(example):
                self.blocks = fake_order(module, self.fake, self.blocks, example, rows, loss)
        self.described = module, self.blocks
        """The module and its blocks that the blueprint has."""
        self.ordered = parts is not None
        self.chain, self.unpiped = traced_chain(module, parts, self.blocks)
        self.uncut = ""

    def shortened(self) -> _Tracer | None:
        """The tracer of a module without the blocks that repeat others; None where there are too few. Raises
        `UserError` for a module that cannot run on fake tensors, and `UnlikeRepeats`."""
        named = [*(self.plan or ()), *self.blocks_named, *(self.parts or ())]
        if len(self.blocks) <= GROUPS + 1 or not all(
            isinstance(name, str) and not NAMED.search(name) for name in named
        ):
            return None
        with readable(self.module), usual_masks(self.example):
            blank = fake_copy(self.module, self.fake, torch.bfloat16)
            with self.fake:
                batch = in_dtype(with_rows(self.example, self.rows[0]), torch.bfloat16)
                repeats = find_repeats(self.module, blank, self.blocks, lambda: self.loss(blank, batch))
        if not repeats.left_out:
            return None
        short = _Tracer(
            shortened(self.module, repeats), self.example, self.plan, self.blocks_named or None, self.parts, self.loss,
            self.modes, self.single,
        )  # fmt: skip
        short.described, short.whole = self.described, Whole(repeats, short.blocks)
        return short

    def blueprint(
        self, degrees: Sequence[int] | None, precisions: Sequence[str], cuts: Sequence[str] = ("",)
    ) -> Blueprint:
        """The description with all traced steps."""
        described = self._described(degrees)
        if alone := next((cut for cut in cuts if not any(suits_cut(cut, tp) for tp in described)), ""):
            raise UserError(f"cuts: {alone!r} needs tp={cut_layout(alone).expert_tp}: trace that degree, too")
        largest = self._largest(described, cuts, degrees is not None)
        described_by: dict[Layout, DescribedModule] = {}
        for cut, (tp, parts), precision, recompute in product(cuts, described.items(), precisions, self.modes):
            if suits_cut(cut, tp):
                layout = cut_layout(cut, tp=tp, precision=precision, recompute=recompute)
                apart = bool(traced_cut(layout))
                described_by[layout] = describe(self.module, layout, self.plan, self.blocks) if apart else parts
        steps = self._steps(described_by)
        if self.chain is None:  # a later step may have found the reason
            steps = [replace(step, stages=None) for step in steps]
        ends = None if self.chain is None else self._ends(self.chain, Layout(tp=max(described)))
        spread = any(spreads_experts(cut_layout(cut)) for cut in cuts)
        if spread:
            self.uncut = "it was traced with experts on several ranks: trace it without"
        for tp in () if spread else sorted(set(described) - {1}):
            if (found := self._on_shards(tp, precisions, cuts)) is None:
                break  # what keeps shards of one degree from it keeps those of larger ones
            largest, more = found
            steps += more
        return replace(largest, trace=Trace(self.rows, self.seq, tuple(steps), ends, self.unpiped, self.uncut))

    def _largest(self, described: dict[int, DescribedModule], cuts: Sequence[str], named: bool) -> Blueprint:
        """The description that all layouts share. Where ep spreads experts that tp cannot split there is none for both:
        degrees that were not named go."""
        tp = max(described)
        try:
            return describe(self.described[0], most_cut(cuts, tp), self.plan, self.described[1]).blueprint
        except UserError as error:
            if tp == 1 or len({spreads_experts(cut_layout(cut)) for cut in cuts}) == 1:
                raise
            if named:
                raise UserError(f"cuts: trace tp={tp} apart from cuts that spread experts: {error}") from None
            for degree in {*described} - {1}:
                del described[degree]
            return self._largest(described, cuts, named)

    def _on_shards(
        self, tp: int, precisions: Sequence[str], cuts: Sequence[str]
    ) -> tuple[Blueprint, list[TracedStep]] | None:
        """The description for sequence parallelism and its traced steps; None for a degree that does not have it."""
        steps = []
        try:
            most = replace(most_cut(cuts, tp), sp=True)
            whole = describe(self.described[0], most, self.plan, self.described[1]).blueprint
            for cut in (cut for cut in cuts if suits_cut(cut, tp)):
                more = product(precisions, self.modes)
                layouts = [cut_layout(cut, tp=tp, sp=True, precision=p, recompute=r) for p, r in more]
                described = describe(self.module, layouts[0], self.plan, self.blocks)
                steps += self._steps(dict.fromkeys(layouts, described))
        except UserError as error:
            self.uncut = self.uncut or str(error)
        return (whole, steps) if steps else None

    def _ends(self, chain: Chain, layout: Layout) -> TracedEnds:
        entry, *_, last = describe(self.module, layout, self.plan, self.blocks, chain).blueprint.parts
        names = [tuple(p.name for p in part.parameters) for part in (entry, last)]
        return TracedEnds(names[0], names[1], last.reads)

    def _described(self, degrees: Sequence[int] | None) -> dict[int, DescribedModule]:
        """Tensor-parallel degree -> the module's parts, for all degrees that suit it where none are named."""
        described = {}
        for tp in degrees or DEGREES:
            try:
                described[tp] = describe(self.module, Layout(tp=tp), self.plan, self.blocks)
            except UserError as error:
                # A plan that the module publishes may have styles that are not there yet, and there may be none.
                if degrees or tp == 1 or (self.plan is not None and not isinstance(error, LayoutError)):
                    raise
        return described

    def _steps(self, described_by: Mapping[Layout, DescribedModule]) -> list[TracedStep]:
        """The traced steps of layouts, then those of single rows, which a batch norm may not have."""
        steps = [self._step(described, layout, self.rows) for layout, described in described_by.items()]
        for layout, described in described_by.items() if self.single else ():
            with suppress(UserError):
                steps.append(replace(self._step(described, layout, SINGLE), operations=(), single=True))
        return steps

    def _step(self, described: DescribedModule, layout: Layout, sizes: Pair) -> TracedStep:
        recorded = partial(self._recorded, fake_step, MICRO_BATCHES, described, layout)
        with readable(self.module), fake_ranks(layout.ranks), usual_masks(self.example):
            (units, one), (_, other) = _at(sizes, recorded)
            step = _joined(layout, units, one, other)
            if spreads_experts(layout):
                crowded = _at(sizes, lambda rows: [recorded(rows, crowd)[1] for crowd in (2, 3)])
                step = _with_received(step, units, crowded)
        if self.chain is not None and not layout.sp and not layout.offloads_activations:
            step = self._with_stages(step, self.chain, layout, sizes)
        return step if self.whole is None else self.whole.step(step)

    def _recorded(
        self, record: Callable[..., T], micro_batches: int, described: DescribedModule, layout: Layout, rows: int,
        *more: int,
    ) -> T:  # fmt: skip
        """What `record` sees of a copy of the module without values."""
        blank = fake_copy(self.module, self.fake)
        with self.fake:
            batches = [with_rows(self.example, rows) for _ in range(micro_batches)]
            return record(blank, described, layout, batches, self.loss, *more)

    def _with_stages(self, step: TracedStep, chain: Chain, layout: Layout, sizes: Pair) -> TracedStep:
        """The step with its parts as stages. Where the module itself publishes their order, an error is the reason why
        pipelines have no predictions."""
        try:
            described = describe(self.module, layout, self.plan, self.blocks, chain)
            recorded = partial(self._recorded, fake_stages, STAGE_MICRO_BATCHES, described, layout)
            with readable(self.module), fake_ranks(layout.ranks), usual_masks(self.example):
                return replace(step, **joined_stages(step, *_at(sizes, recorded)))
        except UserError as error:
            if self.ordered or sizes == SINGLE:
                raise
            self.chain, self.unpiped = None, str(error)
            return step


def most_cut(cuts: Sequence[str], tp: int) -> Layout:
    """A layout that cuts all that layouts of these cuts, as of `traced_cut`, cut."""
    layouts = [cut_layout(cut, **{TP[0]: tp} if suits_cut(cut, tp) else {}) for cut in cuts]
    most = next(filter(spreads_experts, layouts), layouts[0])
    ranks: dict[str, Any] = {TP[0]: tp, ETP[0]: tp if any(layout.expert_tp > 1 for layout in layouts) else 1}
    return replace(most, **ranks)


def _at(sizes: Pair, recorded: Callable[[int], T]) -> tuple[T, T]:
    """What is recorded at both sizes; once where these are equal."""
    one = recorded(sizes[0])
    return one, one if sizes[0] == sizes[1] else recorded(sizes[1])


@contextmanager
def readable(module: nn.Module, still: str = STILL) -> Iterator[None]:
    """Raise `UserError`, one line, for a failure on fake tensors. still: what works all the same."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        name, what = type(module).__name__, brief(error, 160)
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            raise UserError(f"{name} cannot be traced: it decides by the values of tensors ({what}); {still}") from None
        raise UserError(f"{name} cannot be traced: {type(error).__name__}: {what}; {still}") from None


def _joined(layout: Layout, plan: UnitPlan, one: RawStep, other: RawStep) -> TracedStep:
    """A traced step from what was recorded at both sizes. Raises `UserError` where these do different things."""
    if [_key(op) for op in one.operations] != [_key(op) for op in other.operations]:
        raise UserError(
            f"{plan.blueprint.name} cannot be traced: it runs other operations for other numbers of rows; {STILL}"
        )
    return TracedStep(
        layout.tp,
        layout.precision,
        layout.recompute,
        (one.inputs, other.inputs),
        tuple((part, (nbytes, other.saved.get(part, 0))) for part, nbytes in one.saved.items()),
        tuple(_moments(one, other)),
        tuple(_collectives(plan, one, other)),
        _operations(one, other) if layout.recompute == "none" else (),
        sp=layout.sp,
        cut=traced_cut(layout),
        pieces=plan.mesh.size(CP),
    )


def _moments(one: RawStep, other: RawStep) -> Iterator[TracedMoment]:
    """Moments of the first micro-batch, each with those of the second, whose inputs come on top."""
    half = len(one.moments) // MICRO_BATCHES
    for place in range(half):
        when, part, first = one.moments[place]
        later = tuple(raw.moments[half + place][2] - raw.inputs for raw in (one, other))
        yield TracedMoment(when, part, (first, other.moments[place][2]), later)  # type: ignore[arg-type]


def _collectives(plan: UnitPlan, one: RawStep, other: RawStep) -> Iterator[TracedCollective]:
    """What remains of the ledger without the rows that parameters alone determine."""
    for (phase, op, group, unit, dtype, elements), more, count in same_calls(
        _other_calls(plan, one), _other_calls(plan, other)
    ):
        yield TracedCollective(phase, op, unit, dtype, (elements, more), count // MICRO_BATCHES, group=group)


def _other_calls(plan: UnitPlan, raw: RawStep) -> CallCounts:
    known = {(phase, op, plan.mesh.name(axes), *rest): n for (phase, op, axes, *rest), n in state_rows(plan).items()}
    return +Counter({key: count - known.get(key, 0) for key, count in call_counts(raw.calls).items()})


def _with_received(step: TracedStep, plan: UnitPlan, crowded: Sequence[Sequence[RawStep]]) -> TracedStep:
    """The step with what depends on how many rows come to its experts. crowded: for each size, steps in which twice and
    three times as many come as go."""
    twice, thrice = (tuple(_collectives(plan, *raws)) for raws in zip(*crowded, strict=True))
    collectives = []
    for two, three in zip(twice, thrice, strict=True):
        more = _less(three.elements, two.elements)
        collectives.append(replace(two, elements=_less(two.elements, more), received=more))
    saved = dict(step.saved)
    more_saved = [
        (part, _less((nbytes, crowded[1][0].saved[part]), saved[part])) for part, nbytes in crowded[0][0].saved.items()
    ]
    received = tuple((part, more) for part, more in more_saved if any(more))
    small, large = (raws[0].moments for raws in crowded)
    moments = tuple(
        replace(moment, received=_less((small[place][2], large[place][2]), moment.first))
        for place, moment in enumerate(step.moments)
    )
    return replace(step, collectives=tuple(collectives), received=received, moments=moments)


def _less(one: Pair, other: Pair) -> Pair:
    return one[0] - other[0], one[1] - other[1]


def _key(op: RawOp) -> tuple[Any, ...]:
    return *astuple(op)[:5], op.end


def _operations(one: RawStep, other: RawStep) -> tuple[TracedPart, ...]:
    """Operations of each part, equal ones counted; equal parts together."""
    by_part: dict[str, Counter[TracedOp]] = {}
    for small, large in zip(one.operations, other.operations, strict=True):
        path = small.module.removeprefix(f"{small.part}.") if small.module != small.part else ""
        pairs = tuple(zip(small.sizes, large.sizes, strict=True))
        op = TracedOp(
            small.kind, small.name, path, small.phase, pairs, (small.flops, large.flops), (small.nbytes, large.nbytes),
            end=small.end,
        )  # fmt: skip
        by_part.setdefault(small.part, Counter())[op] += 1
    equal: dict[tuple[TracedOp, ...], list[str]] = {}
    for part, counts in by_part.items():
        equal.setdefault(tuple(replace(op, count=n) for op, n in counts.items()), []).append(part)
    return tuple(TracedPart(tuple(parts), operations) for operations, parts in equal.items())
