"""Price of a schedule on a network: its α, β and γ terms, exact in the α-β-γ model, for any size at once.

A round takes as long as its busiest port, then its largest addition. For a given network both are linear in the bytes,
so a schedule is reduced once to a `Profile`: for each kind of round the lines (α seconds, β seconds a byte) that some
size makes the longest. Rounds with equal lines are one, and of a `StagingBuffer`, and of equal stages, only
one round is looked at, which is what makes 16,384 ranks cheap. Chunks count as equal parts of the buffer; one that is
larger by an element, because the size does not divide, is priced as the others.

On a measured network there are more costs: the start of a collective, counted as latency; copies within a rank, counted
with the additions; and, where ranks read each other's memory, that a rank which is read and written in the same place
and round must put aside what comes: a copy, and one more wait. Where such ranks repeat a collective, what nobody writes
in it comes from their caches. Speeds depend on the size of a rank's memory: a price is then between the prices for the
two sizes next to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardwise.records import dataclass
from shardwise.schedule.comm import CommSchedule, Round
from shardwise.schedule.network import Network

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Floats: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True)
class Price:
    """Seconds of one collective. alpha, beta, gamma: the terms whose sum it is: latency, bytes sent, bytes added (or
    copied within a rank).

    steps: rounds in which anything is sent. bytes_sent: bytes that the rank sends which sends most.
    """

    alpha: float
    beta: float
    gamma: float
    steps: int
    bytes_sent: int

    @property
    def seconds(self) -> float:
        return self.alpha + self.beta + self.gamma


class Line(NamedTuple):
    """A port's time in a round: alpha seconds, and beta seconds for each byte of the collective's buffer."""

    alpha: float
    beta: float


class RoundLoad(NamedTuple):
    """One kind of round: the lines of its busiest ports, and the seconds of additions and copies for each byte of the
    buffer."""

    lines: tuple[Line, ...]
    gamma: float


@dataclass(frozen=True)
class Profile:
    """All rounds of a schedule on a network, by kind. steps: rounds with messages. sent: bytes that the busiest rank
    sends, as a multiple of the buffer's. startup: seconds, whatever the rounds."""

    loads: tuple[tuple[RoundLoad, int], ...]
    steps: int
    sent: float
    startup: float = 0.0

    def at(self, nbytes: float) -> Price:
        """The price for a buffer of `nbytes` bytes (the full tensor, the n of the cost formulas)."""
        alpha, beta, gamma = self.startup, 0.0, 0.0
        for load, times in self.loads:
            line = max(load.lines, key=lambda line: line.alpha + line.beta * nbytes)
            alpha += times * line.alpha
            beta += times * line.beta * nbytes
            gamma += times * load.gamma * nbytes
        return Price(alpha, beta, gamma, self.steps, round(self.sent * nbytes))


@dataclass(frozen=True)
class SizedProfile:
    """A schedule on a network whose speeds depend on the size. profiles: for each of its sizes. regions: a rank's
    memory, as a multiple of the buffer."""

    network: Network
    profiles: tuple[Profile, ...]
    regions: int

    def at(self, nbytes: float) -> Price:
        around = self.network.near(nbytes * self.regions)
        prices = [(share, self.profiles[index].at(nbytes)) for index, share in around]
        alpha, beta, gamma = (
            sum(share * getattr(price, term) for share, price in prices) for term in ("alpha", "beta", "gamma")
        )
        return replace(prices[0][1], alpha=alpha, beta=beta, gamma=gamma)


def profile(schedule: CommSchedule, network: Network) -> Profile | SizedProfile:
    """The schedule's rounds on a network of as many ranks."""
    if not network.sizes:
        return _profile(schedule, network)
    profiles = tuple(_profile(schedule, sized) for _, sized in network.sizes)
    return SizedProfile(network, profiles, len(schedule.regions))


def _profile(schedule: CommSchedule, network: Network) -> Profile:
    assert schedule.ranks == network.ranks, f"{schedule.ranks} ranks on a network of {network.ranks}"
    loads: Counter[RoundLoad] = Counter()
    sent = np.zeros(schedule.ranks)
    steps = 0
    rounds: Iterable[tuple[Round, int]] = _kinds(schedule)
    written: NDArray[np.bool_] | None = None
    if network.repeated and network.saved:
        # Which chunks move matters here, so one round does not stand for others.
        rounds = ((round, 1) for round in schedule.rounds())
        written = np.zeros(schedule.ranks * schedule.width, dtype=np.bool_)
        for round in schedule.rounds():
            written[round.cells(schedule.width)[1]] = True
    for round, repeat in rounds:
        load, parts = _load(round, schedule, network, written)
        loads[load] += repeat
        sent += repeat * parts
        steps += repeat if parts.any() else 0
    return Profile(tuple(loads.items()), steps, float(sent.max(initial=0.0)), network.startup if steps else 0.0)


