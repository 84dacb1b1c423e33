"""`UnitPlan`: the units that are gathered, reduced and freed together, and when. Planner and runtime both follow it.

A unit is one flat buffer: every local (tensor-parallel) parameter of one part of the decoder, end to end. Inside it,
parameters are ordered by what must happen to their gradients, so that each treatment is one contiguous span:

    [ split over tp | gradient summed over kv replicas | gradient summed over tp | replicated ]

Parameters that are frozen are units of their own beside the trained ones: they have no gradients and no optimizer
state, and below stage 3 every rank has them whole. Frozen matrices in fewer bits are a third unit, of bytes.

A ZeRO shard is interval `r` of the flat buffer cut into `shard_ranks` equal pieces, the last ones padded.

At stage 3 units live in *slots*, two buffers that they take in turn, so at most two are resident: the one in use and
the one prefetched. The large edges of the model, embedding and head, share the outer slot; blocks alternate between
inner and outer, and the last one is inner, so that the head can be fetched while it computes. A tied weight has a slot
of its own and stays for the whole micro-batch, and so does the root of a user's module. A unit's weights therefore
always appear at the same address, and a unit that is still in its slot is not gathered again.

Under a pipeline the schedule says when stages are gathered and freed, so that each unit has a slot of its own
(`Residency`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from shardwise.cluster import Cluster
from shardwise.layout import pipeline
from shardwise.layout.algorithms import Schedules
from shardwise.layout.axes import CP, DATA, EDP, EP, HPZ, HPZ_ACROSS, KV, PP, REPLICATE, SHARD, STAGE, TP, Axes
from shardwise.layout.context import SequenceCut
from shardwise.layout.experts import RoutedRows, gathers_sequences, slice_of
from shardwise.layout.homes import offloaded_elements
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.optimizers import states_of, widens_gradients
from shardwise.layout.placement import Placed, place
from shardwise.layout.transport_buffers import TransportBuffers, transport_buffers
from shardwise.layout.wire import WIRE_DTYPE, PackedRun, packed_runs
from shardwise.layout.workload import Workload
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint, PartKind
from shardwise.model.lora import INT8
from shardwise.model.operations import AttentionCore
from shardwise.model.parameters import Model, blueprint
from shardwise.ops.fusion import FusedForm, fused_form
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import Action, PipelineSchedule
    from shardwise.schedule.pipeline.simulate import Steady

Backend = Literal["gloo", "nccl", "shared", "staged"]
"""Backend of the collectives: gloo, NCCL, the memory that processes of one host share, or, between ranks that share a
GPU, one of CPU ranks with copies to the host and back."""
WEIGHT_BITS, GRADIENT_BITS = 8, 4
"""Bits of a weight under qwz, and of a gradient under qgz."""
Phase = Literal["forward", "backward", "prefill", "decode"]
K = TypeVar("K")


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a unit's flat buffer with the same treatment."""

    start: int
    stop: int
    replicas: int
    """Ranks of the norm's group that hold the same values."""
    decay: bool
    sum_over: Axes
    """Axes over which each rank has its part of the gradient, beside those of `Unit.reduce`."""

    def within(self, start: int, stop: int) -> Span | None:
        """The part of this span inside [start, stop), relative to `start`; None when they do not meet."""
        a, b = max(self.start, start), min(self.stop, stop)
        return replace(self, start=a - start, stop=b - start) if a < b else None


class Gather(NamedTuple):
    """The gather of a unit's parameters."""

    unit: str
    axes: Axes
    """The axes over which the gathered shards are cut: they say which shard is the source."""
    dtype: str
    """dtype on the wire."""


class Hop(NamedTuple):
    """One collective on the way of a unit's gradients to their sum over the data ranks."""

    op: Literal["reduce_scatter", "all_to_all", "all_reduce"]
    """By an all-to-all ranks exchange packed pieces, which each of them adds up (ZeRO++'s qgZ)."""
    axes: Axes
    dtype: str
    """dtype on the wire."""
    times: int
    """Times per step: once, or once per micro-batch."""


