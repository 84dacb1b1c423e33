"""What collectives must give, and schedules done step by step, written without a look at the code under test."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from shardwise.schedule import CommSchedule, Round

PAIRS_LISTED = {"one-shot", "two-shot"}


def results(collective: str, data: np.ndarray, bounds: np.ndarray, root: int) -> dict[int, tuple[int, np.ndarray]]:
    """rank -> (offset, numbers) that it must hold. data: (ranks, n). Piece r of a buffer begins at bounds[r]."""
    p = len(data)
    with np.errstate(over="ignore"):
        total = data.sum(axis=0)
    pieces = [slice(int(bounds[r]), int(bounds[r + 1])) for r in range(min(p, len(bounds) - 1))]
    if collective == "all-reduce":
        return dict.fromkeys(range(p), (0, total))
    if collective == "broadcast":
        return dict.fromkeys(range(p), (0, data[root]))
    if collective == "reduce":
        return {root: (0, total)}
    if collective == "all-to-all":
        return {r: (0, np.concatenate([data[s][pieces[r]] for s in range(p)])) for r in range(p)}
    if collective == "scatter":
        return {r: (pieces[r].start, data[root][pieces[r]]) for r in range(p)}
    if collective == "reduce-scatter":
        return {r: (pieces[r].start, total[pieces[r]]) for r in range(p)}
    gathered = np.concatenate([data[r][pieces[r]] for r in range(p)])
    return dict.fromkeys([root] if collective == "gather" else range(p), (0, gathered))


def step_by_step(schedule: CommSchedule, rounds: Iterable[Round]) -> dict[int, list[Counter | None]]:
    """rank -> chunk of memory -> how often each input (rank, chunk) is in it, None for nothing; row after row."""
    p, c, root = schedule.ranks, schedule.chunks, schedule.root
    memory: dict[int, list[Counter | None]] = {r: [None] * schedule.width for r in range(p)}
    for r in range(p):
        for i in range(c):
            only_root = schedule.collective in ("broadcast", "scatter") and r != root
            only_own = schedule.collective in ("gather", "all-gather") and r != i
            if not only_root and not only_own:
                memory[r][i] = Counter({(r, i): 1})
    for round in rounds:
        before = {r: list(row) for r, row in memory.items()}
        for row in range(len(round)):
            src, dst = int(round.src[row]), int(round.dst[row])
            for i in range(int(round.count[row])):
                step = i * int(round.stride[row])
                moved, to = before[src][int(round.chunk[row]) + step], int(round.to[row]) + step
                if round.reduce[row]:
                    there = memory[dst][to]
                    memory[dst][to] = None if there is None or moved is None else there + moved
                else:
                    memory[dst][to] = moved
    return memory


def is_right(schedule: CommSchedule, memory: dict[int, list[Counter | None]]) -> bool:
    p, c, root, kind = schedule.ranks, schedule.chunks, schedule.root, schedule.collective
    base = schedule.regions.index(schedule.result) * c

    def total(i: int) -> Counter:
        return Counter({(r, i): 1 for r in range(p)})

    def wanted(r: int, i: int) -> Counter | None:
        """What chunk i of rank r must be; None where it does not matter."""
        if kind == "all-reduce" or (kind == "reduce" and r == root) or (kind == "reduce-scatter" and r == i):
            return total(i)
        if kind == "broadcast" or (kind == "scatter" and r == i):
            return Counter({(root, i): 1})
        if kind == "all-gather" or (kind == "gather" and r == root):
            return Counter({(i, i): 1})
        return Counter({(i, r): 1}) if kind == "all-to-all" else None

    return all((want := wanted(r, i)) is None or memory[r][base + i] == want for r in range(p) for i in range(c))
