"""`StageLayers`: which layers each stage of a pipeline has, and where the embedding and the head are.

Stages are counted from the first layers of the model to the last, whichever rank has them
(`PipelineSchedule.placement`). Data flows from stage to stage, so that the embedding is on the first and the head on
the last; either may have no other layers (`stages=0/20/20/0`).
"""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.records import dataclass

BARE_ENDS = 2
"""Stages without layers that a pipeline may have: the first with the embedding, the last with the head."""


@dataclass(frozen=True)
class StageLayers:
    """Layers of each pipeline stage. layers: blocks of each stage. tied: the head's table is the embedding's."""

    layers: tuple[int, ...]
    tied: bool = False

    def __post_init__(self) -> None:
        inner = self.layers[1:-1]
        if not self.layers or min(self.layers) < 0 or (inner and min(inner) == 0) or not sum(self.layers):
            raise UserError(
                f"stages={self}: every stage needs layers, but the first (with the embedding) and the last (with the "
                "head), which may have 0"
            )

    @classmethod
    def even(cls, layers: int, stages: int, tied: bool = False) -> StageLayers:
        """As even as can be, the first stages with one more. With two stages more than layers, the embedding and the
        head are stages of their own: 0/1/.../1/0, as Llama 3 405B was cut (Llama team 2024, section 3.3.2). Raises
        `UserError` for other numbers of stages beyond the layers."""
        if layers > 0 and stages == layers + BARE_ENDS:
            return cls((0, *(1,) * layers, 0), tied)
        if stages < 1 or layers < stages:
            raise UserError(
                f"p x v = {stages} stages for {layers} layers; give at most {layers}, or {layers + BARE_ENDS}: "
                "the embedding and the head alone on the first and the last"
            )
        return cls(tuple(layers // stages + (i < layers % stages) for i in range(stages)), tied)

    @classmethod
    def parse(cls, text: str, stages: int, layers: int | None = None, tied: bool = False) -> StageLayers:
        """From 21/20/20/19: one number for each of `stages` stages, which add up to `layers` where these are known.

        Raises `UserError` with what would be right.
        """
        words = text.split("/")
        if not all(word.strip().isdecimal() and len(word) < 8 for word in words):
            raise UserError(f"stages={text}: give layers for each stage, such as 21/20/20/19")
        found = tuple(map(int, words))
        if len(found) != stages:
            raise UserError(f"stages={text}: give p x v = {stages} numbers of layers, not {len(found)}")
        if layers is not None and sum(found) != layers:
            example = cls.even(layers, stages)
            raise UserError(f"stages={text}: the layers add up to {sum(found)}, not {layers}; such as stages={example}")
        return cls(found, tied)

    def __str__(self) -> str:
        return "/".join(map(str, self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    def shares(self, embedding: float = 0, head: float = 0) -> tuple[float, ...]:
        """Share of the model's work of each stage. embedding, head: their work in blocks."""
        work: list[float] = list(self.layers)
        work[0] += embedding
        work[-1] += head
        return tuple(each / sum(work) for each in work)