@dataclass(frozen=True)
class Unit:
    """One flat buffer: `name` is the part it holds, or "tied" for the tied embedding."""

    name: str
    placed: tuple[Placed, ...]
    """Its parameters in flat order."""
    slot: str
    """Its buffer at stage 3: "outer", "inner", "tied"; a root, and every unit under a pipeline, has one of its own."""
    shard_ranks: int
    shard: Axes
    """Axes over which optimizer state, and by stage gradients and parameters, are cut into intervals."""
    replicate: Axes
    """Axes along which ranks hold the same interval."""
    again: Axes
    """Axes of the gathers that follow the first one of a step: over `shard`, or over ranks that have kept a second copy
    of what the first one gave (ZeRO++'s hpZ)."""
    copy_ranks: int
    """Ranks over which the second copy is cut; 0 without one."""
    reduce: tuple[Hop, ...]
    """From the full gradients of one rank to the sum of its interval; none without a training step."""
    copies: int = 1
    """Ranks of the norm's group, beside tensor-parallel ones, that hold the same interval."""
    frozen: bool = False
    """Whether its parameters stay as they are."""
    dtype: str = ""
    """dtype of its parameters where that is not the layout's."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter in the flat buffer."""
        starts, at = [], 0
        for p in self.placed:
            starts.append(at)
            at += p.numel
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.placed)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's interval, padding included."""
        return -(-self.numel // self.shard_ranks)

    @property
    def padded(self) -> int:
        return self.shard_numel * self.shard_ranks

    @property
    def copy_numel(self) -> int:
        """Elements that one rank keeps of the second copy."""
        return self.padded // self.copy_ranks if self.copy_ranks else 0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The flat buffer cut where its treatment changes."""
        spans: list[Span] = []
        for start, p in zip(self.offsets, self.placed, strict=True):
            span = Span(start, start + p.numel, p.replicas * self.copies, p.parameter.decay, p.sum_over)
            if spans and replace(span, start=spans[-1].start, stop=spans[-1].stop) == spans[-1]:
                span = replace(span, start=spans.pop().start)
            spans.append(span)
        return tuple(spans)

    @cached_property
    def block_cuts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Runs [start, stop) of each shard rank's interval that are split, or replicated, over as many tp ranks: packed
        elements of two runs share no block. Padding belongs to the last one."""
        neighbors = zip(self.offsets[1:], pairwise(self.placed), strict=True)
        ends = [start for start, (before, after) in neighbors if before.replicas != after.replicas]
        cuts = []
        for first in range(0, self.padded, self.shard_numel):
            inside = [end - first for end in ends if first < end < first + self.shard_numel]
            cuts.append(tuple(pairwise([0, *inside, self.shard_numel])))
        return tuple(cuts)

    @cached_property
    def longest_run(self) -> int:
        """Elements of the longest run of any interval."""
        return max(stop - start for runs in self.block_cuts for start, stop in runs)

    def packed_runs(self, place: int, bits: int) -> tuple[PackedRun, ...]:
        return packed_runs(self.block_cuts[place], bits)

    def packed_bytes(self, bits: int) -> int:
        """Bytes of a packed interval: the most of any shard rank, since all send equal parts."""
        return max(packed_runs(cuts, bits)[-1].packed.stop for cuts in set(self.block_cuts))

    @cached_property
    def partial_sums(self) -> tuple[tuple[int, int, Axes], ...]:
        """(start, stop, axes) of gradients that are partial on each rank along `axes`."""
        if self.frozen:
            return ()
        runs = ((axes, list(run)) for axes, run in groupby(self.spans, lambda span: span.sum_over) if axes)
        return tuple((run[0].start, run[-1].stop, axes) for axes, run in runs)


@dataclass(frozen=True)
class Use:
    """One visit of a part in a micro-batch. `gathers`: of units that are not resident already."""

    phase: Phase
    kind: Literal["forward", "recompute", "backward"]
    part: str
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True)
class UnitPlan:
    """All units of one rank's share of a model under `layout`."""

    subject: Model
    layout: Layout
    workload: Workload
    tp_rank: int
    backend: Backend
    pp_rank: int = 0
    cp_rank: int = 0
    ep_rank: int = 0
    routed: RoutedRows | None = None
    """Recorded rows of its mixtures of experts; None where equal loads are assumed."""

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.layout, self.subject)

    @property
    def model(self) -> ModelConfig:
        """The model's configuration, which a user's module does not have."""
        assert isinstance(self.subject, ModelConfig)
        return self.subject

    @property
    def cuda(self) -> bool:
        return self.backend in ("nccl", "staged")

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.cuda else "cpu"

    @cached_property
    def blueprint(self) -> Blueprint:
        return blueprint(self.subject)

    @cached_property
    def schedules(self) -> Schedules:
        return Schedules(self.mesh, self.backend)

    @cached_property
    def stages(self) -> dict[int, list[str]]:
        """Stage -> its parts, for the stages of the pipeline that this rank has; all in one without a pipeline."""
        if self.layout.pp == 1:
            return {0: self.blueprint.names}
        cut = pipeline.stages(self.subject, self.layout)
        where = pipeline.placement(self.layout)
        parts = self.blueprint.stages(cut.layers)
        return {stage: parts[stage] for stage, rank in enumerate(where) if rank == self.pp_rank}

    @property
    def in_stages(self) -> bool:
        """Whether its stages compute as the actions of a schedule have it: under a pipeline, and in a trace for one."""
        return self.layout.pp > 1 or bool(self.of_kind("entry"))

    @cached_property
    def parts(self) -> list[str]:
        """The parts that this rank holds, in the order in which tokens pass through them."""
        return [part for held in self.stages.values() for part in held]

    def kind(self, part: str) -> PartKind:
        return self.blueprint.kind(part)

    def of_kind(self, kind: PartKind) -> list[str]:
        return [part for part in self.parts if self.kind(part) == kind]

    @cached_property
    def schedule(self) -> PipelineSchedule | None:
        """Actions of all pipeline ranks in one step; None without a pipeline."""
        if self.layout.pp == 1:
            return None
        return pipeline.training(self.layout, self.sums_table, self.micro_batches, self.releases_early)

    @cached_property
    def releases_early(self) -> bool:
        """Whether gradients of inputs leave before those of weights are computed, which are few where weights are
        frozen."""
        return pipeline.releases_early(self.layout) and not self.blueprint.freezes

    @property
    def actions(self) -> tuple[Action, ...]:
        assert self.schedule is not None
        return self.schedule.actions[self.pp_rank]

    @property
    def role(self) -> str:
        """Name, in reports, of the ranks at its place in the pipeline."""
        stages = list(map(str, self.stages))
        if len(stages) > 4:  # a table of 80 columns has room for the numbers beside them
            stages = [*stages[:2], f"... {stages[-1]}"]
        return "all" if self.layout.pp == 1 else f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Embedding, each block and then its experts, final norm + head; a tied embedding comes first, alone. What is
        frozen of each comes behind it."""
        return tuple(unit for part in self.parts for unit in self._units_in(part))

    def _units_in(self, part: str) -> list[Unit]:
        found = []
        placed = self._placed_in(part)
        shared = self.blueprint.shared
        tied = [p for p in placed if p.name in shared]
        experts = [p for p in placed if p.kind == "expert"]
        rest = [p for p in placed if p.kind != "expert" and p.name not in shared]
        if self.blueprint.part(part).reads and self.copies_table:
            # the last pipeline stage holds a copy of the table for its head
            tied = [place(self.blueprint.table, self.layout, self.tp_rank)]
        for name, of, slot in (("tied", tied, "tied"), (part, rest, self._slot(part))):
            trained = [p for p in of if not p.parameter.frozen]
            frozen = [p for p in of if p.parameter.frozen and not p.parameter.dtype]
            narrow = [p for p in of if p.parameter.dtype]
            found += [self._unit(name, trained, slot)] if trained else []
            found += [self._frozen_unit(frozen_of(name), frozen, f"{slot} frozen")] if frozen else []
            found += [self._frozen_unit(narrow_of(name), narrow, f"{slot} narrow", INT8)] if narrow else []
        for still in (False, True):
            if some := [p for p in experts if p.parameter.frozen == still]:
                found.append(self._experts_unit(part, some, still))
        return found

    def _placed_in(self, part: str) -> list[Placed]:
        """Its share of a part's parameters: of equal parts all but the names is the same."""
        parameters, of = self.blueprint.parameters_of(part), id(self.blueprint.part(part))
        if of not in self._first_placed:
            placed = [place(p, self.layout, self.tp_rank, self.ep_rank) for p in parameters]
            self._first_placed[of] = placed
            return placed
        return [first.of(p) for first, p in zip(self._first_placed[of], parameters, strict=True)]

    @cached_property
    def _first_placed(self) -> dict[int, list[Placed]]:
        """Parts of the blueprint -> parameters of the first single part of each."""
        return {}

    def _slot(self, part: str) -> str:
        if self.layout.pp > 1 or self.kind(part) == "root":
            return part
        if (place := self._places_of_blocks.get(part)) is None:
            return "outer"
        return "inner" if place % 2 == 0 or place == len(self._places_of_blocks) - 1 else "outer"

    @cached_property
    def _places_of_blocks(self) -> dict[str, int]:
        return {block: place for place, block in enumerate(self.of_kind("block"))}

    def _unit(self, name: str, placed: list[Placed], slot: str) -> Unit:
        copies = self.mesh.size(REPLICATE) if self.routes else 1
        return self._sharded(name, self._ordered(placed), slot, SHARD, REPLICATE, copies)

    def _frozen_unit(self, name: str, placed: list[Placed], slot: str, dtype: str = "") -> Unit:
        shard, replicate = (SHARD, REPLICATE) if self.layout.stage == 3 else ((), DATA)
        unit = self._sharded(name, self._ordered(placed), slot, shard, replicate, 1)
        return replace(unit, reduce=(), frozen=True, dtype=dtype)

    def _ordered(self, placed: list[Placed]) -> tuple[Placed, ...]:
        def order(p: Placed) -> tuple[int, int, bool]:
            replicated_alone = p.replicas == self.layout.tp > 1 and not p.sum_over
            return (3 if replicated_alone else ((), KV, TP).index(p.sum_over), p.replicas, not p.parameter.decay)

        return tuple(sorted(placed, key=order))

    def _experts_unit(self, part: str, placed: list[Placed], frozen: bool) -> Unit:
        """The experts of a block, whose replicas are other ranks than those of all else."""
        name, slot = experts_of(part), f"{self._slot(part)} experts"
        if frozen:
            shard, replicate = (EDP, ()) if self.layout.stage == 3 else ((), EDP)
            unit = self._sharded(frozen_of(name), tuple(placed), f"{slot} frozen", shard, replicate, 1)
            return replace(unit, reduce=(), frozen=True)
        if self.layout.stage:
            return self._sharded(name, tuple(placed), slot, EDP, (), 1)
        return self._sharded(name, tuple(placed), slot, (), EDP, self.mesh.size(EDP))

    def _sharded(
        self, name: str, placed: tuple[Placed, ...], slot: str, shard: Axes, replicate: Axes, copies: int
    ) -> Unit:
        hops = []
        if self.trains and shard and self.layout.stage:
            hops += self._hops(shard)
        if self.trains and self.mesh.size(replicate) > 1:
            hops.append(Hop("all_reduce", replicate, self.grad_dtype, 1))
        copied = self.mesh.size(HPZ) if shard == SHARD and self.trains else 1
        again, copied = (HPZ, copied) if copied > 1 else (shard, 0)
        return Unit(name, placed, slot, self.mesh.size(shard), shard, replicate, again, copied, tuple(hops), copies)

    def _hops(self, shard: Axes) -> list[Hop]:
        """From full gradients to the sum over a shard group. Packed ones take two hops where a few ranks are near each
        other: first among these, so that less is left to go further."""
        if not self.layout.qgz or self.mesh.size(shard) == 1:
            return [Hop("reduce_scatter", shard, self.wire_dtype, self.reductions)]
        over = (HPZ, HPZ_ACROSS) if shard == SHARD and self.mesh.size(HPZ) > 1 else (shard,)
        return [Hop("all_to_all", axes, WIRE_DTYPE, self.reductions) for axes in over]

    @cached_property
    def routes(self) -> bool:
        return self.blueprint.routes

    def routes_in(self, part: str) -> bool:
        return any(op.kind == "router" for op in self.blueprint.part(part).operations)

    @cached_property
    def routed_places(self) -> int:
        """Tokens of one micro-batch that this rank routes to experts, padding included."""
        if gathers_sequences(self.layout):
            return self.tokens
        if self.layout.sp:
            return self.stream_tokens
        each = slice_of(self.layout, self.tokens)
        return max(0, min(each, self.tokens - self.tp_rank * each))

    @cached_property
    def routed_pairs(self) -> int:
        """Pairs of a token and an expert of one micro-batch that this rank sends, if no expert is full."""
        assert self.model.experts
        return (self.routed_places - self._padding) * self.model.experts.active

    @property
    def _padding(self) -> int:
        """Places that it routes which are no tokens: those that fill up the last chunks of a cut sequence."""
        cut, layout = self.sequence, self.layout
        if cut.padded == cut.seq:
            return 0
        whole = [place >= cut.seq for run in cut.places(self.cp_rank) for place in run]
        if gathers_sequences(layout):
            return layout.micro * sum(whole)
        each = slice_of(layout, len(whole) if layout.sp else len(whole) * layout.micro)
        own = slice(self.tp_rank * each, (self.tp_rank + 1) * each)
        return layout.micro * sum(whole[own]) if layout.sp else sum((whole * layout.micro)[own])

    def routed_rows(self, part: str, micro: int | None = None) -> tuple[int, int]:
        """(pairs that a part's mixture sends to experts, rows that come to those here) in one micro-batch; the most of
        any without `micro`."""
        if self.routed is None:
            return self.routed_pairs, self.routed_pairs
        rows = self.routed.by_part[part]
        return (max(sent for sent, _ in rows), max(come for _, come in rows)) if micro is None else rows[micro]

    def alike(self, part: str) -> tuple[bool, tuple[int, int]]:
        """Equal for blocks that need the same memory: whether they have experts, and rows that these exchange."""
        return (True, self.routed_rows(part)) if self.routes and self.routes_in(part) else (False, (0, 0))

    @cached_property
    def uneven(self) -> bool:
        """Whether its micro-batches have exchanged different numbers of rows."""
        return self.routed is not None and any(len(set(rows)) > 1 for _, rows in self.routed.rows)

    def as_micro_batch(self, micro: int) -> UnitPlan:
        """A copy whose every micro-batch has exchanged the rows that one of them has."""
        assert self.routed
        return replace(self, routed=RoutedRows(tuple((part, (rows[micro],)) for part, rows in self.routed.rows)))

    @property
    def norm_over(self) -> Axes:
        """Axes of the sum that makes the norm of all gradients: those along which ranks hold different parameters.
        Experts and all else differ along others: there it is all ranks, and copies count once together."""
        return STAGE + PP if self.routes else SHARD + TP + PP

    @property
    def gradients_over(self) -> Axes:
        """Axes over which ranks may differ in the parameters that have a gradient in a step. Tensor-parallel ranks
        compute with the same ones, but for experts, whose rows may go elsewhere."""
        return STAGE + PP if self.routes else DATA + PP

    @cached_property
    def by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    def units_of(self, part: str) -> list[Unit]:
        """The units whose weights `part` reads."""
        names = [part, frozen_of(part), narrow_of(part), experts_of(part), frozen_of(experts_of(part))]
        if part in self.blueprint.sharing:
            names = ["tied", frozen_of("tied"), *names]
        return [self.by_name[name] for name in names if name in self.by_name]

    def trained_units(self, part: str) -> list[Unit]:
        return [unit for unit in self.units_of(part) if not unit.frozen]

    @cached_property
    def stage_units(self) -> dict[int, list[Unit]]:
        """Stage -> the units whose weights its parts read."""
        return {
            stage: list({unit.name: unit for part in held for unit in self.units_of(part)}.values())
            for stage, held in self.stages.items()
        }

    @cached_property
    def _last_to_share(self) -> str | None:
        """The last of its parts, in the order of backward passes, that holds or reads a shared parameter."""
        return next((name for name in self.parts if name in self.blueprint.sharing), None)

    def finished_after(self, part: str) -> list[Unit]:
        """The units whose gradients are complete once `part`'s backward is over."""
        names = [part, experts_of(part)]
        if part == self._last_to_share:
            names.append("tied")
        # A frozen unit has another name.
        return [self.by_name[name] for name in names if name in self.by_name]

    @property
    def trains(self) -> bool:
        """Whether there is a training step; generation has neither gradients nor an optimizer."""
        return self.workload.batch > 0

    @cached_property
    def sequence(self) -> SequenceCut:
        return SequenceCut.of(self.layout, self.workload.seq)

    @cached_property
    def micro_batches(self) -> int:
        return self.workload.micro_batches(self.layout)

    @cached_property
    def steady(self) -> Steady | None:
        """The shorter step with the same steady state; None without a pipeline, where every micro-batch but the first
        is like the next."""
        return pipeline.steady(self.layout.schedule, self.layout.pp, self.micro_batches) if self.layout.pp > 1 else None

    def of_micro_batches(self, count: int) -> UnitPlan:
        """A copy of the plan for a step of `count` micro-batches."""
        batch = count * self.layout.micro * self.layout.dp
        return self if count == self.micro_batches else replace(self, workload=replace(self.workload, batch=batch))

    @cached_property
    def short(self) -> UnitPlan:
        """The plan of the shorter step."""
        return self.of_micro_batches(self.steady.micro if self.steady else min(self.micro_batches, 3))

    def count(self, of_step: Callable[[UnitPlan], Counter[K]]) -> Counter[K]:
        """Value of `of_step` for this step, extrapolated from the short step and from one that is a period longer.

        of_step: counts something that occurs equally often in every period of the steady state.
        """
        found, repeats = of_step(self.short), (self.micro_batches - self.short.micro_batches) // self._period
        if repeats:
            found = Counter({key: found[key] + repeats * (n - found[key]) for key, n in of_step(self._longer).items()})
        return found

    @property
    def _period(self) -> int:
        return self.steady.period if self.steady else 1

    @cached_property
    def _longer(self) -> UnitPlan:
        """The plan of a step that is a period longer than the shorter one."""
        return self.of_micro_batches(self.short.micro_batches + self._period)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that this rank attends with, padding included."""
        return self.layout.micro * self.sequence.local

    @property
    def stream_tokens(self) -> int:
        """Tokens of its residual stream: a tp-th of them under sequence parallelism."""
        return self.tokens // self.layout.tp if self.layout.sp else self.tokens

    @cached_property
    def fused(self) -> FusedForm | None:
        """The form that computes its blocks with several operators in one function; None where they compute one by one,
        or go through a compiler."""
        blocks = self.of_kind("block")
        if not blocks or self.layout.compile == "block" or self.layout.inner_ranks != self.layout.tp:
            return None  # no fused form gathers outputs
        if isinstance(self.subject, Blueprint):
            return None  # its blocks compute as they are written
        if self.blueprint.freezes:
            return None  # a fused form computes the gradients of all its weights
        names = [placed.name.removeprefix(f"{blocks[0]}.") for placed in self.by_name[blocks[0]].placed]
        return fused_form(self.model, self.blueprint.part(blocks[0]).module, self.layout.attention, names)

    @property
    def fuses_blocks(self) -> bool:
        return self.fused is not None

    @property
    def copies_table(self) -> bool:
        """Whether the head's tied table is a copy of one that another rank of the pipeline has for its embedding."""
        reads = any(self.blueprint.part(name).reads for name in self.parts)
        return reads and self.blueprint.table.part not in self.parts

    def trains_in(self, part: str, module: str = "") -> bool:
        """Whether a part, or a module inside, computes gradients of weights that it reads."""
        of = self.blueprint.part(part)
        return of.trains(module) or (bool(of.reads) and self.sums_table)

    @cached_property
    def sums_table(self) -> bool:
        """Whether there is a shared table whose gradient is a sum over two ends of the model."""
        shared = self.blueprint.shared
        return bool(shared) and any(p.name in shared and not p.frozen for p in self.blueprint.parameters())

    @cached_property
    def windows(self) -> frozenset[int]:
        """Windows of its blocks' attention; 0 for blocks that attend to all tokens."""
        blocks = {id(part): part for part in map(self.blueprint.part, self.of_kind("block"))}
        return frozenset(
            op.window for part in blocks.values() for op in part.operations if isinstance(op, AttentionCore)
        )

    def blocks(self, stage: int) -> list[str]:
        return [part for part in self.stages[stage] if self.kind(part) == "block"]

    @cached_property
    def first_blocks(self) -> list[str]:
        return [blocks[0] for stage in self.stages if (blocks := self.blocks(stage))]

    @property
    def states(self) -> tuple[str, ...]:
        """Arrays of optimizer state per parameter: master weights, then moments."""
        return states_of(self.workload.optimizer)

    @property
    def master_dtype(self) -> str:
        """dtype in which the optimizer updates weights."""
        return "float64" if self.layout.precision == "fp64" else "float32"

    @property
    def interval_dtype(self) -> str:
        """dtype of a rank's interval of the weights: at stage 3 the optimizer's, where that is on the device."""
        masters = self.trains and self.layout.stage == 3 and self.layout.offload_home == "none"
        return self.master_dtype if masters else self.layout.dtype

    def dtype_of(self, unit: Unit) -> str:
        """dtype of a rank's interval of a unit."""
        return self.dtype_gathered(unit) if unit.frozen else self.interval_dtype

    def dtype_gathered(self, unit: Unit) -> str:
        """dtype of a whole unit's parameters."""
        return unit.dtype or self.layout.dtype

    def offloaded(self, unit: Unit) -> int:
        """Elements of a unit's interval, its last ones, whose optimizer state is not on the device."""
        return offloaded_elements(self.layout, unit.shard_numel) if self.trains and not unit.frozen else 0

    @cached_property
    def grad_dtype(self) -> str:
        """dtype of the gradient accumulators. More than one bf16 micro-batch is summed in fp32."""
        if self.layout.precision == "bf16" and not widens_gradients(self.layout.grads == "fp32", self.micro_batches):
            return "bfloat16"
        return "float64" if self.layout.precision == "fp64" else "float32"

    @cached_property
    def stages_gradients(self) -> bool:
        """Whether full gradients are staged, in compute precision, on their way into the accumulators."""
        return self.layout.stage >= 2 or self.grad_dtype != self.layout.dtype

    @property
    def reductions(self) -> int:
        """Times that a step sums full gradients: after each micro-batch from stage 2 on."""
        return self.micro_batches if self.layout.stage >= 2 else 1

    @property
    def wire_dtype(self) -> str:
        """dtype in which full gradients are summed."""
        return self.layout.dtype if self.layout.stage >= 2 else self.grad_dtype

    @cached_property
    def slots(self) -> dict[str, int]:
        """Elements of each slot: the largest unit that lives in it."""
        sizes: dict[str, int] = {}
        for unit in self.units:
            sizes[unit.slot] = max(sizes.get(unit.slot, 0), unit.padded)
        return sizes

    @cached_property
    def slot_dtypes(self) -> dict[str, str]:
        return {unit.slot: self.dtype_gathered(unit) for unit in self.units}

    @property
    def slot_bytes(self) -> int:
        return sum(elements * DTYPE_BYTES[self.slot_dtypes[slot]] for slot, elements in self.slots.items())

    @cached_property
    def packed_slots(self) -> dict[str, int]:
        """Bytes of each slot's buffer of packed weights; none where they are gathered as they are."""
        sizes: dict[str, int] = {}
        for unit in self.units:
            if packed := self.packed(unit):
                sizes[unit.slot] = max(sizes.get(unit.slot, 0), packed * unit.shard_ranks)
        return sizes

    @cached_property
    def transport_buffers(self) -> TransportBuffers:
        return transport_buffers(self)

    def uses(self, passes: int = 1) -> list[Use]:
        """Every visit of one micro-batch in order, without the gathers. A root, which computes around all other parts,
        is the first in both directions. passes: forward passes with gradients, whose backward passes come latest
        first."""
        forward = passes * [Use("forward", "forward", part) for part in self.parts]
        backward, blocks = [], self.of_kind("block")
        inner = passes * [part for part in reversed(self.parts) if self.kind(part) != "root"]
        for part in self.of_kind("root") + inner:
            if self.layout.recompute == "input" and part in blocks:
                backward += [Use("backward", "recompute", before) for before in blocks[: blocks.index(part)]]
            backward.append(Use("backward", "backward", part))
        return forward + backward

    def gathering_uses(self, passes: Sequence[int] = ()) -> Iterator[list[Use]]:
        """For each micro-batch of a step, its uses with the units that stage 3 gathers for each. passes: of each
        micro-batch, where some have more than one.

        Residency decides: a slot remembers its unit until another one takes it. The optimizer step, which precedes
        the first micro-batch, empties all slots. The embedding's backward reads no weight.
        """
        resident: dict[str, str] = {}
        gathers = StepGathers(self)
        for count in passes or self.micro_batches * (1,):
            yield self._gathering(self.uses(count), resident, gathers.next)

    def generating_uses(self, phase: Phase) -> tuple[list[Use], list[Use]]:
        """The uses of a turn of generation with the units that stage 3 gathers for each: of the first turn, and of
        every later one, which finds in the slots what the turn before has left there."""
        resident: dict[str, str] = {}
        parts = [Use(phase, "forward", part) for part in self.parts]
        first, later = (self._gathering(parts, resident, self.gather) for _ in range(2))
        return first, later

    def _gathering(self, uses: list[Use], resident: dict[str, str], of: Callable[[Unit], Gather]) -> list[Use]:
        """Uses with their gathers. resident: slot -> the unit in it; of: the gather of a unit."""
        found = []
        for use in uses:
            gathers = []
            for unit in (
                [] if use.kind == "backward" and self.kind(use.part) == "embedding" else self.units_of(use.part)
            ):
                if resident.get(unit.slot) != unit.name:
                    resident[unit.slot] = unit.name
                    gathers.append(of(unit))
            found.append(Use(use.phase, use.kind, use.part, tuple(gathers)))
        return found

    def gather(self, unit: Unit, again: bool = False) -> Gather:
        """The gather of a unit's parameters. again: it has been gathered in this step before."""
        if again and unit.copy_ranks:
            return Gather(unit.name, unit.again, self.dtype_gathered(unit))
        return Gather(unit.name, unit.shard, WIRE_DTYPE if self.packed(unit) else self.dtype_gathered(unit))

    def packed(self, unit: Unit) -> int:
        """Bytes of one rank's interval in 8 bits, with its scales; 0 where a unit is not gathered so."""
        quantized = self.layout.qwz and self.trains and unit.shard_ranks > 1 and not unit.dtype
        return unit.packed_bytes(WEIGHT_BITS) if quantized else 0

    def packed_gradients(self, unit: Unit) -> int:
        """Bytes of one rank's interval of the gradients in 4 bits, with its scales; 0 where they are summed as they
        are."""
        quantized = any(hop.op == "all_to_all" for hop in unit.reduce)
        return unit.packed_bytes(GRADIENT_BITS) if quantized else 0

    def residuals(self, unit: Unit) -> tuple[int, int]:
        """Elements of the errors that a rank keeps, in fp32, and adds to a unit's next gradients: of its own gradient,
        and of the sums that it packs again where there is a second hop."""
        if not (self.layout.feedback and self.packed_gradients(unit)):
            return 0, 0
        first, *second = (hop for hop in unit.reduce if hop.op == "all_to_all")
        return unit.padded, unit.padded // self.mesh.size(first.axes) if second else 0

    @property
    def feeds_back(self) -> bool:
        """Whether errors of packed gradients are a part of the training state."""
        return self.layout.feedback and self.layout.stage > 0

    def gathered(self, gather: Gather) -> int:
        """Elements of a gather's full tensor, in its own dtype."""
        unit = self.by_name[gather.unit]
        return self.packed(unit) * unit.shard_ranks if gather.dtype == WIRE_DTYPE else unit.padded

    def gather_counts(self) -> Counter[tuple[str, Gather]]:
        """(phase, gather) -> times per step: after the update at stages 1 and 2, for each use at stage 3."""
        return self.count(UnitPlan._gathers_one_by_one)

    def _gathers_one_by_one(self) -> Counter[tuple[str, Gather]]:
        if self.layout.stage < 3:
            trained = [unit for unit in self.units if self.layout.stage and not unit.frozen]
            return Counter(("optimizer", self.gather(unit)) for unit in trained)
        if self.layout.pp == 1:
            uses = chain.from_iterable(self.gathering_uses())
            return Counter((use.phase, gather) for use in uses for gather in use.gathers)
        found: Counter[tuple[str, Gather]] = Counter()
        residency, gathers = Residency(self), StepGathers(self)
        for action, phase in zip(self.actions, pipeline.phases(self.actions), strict=True):
            if action.kind == "UNSHARD":
                found.update((phase, gathers.next(unit)) for unit in residency.gather(action.stage))
            elif action.kind == "RESHARD":
                residency.free(action.stage)
        return found


