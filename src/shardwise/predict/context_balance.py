"""Attention's work on each context-parallel rank, by the cut that runs and by a plain one."""

from collections.abc import Iterable
from dataclasses import replace

from shardwise.codec import Json
from shardwise.layout import Layout, Workload
from shardwise.layout.context import SequenceCut
from shardwise.model.operations import AttentionCore
from shardwise.model.parameters import Model, blueprint
from shardwise.records import dataclass


@dataclass(frozen=True)
class ContextBalance(Json):
    """Forward FLOPs of attention per sequence and context-parallel rank: of all layers, and of the tensor- and
    pipeline-parallel ranks together."""

    json_keys = "* largest_over_mean=largest plain_largest_over_mean=plain_largest"

    zigzag: bool
    """Whether ranks attend with tokens in zigzag order; else with some of the heads over all tokens (Ulysses)."""
    flops: tuple[int, ...]
    """FLOPs per rank of the layout's cut."""
    plain_flops: tuple[int, ...]
    """FLOPs per rank with consecutive tokens."""

    @property
    def largest(self) -> float:
        """The busiest rank's FLOPs over the mean."""
        return largest_over_mean(self.flops)

    @property
    def plain_largest(self) -> float:
        return largest_over_mean(self.plain_flops)


def largest_over_mean(work: tuple[int, ...]) -> float:
    return max(work) * len(work) / sum(work)


def context_balance(model: Model, layout: Layout, workload: Workload) -> ContextBalance:
    """The balance under a layout with cp > 1. Pairs of documents that do not see each other count, too."""
    cut = SequenceCut.of(layout, workload.seq)
    ranks, plain = range(cut.cp), replace(cut, zigzag=False)
    if cut.zigzag:
        flops = tuple(_flops(model, cut.places(rank)) for rank in ranks)
    else:
        flops = (_flops(model, (range(cut.seq),)) // cut.cp,) * cut.cp
    return ContextBalance(cut.zigzag, flops, tuple(_flops(model, plain.places(rank)) for rank in ranks))


def _flops(model: Model, places: Iterable[range]) -> int:
    """Attention FLOPs of all layers' queries at these places of a sequence."""
    runs = tuple(places)
    return sum(
        part.count * core.flops(core.pairs(run.stop) - core.pairs(run.start))
        for part in blueprint(model).parts
        for core in part.operations
        if isinstance(core, AttentionCore)
        for run in runs
    )
