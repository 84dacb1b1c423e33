"""`PipelineSchedule`: for each rank of a pipeline, the list of its actions; and where stages live.

The model is cut into stages (chunks of consecutive layers), v of them on each of p ranks. `placement` says which rank
has which: around the ranks again and again (`loop`), or down and up again (`vee`), where the first and the last stage
meet on rank 0, and no message passes at the turn.

`StageLayers`: which layers each stage of a pipeline has, and where the embedding and the head are.

Stages are counted from the first layers of the model to the last, whichever rank has them
(`PipelineSchedule.placement`). Data flows from stage to stage, so that the embedding is on the first and the head on
the last; either may have no other layers (`stages=0/20/20/0`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Literal, Self

from shardwise.errors import UserError
from shardwise.options import runs_in, runs_text
from shardwise.records import dataclass
from shardwise.schedule.pipeline.action import Action

MOST_PASSES = 500_000
"""Forward passes of a schedule that is read or made action by action: about a minute to simulate, and a gigabyte."""

Reduce = Literal["step", "micro"]
End = tuple[int, int]
"""(stage, micro-batch)."""


def loop(p: int, v: int) -> tuple[int, ...]:
    """Stage -> rank: 0 1 2 0 1 2."""
    return tuple(range(p)) * v


def vee(p: int) -> tuple[int, ...]:
    """Stage -> rank: 0 1 2 2 1 0."""
    return (*range(p), *reversed(range(p)))


@dataclass(frozen=True)
class PipelineSchedule:
    """Actions of every rank in one step.

    name: the generator's. micro: micro-batches. placement: stage -> rank. actions: rank -> its list.
    train: there is a backward pass. gather: parameters are gathered and freed by stage (ZeRO-3).
    reduce: gradients are reduced once a step, or for each micro-batch. tied: the first and the last stage hold the same
    table. ring: with n > 0, what the last stage makes of micro-batch k is the input of micro-batch k + n on the first
    (decoding: n sequences in flight, one token after the other). options: what the generator was given besides.
    """

    name: str
    micro: int
    placement: tuple[int, ...]
    actions: Sequence[tuple[Action, ...]]
    train: bool = True
    gather: bool = False
    reduce: Reduce = "step"
    tied: bool = False
    ring: int = 0
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.actions]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @property
    def virtual(self) -> int:
        """Stages a rank: the most that one has."""
        return max(map(len, self.held))

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage: not the last rank in a V."""
        return self.placement[-1]

    @property
    def tied_ends(self) -> tuple[int, ...]:
        """The ranks that hold a copy of the tied table and must add up its gradients: two, or none."""
        first, last = self.placement[0], self.placement[-1]
        return (first, last) if self.tied and self.train and first != last else ()

    def tied_here(self, stage: int) -> bool:
        """Whether this is the first stage and its rank has the last one, too: both use one copy of the table."""
        return self.tied and stage == 0 and self.placement[0] == self.placement[-1]

    def input_of(self, stage: int, micro: int) -> End | None:
        """Source of a forward's input; None where the step's data are."""
        if stage:
            return stage - 1, micro
        return (self.stages - 1, micro - self.ring) if self.ring and micro >= self.ring else None

    def output_of(self, stage: int, micro: int) -> End | None:
        """Destination of a forward's output; None at the end."""
        if stage + 1 < self.stages:
            return stage + 1, micro
        return (0, micro + self.ring) if self.ring and micro + self.ring < self.micro else None

    def crosses(self, a: int, b: int) -> bool:
        return self.placement[a] != self.placement[b]

    def partner(self, action: Action) -> Action | None:
        """The other end of a message, as it must stand in the peer's list; None where there is no such message."""
        kind, stage, micro = action.kind, action.stage, action.micro
        if kind == "SUM_TIED":
            return Action(kind, 0 if stage else self.stages - 1, peer=self.placement[stage])
        if kind == "SEND_F":
            other, twin = self.output_of(stage, micro), "RECV_F"
        elif kind == "RECV_F":
            other, twin = self.input_of(stage, micro), "SEND_F"
        elif kind == "SEND_B":
            other, twin = ((stage - 1, micro) if stage else None), "RECV_B"
        else:
            other, twin = ((stage + 1, micro) if stage + 1 < self.stages else None), "SEND_B"
        if other is None or not self.crosses(stage, other[0]):
            return None
        return Action(twin, *other, self.placement[stage])  # type: ignore[arg-type]


BARE_ENDS = 2
"""Stages without layers that a pipeline may have: the first with the embedding, the last with the head."""


@dataclass(frozen=True)
class StageLayers:
    """Layers of each pipeline stage."""

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        inner = self.layers[1:-1]
        if not self.layers or min(self.layers) < 0 or (inner and min(inner) == 0) or not sum(self.layers):
            raise UserError(
                f"stages={self}: every stage needs layers, but the first (with the embedding) and the last (with the "
                "head), which may have 0"
            )

    @classmethod
    def even(cls, layers: int, stages: int) -> Self:
        """As even as can be, the first stages with one more. With two stages more than layers, the embedding and the
        head are stages of their own: 0/1/.../1/0, as Llama 3 405B was cut (Llama team 2024, section 3.3.2). Raises
        `UserError` for other numbers of stages beyond the layers."""
        if layers > 0 and stages == layers + BARE_ENDS:
            return cls((0, *(1,) * layers, 0))
        if stages < 1 or layers < stages:
            raise UserError(
                f"p x v = {stages} stages for {layers} layers; give at most {layers}, or {layers + BARE_ENDS}: "
                "the embedding and the head alone on the first and the last"
            )
        return cls(tuple(layers // stages + (i < layers % stages) for i in range(stages)))

    @classmethod
    def weighed(cls, layers: int, stages: int, ends: tuple[int, int]) -> Self:
        """As even as can be where the embedding and the head count as so many layers (`ends`), as Megatron-Core's
        account_for_embedding_in_pipeline_split and torchtitan have it. The last stages but one have one more: the first
        ones hold most micro-batches. Raises `UserError` as `even` does, and for stages without layers between the
        ends."""
        if not any(ends):
            return cls.even(layers, stages)
        least, rest = divmod(layers + sum(ends), stages)
        counts = [least + (stages - 1 - rest <= i < stages - 1) for i in range(stages)]
        counts[0] -= ends[0]
        counts[-1] -= ends[1]
        return cls(tuple(counts))

    @classmethod
    def parse(cls, text: str, stages: int, layers: int | None = None) -> Self:
        """From 21/20/20/19 or 1/6x2/1: one number for each of `stages` stages, which add up to `layers` where these are
        known.

        Raises `UserError` with what would be right.
        """
        try:
            counts = runs_in(text)
        except ValueError:
            raise UserError(f"stages={text}: give layers for each stage, such as 21/20/20/19 or 1/6x2/1") from None
        if len(counts) != stages:
            raise UserError(f"stages={text}: give p x v = {stages} numbers of layers, not {len(counts)}")
        if layers is not None and (total := sum(counts)) != layers:
            example = cls.even(layers, stages)
            raise UserError(f"stages={text}: the layers add up to {total}, not {layers}; such as stages={example}")
        return cls(counts)

    def __str__(self) -> str:
        return runs_text(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def shares(self, head: float = 0) -> tuple[float, ...]:
        """Share of the model's work of each stage. head: its work in blocks."""
        work: list[float] = list(self.layers)
        work[-1] += head
        return tuple(each / sum(work) for each in work)
