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
        for call in made:
            total[call.op] += call.inputs
        result.append(
            Axis(
                size, stride, len({call.group for call in made}), {op: n / ranks for op, n in counts.items()},
                {op: n / ranks for op, n in total.items()}, _use(made),
            )
        )  # fmt: skip
    return sorted(result, key=lambda axis: -sum(axis.nbytes.values()))


_USES = {
    ("all_gather_into", "all_gather", "reduce_scatter"): "shards gathered, gradients scattered: FSDP or ZeRO-3 (or \
sequence parallelism)",
    ("all_reduce",): "sums: data parallelism (or tensor parallelism)",
    ("all_to_all",): "rows to other ranks: experts or embeddings (or Ulysses)",
    ("send", "recv"): "messages: a pipeline (or a ring)",
}
"""Operations -> use of an axis on which they move most bytes."""


def _use(calls: Iterable[Call]) -> str:
    total = Counter[str]()
    for call in calls:
        total[call.op] += max(call.inputs, call.outputs)
    moved = {ops: sum(total[op] for op in ops) for ops in _USES if ops[-1] in total}
    return _USES[max(moved, key=lambda ops: moved[ops])] if moved else ""
