"""Parameters of blocks with and without experts, counted for many layouts at once."""

from __future__ import annotations

from functools import cached_property, lru_cache

from shardwise.layout import Layout
from shardwise.layout.placement import place
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.parameters import blueprint


class BlockElements:
    """Elements of the parameters of blocks on one of tp ranks."""

    def __init__(self, model: ModelConfig, tp: int) -> None:
        self.model, self.tp = model, tp
        self._first = model.layers if not model.experts else min(model.experts.dense_layers, model.layers)

    def _elements(self, mixture: bool, expert_tp: int = 1) -> tuple[int, int]:
        parts = (part for part in blueprint(self.model).of_kind("block") if _has_experts(part) == mixture)
        layout = Layout(tp=self.tp, etp=expert_tp if mixture else 0)
        rows = [(p, place(p, layout, 0).numel) for p in next(parts).parameters]
        return tuple(sum(n for p, n in rows if (p.cut == "expert") == of) for of in (False, True))  # type: ignore[return-value]

    @cached_property
    def without(self) -> int:
        """Elements of a block without experts."""
        return self._elements(mixture=False)[0] if self._first else 0

    def routed(self, expert_tp: int) -> tuple[int, int]:
        """Elements of a block with experts: (all else, the experts of all ranks). expert_tp: ranks that share the width
        of an expert."""
        return (
            self._elements(mixture=True, expert_tp=expert_tp) if self._first < self.model.layers else (self.without, 0)
        )

    def dense_blocks(self, pp: int, virtual: int, place: int) -> int:
        """Blocks without experts, which are the model's first ones, among those of a pipeline's rank."""
        each, rest = divmod(self.model.layers, pp * virtual)
        stages = range(place, pp * virtual, pp)
        starts = ((stage * each + min(stage, rest), each + (stage < rest)) for stage in stages)
        return sum(max(0, min(self._first - start, blocks)) for start, blocks in starts)


@lru_cache(maxsize=64)
def block_elements(model: ModelConfig, tp: int) -> BlockElements:
    """`BlockElements`, counted once."""
    return BlockElements(model, tp)


def _has_experts(part: Part) -> bool:
    return any(p.cut == "expert" for p in part.parameters)
