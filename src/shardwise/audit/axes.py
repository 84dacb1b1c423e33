"""Axes of parallelism from the groups of a program's calls, and what each axis is used for."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from shardwise.audit.calls import Call
from shardwise.codec import Json


@dataclass(frozen=True)
class Axis(Json):
    """Groups of one size and stride, such as (0, 2) and (1, 3)."""

    size: int
    stride: int
    """Between ranks of a group; 0 where it varies."""
    groups: int
    calls: Mapping[str, float]
    """Operation -> calls per rank of the groups."""
    nbytes: Mapping[str, float]
    """Operation -> bytes that a rank gives, all calls."""
    guess: str
    """Use that the operations suggest; "" without an idea."""

    @property
    def name(self) -> str:
        """The ranks in words: "2 ranks, 4 apart"."""
        apart = {0: ", uneven", 1: " next to each other"}.get(self.stride, f", {self.stride} apart")
        return f"{self.size} ranks{apart}" if self.size else "group unknown"


_USES = {
    "shards gathered, gradients scattered: FSDP or ZeRO-3 (or sequence parallelism)": (
        "all_gather_into", "all_gather", "reduce_scatter",
    ),
    "sums: data parallelism (or tensor parallelism)": ("all_reduce",),
    "rows to other ranks: experts or embeddings (or Ulysses)": ("all_to_all",),
    "messages: a pipeline (or a ring)": ("send", "recv"),
}  # fmt: skip
"""Use of an axis -> operations that move most of its bytes."""


def axes(calls: Iterable[Call]) -> list[Axis]:
    """The axes of all ranks' calls, the busiest first."""
    rows: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        members = call.group
        steps = {b - a for a, b in pairwise(members)}
        rows[len(members), steps.pop() if len(steps) == 1 else 0].append(call)
    result = []
    for (size, stride), made in rows.items():
        if size == 1:
            continue
        ranks = len({call.rank for call in made})
        counts, total = Counter(call.op for call in made), Counter[str]()
        moved = {"": -1}
        for call in made:
            total[call.op] += call.inputs
        for use, ops in _USES.items():
            if any(call.op in ops for call in made):
                moved[use] = sum(max(call.inputs, call.outputs) for call in made if call.op in ops)
        result.append(
            Axis(
                size, stride, len({call.group for call in made}), {op: n / ranks for op, n in counts.items()},
                {op: n / ranks for op, n in total.items()}, max(moved, key=lambda use: moved[use]),
            )
        )  # fmt: skip
    return sorted(result, key=lambda axis: -sum(axis.nbytes.values()))
