"""`UnitPlan`: the units that are gathered, reduced and freed together. Planner and runtime both follow it.

A unit is one flat buffer: every local (tensor-parallel) parameter of one part of the decoder, end to end. Inside it,
parameters are ordered by what must happen to their gradients, so that each treatment is one contiguous span:

    [ split over tp | gradient summed over kv replicas | gradient summed over tp | replicated ]

Parameters that are frozen are units of their own beside the trained ones: they have no gradients and no optimizer
state, and below stage 3 every rank has them whole. Frozen matrices in fewer bits are a third unit, of bytes.

A ZeRO shard is interval `r` of the flat buffer cut into `shard_ranks` equal pieces, the last ones padded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import pipeline
from shardwise.layout.algorithms import Schedules
from shardwise.layout.axes import CP, DATA, EDP, EP, HPZ, HPZ_ACROSS, KV, PP, REPLICATE, SHARD, TP, Axes
from shardwise.layout.context import SequenceCut
from shardwise.layout.dtypes import Dtypes
from shardwise.layout.experts import RankRouting, RoutedRows
from shardwise.layout.layout import Layout
from shardwise.layout.local_parts import LocalParts
from shardwise.layout.mesh import Mesh
from shardwise.layout.pipeline import RankSchedule
from shardwise.layout.placement import Placed, place
from shardwise.layout.unit import Backend, Hop, Unit, device_of, experts_of, frozen_of, narrow_of
from shardwise.layout.wire import WIRE_DTYPE
from shardwise.layout.workload import Workload
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint, PartKind
from shardwise.model.lora import INT8
from shardwise.model.parameters import Model, blueprint
from shardwise.ops.fusion import FusedForm, fused_form
from shardwise.records import dataclass


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
        return device_of(self.backend) == "cuda"

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

    @cached_property
    def local(self) -> LocalParts:
        """Blocks and other facts of its parts."""
        return LocalParts(self.blueprint, self.stages)

    @cached_property
    def pipeline(self) -> RankSchedule:
        """The order in which its stages compute."""
        early = pipeline.releases_early(self.layout) and not self.blueprint.freezes
        return RankSchedule(self.layout, self.pp_rank, self.blueprint.sums_table, early, self._count)

    @cached_property
    def dtypes(self) -> Dtypes:
        """dtypes of its units and gradients."""
        return Dtypes(self.layout, self.trains, self._count)

    @cached_property
    def parts(self) -> list[str]:
        """The parts that this rank holds, in the order in which tokens pass through them."""
        return [part for held in self.stages.values() for part in held]

    def of_kind(self, kind: PartKind) -> list[str]:
        return [part for part in self.parts if self.blueprint.kind(part) == kind]

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
        copies = self.mesh.size(REPLICATE) if self.blueprint.routes else 1
        rest = [p for p in placed if p.kind != "expert" and p.name not in shared]
        if self.blueprint.part(part).reads and self.local.copies_table:
            # the last pipeline stage holds a copy of the table for its head
            tied = [place(self.blueprint.table, self.layout, self.tp_rank)]
        for name, of, slot in (("tied", tied, "tied"), (part, rest, self._slot(part))):
            trained = [p for p in of if not p.parameter.frozen]
            frozen = [p for p in of if p.parameter.frozen and not p.parameter.dtype]
            narrow = [p for p in of if p.parameter.dtype]
            if trained:
                found.append(self._sharded(name, self._ordered(trained), slot, SHARD, REPLICATE, copies))
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
        if self.layout.pp > 1 or self.blueprint.kind(part) == "root":
            return part
        if (place := self._places_of_blocks.get(part)) is None:
            return "outer"
        return "inner" if place % 2 == 0 or place == len(self._places_of_blocks) - 1 else "outer"

    @cached_property
    def _places_of_blocks(self) -> dict[str, int]:
        return {block: place for place, block in enumerate(self.of_kind("block"))}

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
            hops.append(Hop("all_reduce", replicate, self.dtypes.gradients, 1))
        copied = self.mesh.size(HPZ) if shard == SHARD and self.trains else 1
        again, copied = (HPZ, copied) if copied > 1 else (shard, 0)
        return Unit(name, placed, slot, self.mesh.size(shard), shard, replicate, again, copied, tuple(hops), copies)

    def _hops(self, shard: Axes) -> list[Hop]:
        """From full gradients to the sum over a shard group. Packed ones take two hops where a few ranks are near each
        other: first among these, so that less is left to go further."""
        if not self.layout.qgz or self.mesh.size(shard) == 1:
            return [Hop("reduce_scatter", shard, self.dtypes.wire, self.reductions)]
        over = (HPZ, HPZ_ACROSS) if shard == SHARD and self.mesh.size(HPZ) > 1 else (shard,)
        return [Hop("all_to_all", axes, WIRE_DTYPE, self.reductions) for axes in over]

    def as_micro_batch(self, micro: int) -> UnitPlan:
        """A copy whose every micro-batch has exchanged the rows that one of them has."""
        assert self.routed
        return replace(self, routed=RoutedRows(tuple((part, of[micro : micro + 1]) for part, of in self.routed.rows)))

    @cached_property
    def routing(self) -> RankRouting:
        """Tokens that the rank routes to experts."""
        experts = self.subject.experts
        return RankRouting(
            self.blueprint, self.layout, self.sequence, self.tokens, self.stream_tokens, self.tp_rank, self.cp_rank,
            experts.active if experts else 0, self.routed,
        )  # fmt: skip

    @cached_property
    def by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    def units_of(self, part: str) -> list[Unit]:
        """The units whose weights `part` reads."""
        names = [part, frozen_of(part), narrow_of(part), experts_of(part), frozen_of(experts_of(part))]
        if part in self.blueprint.sharing:
            names = ["tied", frozen_of("tied"), *names]
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

    def _count(self) -> int:
        return self.micro_batches

    def _of_micro_batches(self, count: int) -> UnitPlan:
        """A copy of the plan for a step of `count` micro-batches."""
        batch = count * self.layout.micro * self.layout.dp
        return self if count == self.micro_batches else replace(self, workload=replace(self.workload, batch=batch))

    @cached_property
    def short(self) -> UnitPlan:
        """The plan of the shorter step."""
        steady = self.pipeline.steady
        return self._of_micro_batches(steady.micro if steady else min(self.micro_batches, 3))

    @cached_property
    def longer(self) -> UnitPlan:
        """The plan of a step that is a period longer than the shorter one."""
        return self._of_micro_batches(self.short.micro_batches + self.pipeline.period)

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
    def reductions(self) -> int:
        """Times that a step sums full gradients: after each micro-batch from stage 2 on."""
        return self.micro_batches if self.layout.stage >= 2 else 1


def usual_backend(cluster: Cluster | None) -> Backend:
    """Backend of the collectives on a cluster; None: processes of this machine."""
    if cluster is not None and cluster.device.kind == "cuda":
        return "nccl"
    return "shared" if cluster is None or cluster.nodes == 1 else "gloo"


def unit_plan(
    model: Model, layout: Layout, workload: Workload, *, rank: int = 0, backend: Backend = "shared"
) -> UnitPlan:
    """The plan of `rank`. Shapes are equal on all ranks; only which rows and heads a rank holds differs."""
    if isinstance(model, Blueprint):
        model = model.piped if layout.pp > 1 else model
        model = model.with_whole_experts if layout.tp == layout.ep == 1 else model
        if layout.sp:  # what it adds is in the description; the layout's own means a decoder's stream
            model, layout = model.on_shards, replace(layout, sp=False)
    mesh = Mesh.of(layout, model)
    axes = {"tp_rank": TP, "pp_rank": PP, "cp_rank": CP, "ep_rank": EP}
    places: dict[str, Any] = {name: mesh.index(axis, rank) for name, axis in axes.items()}
    return UnitPlan(model, layout, workload, backend=backend, **places)
