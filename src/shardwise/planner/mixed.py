"""What blocks of models take that no decoder here computes: mixtures of experts, and latent attention.

To memory, such a block is a dense one with as wide an inner part for each token and heads as wide (`alike`), and what
routing and low ranks save beside that (`more`); its parameters are counted apart, since experts have other ranks to be
sharded over (`Mixed`). Tokens are taken to spread evenly over the experts, none dropped: a rank's experts then see as
many rows as its own tokens choose. Megatron-Core's split is assumed: experts are never cut, routers and the low ranks'
first projections are on every tp rank, shared experts and all else is split over tp.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout import Layout
from shardwise.layout.placement import place
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.parameters import blueprint
from shardwise.planner.space import LayoutColumns
from shardwise.predict.memory.activations import Sizes

Num = Any

ROUTING_BYTES = 8
"""Saved for a token and expert: its probability in fp32, and the map of what was chosen, with the logits' gradient to
be made of them."""


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
    """Bytes of one micro-batch beyond those of a block `alike` and of a plain embedding: saved by the embedding and by
    a block, kept from the gradient of its input to that of its weights, and passing in its backward."""

    embedding: int
    block: int
    kept: int
    in_block: int


def more(model: ModelConfig, s: Sizes, recompute: str) -> More:
    """What routing, low ranks and a norm after the embedding save. s: sizes of the model that is `alike`."""
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


class Mixed:
    """The parameters of blocks of a model with experts or latent attention on one of tp ranks."""

    def __init__(self, model: ModelConfig, tp: int) -> None:
        self.model, self.tp = model, tp
        self._first = model.layers if not model.experts else min(model.experts.dense_layers, model.layers)

    def _numel(self, mixture: bool) -> tuple[int, int]:
        """Elements of a block with or without experts: (all else on one of tp ranks, the experts of all ranks)."""
        parts = (part for part in blueprint(self.model).of_kind("block") if _has_experts(part) == mixture)
        found = [p for part in parts for p in part.parameters]
        own = sum(place(p, Layout(tp=self.tp), 0).numel for p in found if p.cut != "expert")
        return own, sum(p.numel for p in found if p.cut == "expert")

    @cached_property
    def _dense(self) -> int:
        """Elements of a block without experts."""
        return self._numel(mixture=False)[0]

    @cached_property
    def _routed(self) -> tuple[int, int]:
        """Elements of a block with experts."""
        return self._numel(mixture=True)

    def held(self, frame: LayoutColumns, place: int, layers: int) -> tuple[Num, Num]:
        """Elements of one of the `layers` blocks that a pipeline's rank has, whole and one rank's shard of it: means,
        arrays of shardings x orders."""
        ranks = np.array([sharding.ranks for sharding in frame.shardings])[:, None]
        stage = np.array([sharding.stage for sharding in frame.shardings])[:, None]
        same = np.where(stage > 0, np.maximum(ranks * self.tp // frame.ep, 1), 1)
        dense = np.array([self._without(frame.pp, order.virtual, place, layers) for order in frame.orders])
        own, experts = self._routed
        parts = ((dense, self._dense, ranks), (layers - dense, own, ranks), (layers - dense, experts // frame.ep, same))
        shards = [(count * -(-numel // n), n) for count, numel, n in parts]
        return sum(shard * n for shard, n in shards) / layers, sum(shard for shard, _ in shards) / layers

    def _without(self, pp: int, virtual: int, place: int, layers: int) -> int:
        """Blocks without experts, which are the model's first ones, among those of a pipeline's rank."""
        if virtual == 1:
            before = place * (self.model.layers // pp) + min(place, self.model.layers % pp)
            return max(0, min(self._first - before, layers))
        each = self.model.layers // (pp * virtual)
        starts = (chunk * each for chunk in range(place, pp * virtual, pp))
        return sum(max(0, min(self._first - start, each)) for start in starts)


def _has_experts(part: Part) -> bool:
    return any(p.cut == "expert" for p in part.parameters)
