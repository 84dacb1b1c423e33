"""Facts of a rank's parts: its blocks, their windows, and whether its head reads a copy of the embedding."""

from functools import cached_property

from shardwise.model.blueprint import Blueprint
from shardwise.model.operations import AttentionCore
from shardwise.records import dataclass


@dataclass(frozen=True)
class LocalParts:
    """Parts of the stages that one rank has. stages: stage -> its parts."""

    blueprint: Blueprint
    stages: dict[int, list[str]]

    def blocks(self, stage: int) -> list[str]:
        """Blocks of a stage."""
        return [part for part in self.stages[stage] if self.blueprint.kind(part) == "block"]

    @cached_property
    def first_blocks(self) -> list[str]:
        """The first block of every stage that has some."""
        return [blocks[0] for stage in self.stages if (blocks := self.blocks(stage))]

    @cached_property
    def windows(self) -> frozenset[int]:
        """Windows of its blocks' attention; 0 for blocks that attend to all tokens."""
        blocks = {id(part): part for stage in self.stages for part in map(self.blueprint.part, self.blocks(stage))}
        return frozenset(
            op.window for part in blocks.values() for op in part.operations if isinstance(op, AttentionCore)
        )

    @cached_property
    def copies_table(self) -> bool:
        """Whether the head's tied table is a copy of one that another rank of the pipeline has for its embedding."""
        parts = [part for held in self.stages.values() for part in held]
        reads = any(self.blueprint.part(name).reads for name in parts)
        return reads and self.blueprint.table.part not in parts
