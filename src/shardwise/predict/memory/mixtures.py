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

@lru_cache(maxsize=64)
def alike(model: ModelConfig) -> ModelConfig:
    """The model itself, or a dense one with plain attention whose blocks save as much in their widths."""
    changes: dict[str, Any] = {}
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
    if not (model.latent_attention or model.embedding_norm):
        return NOTHING
    saved = 0
    if latent := model.latent_attention:
        # Each low rank before and after its norm, and the keys' rotated part.
        saved += s.stream * (2 * latent.q_rank + 2 * latent.kv_rank + latent.rope_head_dim) * s.element
    again = recompute == "full"
    norm = (s.stream * s.hidden + 2 * s.stream) * s.element if model.embedding_norm else 0
    return More(norm, 0 if again else saved, 0, saved if again else 0)


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


def _has_experts(part: Part) -> bool:
    return any(p.cut == "expert" for p in part.parameters)