def _kinds(schedule: CommSchedule) -> Iterator[tuple[Round, int]]:
    by_key = Counter[Hashable]()
    for stage in schedule.stages:
        if stage.price_key is not None:
            by_key[stage.price_key] += stage.repeat
    for stage in schedule.stages:
        if stage.price_key is None:
            yield stage.make(0), stage.repeat
        elif repeat := by_key.pop(stage.price_key, 0):
            yield stage.make(0), repeat


def price(schedule: CommSchedule, network: Network, nbytes: float) -> Price:
    """Seconds of the schedule on a buffer of `nbytes` bytes."""
    return profile(schedule, network).at(nbytes)


def _load(
    round: Round, schedule: CommSchedule, network: Network, written: NDArray[np.bool_] | None
) -> tuple[RoundLoad, _Floats]:
    """The kind of a round, and the part of the buffer that each rank sends in it.

    written: the chunks that are in some round, shape (ranks * width,); what is read of others comes from a cache.
    """
    p, part = schedule.ranks, round.count / schedule.chunks
    away = round.src != round.dst
    src, dst, sizes = _messages(round.src[away], round.dst[away], part[away], p)
    across = network.node[src] != network.node[dst]
    alphas = np.where(across, network.inter.alpha, network.intra.alpha)
    within = (round.src == round.dst) & ~round.reduce
    copied = np.bincount(round.dst[within], part[within], p)
    aside = _aside(round, schedule) if network.reads else np.zeros(p)
    waits = (copied > 0) * network.local.alpha + (aside > 0) * network.intra.alpha
    lines: set[Line] = set()
    for port in (src, dst):
        alpha = np.zeros(p)
        (np.maximum if schedule.reads else np.add).at(alpha, port, alphas)
        beta = _port_seconds(port, sizes, across, network)
        if written is not None:
            beta = beta - _unchanged(round.dst if port is dst else round.src, round, schedule, written) * network.saved
        lines |= _longest(alpha + waits, beta)
    added = np.bincount(round.dst[round.reduce], part[round.reduce], p)
    gamma = float(added.max()) * network.gamma + float((copied + aside).max()) * network.local.beta
    sent = np.bincount(src, sizes, p).astype(np.float64)
    return RoundLoad(tuple(sorted(_front(lines))), gamma), sent


def _aside(round: Round, schedule: CommSchedule) -> _Floats:
    """The part of the buffer that each rank puts aside, because others read in this round what it is to write over."""
    source, target, _ = round.cells(schedule.width)
    others = np.repeat(round.src != round.dst, round.count)
    meets = target[np.isin(target, source[others])]
    return np.bincount(meets // schedule.width, minlength=schedule.ranks) / schedule.chunks


def _unchanged(port: NDArray, round: Round, schedule: CommSchedule, written: NDArray[np.bool_]) -> _Floats:
    """The part of the buffer that passes each rank's port inside a round though it was not written."""
    source, target, _ = round.cells(schedule.width)
    kept = ~written[source] & (source // schedule.width != target // schedule.width)
    return np.bincount(np.repeat(port, round.count)[kept], minlength=schedule.ranks) / schedule.chunks


def _messages(src: NDArray, dst: NDArray, part: _Floats, p: int) -> tuple[NDArray, NDArray, _Floats]:
    if not len(src) or np.bincount(src).max() == 1:
        return src, dst, part.astype(np.float64)
    pairs, which = np.unique(src * p + dst, return_inverse=True)
    return pairs // p, pairs % p, np.bincount(which, part).astype(np.float64)


def _port_seconds(port: NDArray, sizes: _Floats, across: NDArray[np.bool_], network: Network) -> _Floats:
    """β seconds of each rank's port, for each byte of the buffer: inside the node, then through its NIC, or its share
    of the node's NICs where those are the bottleneck."""
    p = network.ranks
    inside = np.bincount(port[~across], sizes[~across], p) * network.intra.beta
    if not across.any():
        return inside.astype(np.float64)
    outside = np.bincount(port[across], sizes[across], p)
    of_node = np.bincount(network.node, outside)[network.node] * (network.sharing / network.nics)
    return inside + np.where(outside > 0, np.maximum(outside, of_node), 0.0) * network.inter.beta


def _longest(alpha: _Floats, beta: _Floats) -> set[Line]:
    """The port with most bytes among those of the longest latency; of ports with more bytes the same, and so on."""
    lines = set()
    while len(alpha):
        most = alpha.max()
        longest = float(beta[alpha == most].max())
        lines.add(Line(float(most), longest))
        more = beta > longest
        alpha, beta = alpha[more], beta[more]
    return lines


def _front(lines: set[Line]) -> list[Line]:
    kept: list[Line] = []
    for line in sorted(lines, reverse=True):
        if not kept or line.beta > max(other.beta for other in kept):
            kept.append(line)
    return kept
