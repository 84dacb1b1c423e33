"""Memory of blocks that no decoder here computes: mixtures of experts, and latent attention.

To memory, such a block is a dense one with as wide an inner part for each token and heads as wide (`alike`), and what
routing and low ranks save beside that (`more`); experts are units of their own, since they have other ranks to be
sharded over. Tokens are taken to spread evenly over the experts, none dropped: a rank's experts then see as many rows
as its own tokens choose. Megatron-Core's split is assumed: experts are never cut, routers and the low ranks' first
projections are on every tp rank, shared experts and all else is split over tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout import Layout, Mesh, UnitPlan, Workload
from shardwise.layout.axes import REPLICATE, SHARD, TP
from shardwise.layout.placement import place
from shardwise.layout.units import Backend, Unit, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.parameters import blueprint

if TYPE_CHECKING:
    from shardwise.predict.memory.activations import Sizes

ROUTING_BYTES = 8
"""Saved for a token and expert: its probability in fp32, and the map of what was chosen, with the logits' gradient to
be made of them."""


@lru_cache(maxsize=64)
def alike(model: ModelConfig) -> ModelConfig:
    """The model itself, or a dense one with plain attention whose blocks save as much in their widths."""
    changes: dict[str, Any] = {}
    if experts := model.experts:
        changes |= {"experts": None, "ffn": (experts.active + experts.shared) * experts.ffn}
    if latent := model.latent_attention:
        # Queries and keys are wider than values and what comes out: in all, four of the mean width.
        both = latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim
        changes |= {"latent_attention": None, "kv_heads": model.heads, "head_dim": 2 * -(-both // 4)}
    return model.replace(**changes) if changes else model


class More(NamedTuple):
    """Bytes of one micro-batch beyond those of a block `alike` and of a plain embedding."""

    embedding: int
    """Saved by the embedding."""
    block: int
    """Saved by a block."""
    kept: int
    """Kept by a block from the gradient of its input to that of its weights."""
    in_block: int
    """Transients of a block's backward."""


NOTHING = More(0, 0, 0, 0)


def more(model: ModelConfig, s: Sizes, recompute: str) -> More:
    """Saved tensors of routing, low ranks and a norm after the embedding."""
    if not (model.experts or model.latent_attention or model.embedding_norm):
        return NOTHING
    saved = rows = 0
    if latent := model.latent_attention:
        # Each low rank before and after its norm, and the keys' rotated part.
        saved += s.stream * (2 * latent.q_rank + 2 * latent.kv_rank + latent.rope_head_dim) * s.element
    if experts := model.experts:
        # The rows that experts read, and those that they return, which the probabilities' gradients are made of.
        rows = s.stream * experts.active * s.hidden * s.element
        saved += 2 * rows + s.stream * experts.count * ROUTING_BYTES
    again = recompute == "full"
    norm = (s.stream * s.hidden + 2 * s.stream) * s.element if model.embedding_norm else 0
    return More(norm, 0 if again else saved, 2 * rows, rows + (saved if again else 0))


class BlockElements:
    """Elements of the parameters of blocks on one of tp ranks."""

    def __init__(self, model: ModelConfig, tp: int) -> None:
        self.model, self.tp = model, tp
        self._first = model.layers if not model.experts else min(model.experts.dense_layers, model.layers)

    def _elements(self, mixture: bool) -> tuple[int, int]:
        """Elements of a block with or without experts: (all else on one of tp ranks, the experts of all ranks)."""
        parts = (part for part in blueprint(self.model).of_kind("block") if _has_experts(part) == mixture)
        rows = [p for part in parts for p in part.parameters]
        dense = sum(place(p, Layout(tp=self.tp), 0).numel for p in rows if p.cut != "expert")
        return dense, sum(p.numel for p in rows if p.cut == "expert")

    @cached_property
    def without(self) -> int:
        """Elements of a block without experts."""
        return self._elements(mixture=False)[0]

    @cached_property
    def routed(self) -> tuple[int, int]:
        """Elements of a block with experts: (all else, the experts of all ranks)."""
        return self._elements(mixture=True)

    def dense_blocks(self, pp: int, virtual: int, place: int) -> int:
        """Blocks without experts, which are the model's first ones, among those of a pipeline's rank."""
        each, rest = divmod(self.model.layers, pp * virtual)
        stages = range(place, pp * virtual, pp)
        starts = ((stage * each + min(stage, rest), each + (stage < rest)) for stage in stages)
        return sum(max(0, min(self._first - start, blocks)) for start, blocks in starts)

    def of_block(self, index: int, ep: int) -> tuple[int, int]:
        """Elements of one block of the model on a rank: (all else, experts)."""
        if index < self._first:
            return self.without, 0
        dense, experts = self.routed
        return dense, experts // ep


@lru_cache(maxsize=64)
def block_elements(model: ModelConfig, tp: int) -> BlockElements:
    """`BlockElements`, counted once."""
    return BlockElements(model, tp)


def sharing(layout: Layout) -> int:
    """Ranks of a ZeRO group that hold the same experts."""
    return max(layout.shard_ranks * layout.tp // layout.ep, 1) if layout.stage else 1


@dataclass(frozen=True)
class SizedUnit(Unit):
    """A unit known by its size only."""

    elements: int = 0

    @cached_property
    def numel(self) -> int:
        return self.elements


@dataclass(frozen=True)
class MixturePlan(UnitPlan):
    """The units of a model with experts or latent attention. The experts of a block are a unit besides."""

    def _units_in(self, part: str) -> list[Unit]:
        if self.kind(part) != "block":
            return super()._units_in(part)
        own, experts = block_elements(self.model, self.layout.tp).of_block(int(part.split(".")[1]), self.layout.ep)
        common = (), self._slot(part), self.layout.shard_ranks, SHARD, REPLICATE, ()
        unit = SizedUnit(part, *common, elements=own)
        if not experts:
            return [unit]
        slot, ranks = f"{unit.slot} experts", sharing(self.layout)
        return [unit, replace(unit, name=_experts(part), slot=slot, shard_ranks=ranks, elements=experts)]

    def units_of(self, part: str) -> list[Unit]:
        return super().units_of(part) + [unit for unit in (self.by_name.get(_experts(part)),) if unit]

    def finished_after(self, part: str) -> list[Unit]:
        return super().finished_after(part) + [unit for unit in (self.by_name.get(_experts(part)),) if unit]


def _experts(part: str) -> str:
    return f"{part}.experts"


def _has_experts(part: Part) -> bool:
    return any(p.cut == "expert" for p in part.parameters)


def memory_plan(model: ModelConfig, layout: Layout, workload: Workload, pp_rank: int, backend: Backend) -> UnitPlan:
    """The plan whose events are the memory of a rank of the pipeline."""
    mesh = Mesh.of(layout, model)
    rank = mesh.rank(pp=pp_rank)
    if not (model.experts or model.latent_attention):
        return unit_plan(model, layout, workload, rank=rank, backend=backend)
    return MixturePlan(model, layout, workload, mesh.index(TP, rank), backend, pp_rank)
