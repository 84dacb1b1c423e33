"""Saved activations of a rank, tensor by tensor: what `predict_bytes` counts as one class."""

from collections import Counter
from dataclasses import dataclass

from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.activations import kept_items, saved_items, saved_mask
from shardwise.predict.memory.pipeline import most_under_way
from shardwise.predict.memory.sizes import Sizes

MASK = "mask of packed documents"


@dataclass(frozen=True)
class SavedTerm:
    """One tensor that is saved for backward."""

    part: str
    """"embedding", "block" or "head"; "deferred" for tensors that a pipeline keeps for later gradients of weights."""
    name: str
    nbytes: int
    """Bytes on the rank when its saved activations are the most."""
    count: int
    """Such tensors: parts of the rank times micro-batches under way."""


def saved_terms(plan: UnitPlan) -> tuple[SavedTerm, ...]:
    """Every kind of saved tensor of a model with a configuration, in the order of the forward pass. Their sum is the
    class `saved` of `predict_bytes`."""
    s = Sizes.of(plan)
    sums: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()

    def add(kind: str, items: dict[str, int], times: int) -> None:
        for name, nbytes in items.items():
            sums[kind, name] += times * nbytes
            counts[kind, name] += times

    if plan.layout.pp == 1:
        for part in plan.parts:
            add(plan.kind(part), saved_items(plan, s, part), 1)
        masks = 1
    else:
        way = most_under_way(plan)
        for stage, parts in plan.stages.items():
            for part in parts:
                add(plan.kind(part), saved_items(plan, s, part), way.saved[stage])
                add("deferred", kept_items(plan, s, part), way.kept[stage])
        masks = way.attending
    add("block", {MASK: saved_mask(plan, s)}, masks)
    return tuple(SavedTerm(kind, name, nbytes, counts[kind, name]) for (kind, name), nbytes in sums.items() if nbytes)
