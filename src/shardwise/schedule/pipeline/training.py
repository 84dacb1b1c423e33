"""The schedules of training: each says, for one rank, in which order it computes.

p ranks, m micro-batches, v chunks a rank; stage `c * p + rank` is the c-th chunk of a rank where stages go round in a
loop, `2p - 1 - rank` the second one in a V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.registry import Order, generator, one_chunk

F, I, W, B = partial(Action, "F"), partial(Action, "I"), partial(Action, "W"), partial(Action, "B")  # noqa: E741


def alternate(forwards: Order, backwards: Order, warmup: int, weights: Order | None = None, lag: int = 0) -> Order:
    """`warmup` forwards, then one backward after each forward; each weight gradient `lag` backwards after its own."""
    out, weights = forwards[:warmup], weights or []
    for k, backward in enumerate(backwards):
        out += forwards[warmup + k : warmup + k + 1]
        out.append(backward)
        if k >= lag:
            out += weights[k - lag : k - lag + 1]
    return out + weights[max(0, len(backwards) - lag) :]


@generator("naive", source="Huang et al. 2019, baseline", settles=0)
def naive(p: int, m: int, v: int, rank: int) -> Order:
    """One micro-batch after the other, all the way and back."""
    return [do(rank, k) for k in range(m) for do in (F, B)]


@generator("gpipe", source="Huang et al. 2019", settles=2, grows=True)
def gpipe(p: int, m: int, v: int, rank: int) -> Order:
    """All forwards, then all backwards."""
    return [F(rank, k) for k in range(m)] + [B(rank, k) for k in range(m)]


@generator("1f1b", source="Narayanan et al. 2019", settles=1)
def one_f_one_b(p: int, m: int, v: int, rank: int, warmup: int = 0) -> Order:
    """As soon as a backward can be done it is, one forward for one backward.

    warmup: forwards of rank 0 before its first pair, at least p - 1; other ranks in proportion to their distance
    from the last. More of them hide the latency of hops, at the price of as many more micro-batches held.
    """
    mine = -(-warmup * (p - 1 - rank) // max(1, p - 1))
    return alternate([F(rank, k) for k in range(m)], [B(rank, k) for k in range(m)], min(mine, m))


def _looped(p: int, m: int, v: int) -> str:
    if p < 2:
        return "chunks go round between ranks: p of at least 2 (p=1 is 1f1b)"
    return "" if v >= 2 else "it has several chunks a rank: v of at least 2 (v=1 is gpipe or 1f1b)"


def group_of(p: int, m: int) -> int:
    """Micro-batches that an interleaved schedule takes through one chunk before it turns to the next."""
    return m // max(1, m // p)


def _interleaved(p: int, m: int, v: int) -> str:
    groups = max(1, m // p)
    if (legal := _looped(p, m, v)) or m % groups == 0:
        return legal
    below = next(n for n in range(m, 0, -1) if n % max(1, n // p) == 0)
    above = next(n for n in count(m) if n % max(1, n // p) == 0)
    return f"micro-batches go in {groups} equal groups of at least p={p}, such as m={below} or m={above}"


@generator("interleaved", source="Narayanan et al. 2021", rule=_interleaved, settles=4, period=group_of)
def interleaved(p: int, m: int, v: int, rank: int) -> Order:
    """1f1b over v chunks a rank, micro-batches in groups of p.

    Where p does not divide m, groups are larger, as torch's are: m // p equal ones.
    """
    group = group_of(p, m)
    steps = [(k // (group * v) * group + k % group, k // group % v) for k in range(m * v)]
    forwards = [F(chunk * p + rank, micro) for micro, chunk in steps]
    backwards = [B((v - 1 - chunk) * p + rank, micro) for micro, chunk in steps]
    return alternate(forwards, backwards, min((v - 1) * group + 2 * (p - 1 - rank), m * v))


@generator("breadth-first", source="Lamy-Poirier 2022", rule=_looped, settles=2, grows=True)
def breadth_first(p: int, m: int, v: int, rank: int) -> Order:
    """Each chunk does all micro-batches before the next one; backward too."""
    stages = range(rank, p * v, p)
    return [F(s, k) for s in stages for k in range(m)] + [B(s, k) for s in reversed(stages) for k in reversed(range(m))]


@generator("zb-h1", source="Qi et al. 2023", settles=1)
def zb_h1(p: int, m: int, v: int, rank: int) -> Order:
    """1f1b with the weight gradients put off into the bubble, same memory."""
    forwards, inputs, weights = ([do(rank, k) for k in range(m)] for do in (F, I, W))
    return alternate(forwards, inputs, min(p - 1 - rank, m), weights, rank)


@generator("zb-h2", source="Qi et al. 2023", settles=2)
def zb_h2(p: int, m: int, v: int, rank: int) -> Order:
    """Zb-h1 with twice the warm-up and memory, no bubble of its own."""
    forwards, inputs, weights = ([do(rank, k) for k in range(m)] for do in (F, I, W))
    return alternate(forwards, inputs, min(2 * (p - 1 - rank), m), weights, 2 * rank)


def _vee(p: int, m: int, v: int) -> str:
    if p < 2:
        return "a V needs p of at least 2 (p=1 is 1f1b)"
    return "" if v == 2 else "it has two chunks a rank, down and up again: v=2"


class _Vee:
    """The two chunks of a rank in a V: each call of `f`, `i`, `w`, `b` with chunk 0 or 1 is its next micro-batch."""

    def __init__(self, p: int, rank: int) -> None:
        stages = rank, 2 * p - 1 - rank
        forward, backward, weight = ([count(), count()] for _ in range(3))

        def taking(do: Callable[[int, int], Action], micro: list[count[int]]) -> Callable[[int], Action]:
            return lambda chunk: do(stages[chunk], next(micro[chunk]))

        self.f, self.w = taking(F, forward), taking(W, weight)
        self.i, self.b = taking(I, backward), taking(B, backward)


@generator("zb-v", source="Qi et al. 2024", rule=_vee, shape="vee", settles=2)
def zb_v(p: int, m: int, v: int, rank: int) -> Order:
    """Two chunks a rank in a V, no bubble of its own, memory of 1f1b."""
    return [action for action in _zb_v(_Vee(p, rank), p, max(m, 2 * p - 1), rank) if action.micro < m]


def _zb_v(do: _Vee, p: int, m: int, rank: int) -> Iterator[Action]:
    """For at least 2p - 1 micro-batches; those that are too many are left out again."""
    first = 2 * (p - rank) - 1
    for _ in range(first):
        yield do.f(0)
    for _ in range(rank):
        yield from (do.f(1), do.f(0))
    for _ in range(p - rank):
        yield from (do.f(1), do.i(1), do.w(1))
    for k in range(m - p):
        if first + rank + k < m:
            yield do.f(0)
        yield from (do.i(0), do.w(0), do.f(1), do.i(1), do.w(1))
    for _ in range(rank):
        yield from (do.i(0), do.i(1))
    for _ in range(p - rank):
        yield from (do.i(0), do.w(0))
    yield from (do.w(1) for _ in range(rank))
    yield from (do.w(0) for _ in range(rank))


def _dualpipe(p: int, m: int, v: int) -> str:
    return _vee(p, m, v) or ("" if m >= 2 * p else f"it needs as many micro-batches as stages: m of at least {2 * p}")


@generator("dualpipe-v", source="DeepSeek-AI 2024, Qi et al. 2025", rule=_dualpipe, shape="vee", settles=2)
def dualpipe_v(p: int, m: int, v: int, rank: int) -> Order:
    """Two chunks a rank in a V, one's forward beside the other's backward."""
    return list(_dualpipe_v(_Vee(p, rank), p, m, rank))


def _dualpipe_v(do: _Vee, p: int, m: int, rank: int) -> Iterator[Action]:
    """The eight phases of DeepSeek's dualpipev.py."""
    owed: deque[Action] = deque()

    def split(chunk: int) -> Action:
        action = do.i(chunk)
        owed.append(W(action.stage, action.micro))
        return action

    def pair(forward: int) -> Action:
        return Action("OVERLAP_F_B", parts=(do.f(forward), do.b(1 - forward)))

    for _ in range(2 * (p - rank - 1)):
        yield do.f(0)
    for _ in range(rank + 1):
        yield from (do.f(0), do.f(1))
    for _ in range(p - rank - 1):
        yield from (split(1), owed.popleft(), do.f(1))
    for k in range(m - 2 * p + rank + 1):
        # At the turn of the V the first pair has nothing to wait for: apart, its forward is passed on earlier.
        yield from (do.f(0), do.b(1)) if k == 0 and rank == p - 1 else (pair(0),)
        yield pair(1)
    for _ in range(p - rank - 1):
        yield from (do.b(1), pair(1))
    for k in range(2 * (rank + 1)):
        yield (do.b if k <= rank else split)(1 - k % 2)
    for _ in range(p - rank - 1):
        yield from (owed.popleft(), split(0))
    yield from owed


def _decode(p: int, m: int, v: int) -> str:
    return one_chunk(p, m, v) or ("" if m >= p else f"with fewer than p in flight ranks stand still: m of at least {p}")


@generator("prefill", source="Agrawal et al. 2023", train=False)
def prefill(p: int, m: int, v: int, rank: int) -> Order:
    """Chunks of prompts, one after the other: fill and drain."""
    return [F(rank, k) for k in range(m)]


@generator("decode", source="Pope et al. 2022", rule=_decode, train=False)
def decode(p: int, m: int, v: int, rank: int, tokens: int = 8) -> Order:
    """M micro-batches in flight, one token of each in turn; the last stage's token goes back to the first.

    tokens: of each of the m micro-batches; the k-th action is token k // m of micro-batch k % m.
    """
    return [F(rank, k) for k in range(m * tokens)]