def experts_of(part: str) -> str:
    return f"{part}.experts"


def frozen_of(name: str) -> str:
    return f"{name}.frozen"


def narrow_of(name: str) -> str:
    """Name of the unit of frozen matrices in fewer bits, beside the unit of this name."""
    return f"{name}.narrow"


class StepGathers:
    """The gathers of one step in order: which one a unit's next is."""

    def __init__(self, plan: UnitPlan) -> None:
        self._plan, self._seen = plan, set[str]()

    def next(self, unit: Unit) -> Gather:
        again = unit.name in self._seen
        self._seen.add(unit.name)
        return self._plan.gather(unit, again)


class Residency:
    """Gathered units of ZeRO stage 3 while a pipeline gathers and frees its stages.

    A unit of two stages (a tied table) stays gathered as long as either stage does.
    """

    def __init__(self, plan: UnitPlan) -> None:
        self._plan = plan
        self._users: Counter[str] = Counter()

    def gather(self, stage: int) -> list[Unit]:
        """The stage is to be there: the units that are not yet."""
        return self._change(stage, 1, at=0)

    def free(self, stage: int) -> list[Unit]:
        """The stage may go: the units that no other stage needs."""
        return self._change(stage, -1, at=1)

    def _change(self, stage: int, by: int, at: int) -> list[Unit]:
        users, found = self._users, []
        for unit in self._plan.stage_units[stage]:
            if users[unit.name] == at:
                found.append(unit)
            users[unit.name] += by
        return found


def usual_backend(cluster: Cluster | None) -> Backend:
    """Backend of the collectives on a cluster; None: processes of this machine."""
    if cluster is not None and cluster.device.kind == "cuda":
        return "nccl"
    return "shared" if cluster is None or cluster.nodes == 1 else "gloo"


def unit_plan(
    model: Model, layout: Layout, workload: Workload, *, rank: int = 0, backend: Backend = "shared"
) -> UnitPlan:
    """The plan of `rank`. Shapes are equal on all ranks; only which rows and heads a rank holds differs."""
    if isinstance(model, Blueprint) and layout.pp > 1:
        model = model.piped
    if isinstance(model, Blueprint) and layout.tp == layout.ep == 1:
        model = model.with_whole_experts
    if isinstance(model, Blueprint) and layout.sp:
        # What it adds is in the description; the layout's own means a decoder's stream.
        model, layout = model.on_shards, replace(layout, sp=False)
    mesh = Mesh.of(layout, model)
    axes = {"tp_rank": TP, "pp_rank": PP, "cp_rank": CP, "ep_rank": EP}
    places: dict[str, Any] = {name: mesh.index(axis, rank) for name, axis in axes.items()}
    return UnitPlan(model, layout, workload, backend=backend, **places)
