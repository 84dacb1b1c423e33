"""Which algorithm is cheapest, where that changes with the size, and what a collective takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, pairwise, starmap
from math import sqrt
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.schedule.algorithms import Algorithm, algorithms, build, collective_name, find
from shardwise.schedule.closed_forms import Terms, lower_bounds
from shardwise.schedule.comm import CommSchedule
from shardwise.schedule.network import Network
from shardwise.schedule.price import Price, Profile, SizedProfile, profile

MOST_SEGMENTS = 512
RING = {
    "broadcast": "chain",
    "reduce": "binomial",
    "scatter": "binomial",
    "gather": "binomial",
    "all-to-all": "pairwise",
}
"""Substitute for "ring" in collectives without a ring."""


@dataclass(frozen=True)
class Choice:
    """An algorithm with its options, its price, and the lower bounds that no algorithm can go below."""

    algorithm: Algorithm
    options: Mapping[str, int]
    price: Price
    bounds: Terms

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def fractions(self) -> dict[str, float | None]:
        """Lower bound over price for each term: 1 is as good as can be; None where the price has no such term.

        A round's terms are its busiest port's: where another port has more of one of them, it counts as 1 at most.
        """
        pairs = {
            "latency": (self.bounds.alpha, self.price.alpha),
            "bandwidth": (self.bounds.beta, self.price.beta),
            "compute": (self.bounds.gamma, self.price.gamma),
        }
        return {name: min(1.0, least / paid) if paid else None for name, (least, paid) in pairs.items()}


EQUAL = 1e-9
"""Share of a price below which another one counts as equal: sums in another order."""


class Crossover(NamedTuple):
    """From `nbytes` bytes on, `algorithm` is the cheapest."""

    nbytes: int
    algorithm: str


class Cost(NamedTuple):
    """Cost of one collective: seconds, bytes that the busiest rank sends, steps."""

    seconds: float
    bytes_sent: int
    steps: int


def choose(collective: str, nbytes: float, ranks: int | Sequence[int], cluster: Cluster) -> list[Choice]:
    """All algorithms that can run on these ranks of a cluster, cheapest first, for a full tensor of `nbytes` bytes.

    ranks: how many, or which devices (see `Network.of`). Segments are chosen for the size. Algorithms whose ranks read
    each other's memory are there where all ranks are on one node.
    Raises `UserError` for an unknown collective, ranks that do not fit, and links that are not known.
    """
    return pricer(collective, ranks, cluster).ranked(nbytes)


def crossovers(
    collective: str,
    ranks: int | Sequence[int],
    cluster: Cluster,
    smallest: int = 1 << 8,
    largest: int = 1 << 34,
) -> list[Crossover]:
    """Which algorithm is cheapest from which size on, between two sizes in bytes; sizes are found to one part in a
    hundred. Raises what `choose` raises."""
    return pricer(collective, ranks, cluster).crossovers(smallest, largest)


def cost(
    op: str, nbytes: float, ranks: int | Sequence[int], cluster: Cluster, algorithm: str = "best", sharing: int = 1
) -> Cost:
    """Cost of one collective of a ledger on these ranks: nothing on one rank.

    op: a ledger's name (all_reduce, all_gather_into, ...). nbytes: payload, the full tensor. algorithm: "best", the
    cheapest that sends messages (on a cluster measured with ranks that read memory, the cheapest of all); a name; or
    "ring", which stands for `RING` in collectives without one. (One ring uses one NIC of every node; a library's many
    rings come closer to "best" there.) sharing: how many such groups use a node's NICs at the same time. Raises what
    `choose` raises, and `UserError` for an unknown algorithm.
    """
    _, paid = pricer(op, ranks, cluster, sharing=sharing).pick(nbytes, algorithm)
    return Cost(paid.seconds, paid.bytes_sent, paid.steps)


def pricer(
    collective: str, ranks: int | Sequence[int], cluster: Cluster, nics: int | None = None, sharing: int = 1
) -> Pricer:
    """The prices of a collective on a group; kept, since a ledger asks for the same group many times.

    nics, sharing: see `Network`. Raises what `choose` raises.
    """
    group = ranks if isinstance(ranks, int) else tuple(ranks)
    return _pricer(collective_name(collective), group, cluster, nics, sharing)


@lru_cache(maxsize=256)
def _pricer(collective: str, ranks: int | tuple[int, ...], cluster: Cluster, nics: int | None, sharing: int) -> Pricer:
    return Pricer(collective, Network.of(cluster, ranks, nics, sharing))


class Pricer:
    """All algorithms of one collective on one network, each reduced to a profile when it is first asked for."""

    def __init__(self, collective: str, network: Network) -> None:
        self.collective = collective_name(collective)
        self.network = network
        self._profiles: dict[tuple[str, tuple[tuple[str, int], ...]], Profile | SizedProfile] = {}

    @cached_property
    def candidates(self) -> list[Algorithm]:
        """The algorithms that can run here, and are not another one under a second name."""
        p, nodes, g = self.network.ranks, self.network.nodes, self.network.per_node
        return [
            found
            for found in algorithms(self.collective)
            if (not found.reads or nodes == 1)
            and (found.most is None or p <= found.most)
            and ("node" not in found.options or (nodes > 1 and g is not None and g > 1))
        ]

    def ranked(self, nbytes: float) -> list[Choice]:
        """All candidates for a full tensor of `nbytes` bytes, cheapest first. Raises `UserError` for negative sizes."""
        found = [self._choice(algorithm, _checked(nbytes)) for algorithm in self.candidates]
        return sorted(found, key=lambda choice: choice.price.seconds)

    def cheapest(self, nbytes: float, reads: bool = True) -> Choice:
        """The first of `ranked`, found without a look at algorithms whose latencies alone take longer.

        reads: among those, too, whose ranks read each other's memory. Raises `UserError` for negative sizes.
        """
        least = min(self.network.intra.alpha, self.network.inter.alpha)
        best: Choice | None = None
        for algorithm, steps in self._by_steps:
            if best and (steps - 1) * least > best.price.seconds:
                break
            if reads or not algorithm.reads:
                found = self._choice(algorithm, _checked(nbytes))
                best = found if best is None or found.price.seconds < best.price.seconds else best
        assert best, f"{self.collective} has no algorithm that sends messages"
        return best

    @cached_property
    def _by_steps(self) -> list[tuple[Algorithm, int]]:
        found = []
        for algorithm in self.candidates:
            fewest = {"segments": 1} if "segments" in algorithm.options else {}
            found.append((algorithm, self._build(algorithm, **self._placed(algorithm), **fewest).steps))
        return sorted(found, key=lambda pair: pair[1])

    def _placed(self, algorithm: Algorithm) -> dict[str, int]:
        return {"node": self.network.per_node or 1} if "node" in algorithm.options else {}

    def crossovers(self, smallest: int, largest: int) -> list[Crossover]:
        """The cheapest algorithm from `smallest` bytes on, and every change up to `largest`; of equally cheap ones the
        first of the candidates. Raises `UserError` for an empty range."""
        if not 0 < smallest <= largest:
            raise UserError(f"sizes must be positive and in order, not {smallest} to {largest}")

        @cache
        def seconds(nbytes: int) -> dict[str, float]:
            return {algorithm.name: self._best(algorithm, nbytes)[1].seconds for algorithm in self.candidates}

        @cache
        def name(nbytes: int) -> str:
            least = min(seconds(nbytes).values())
            return next(name for name, price in seconds(nbytes).items() if price <= least * (1 + EQUAL))

        def changes(low: int, high: int) -> list[Crossover]:
            same = name(low) == name(high)
            if same and not _rivals(seconds(low), seconds(high), name(low), high / low):
                return []
            if high <= low * 1.01 + 1:
                return [] if same else [Crossover(high, name(high))]
            middle = round(sqrt(low * high))
            return changes(low, middle) + changes(middle, high)

        grid = [smallest]
        while grid[-1] < largest:
            grid.append(min(2 * grid[-1], largest))
        return [Crossover(smallest, name(smallest)), *chain.from_iterable(starmap(changes, pairwise(grid)))]

    def pick(self, nbytes: float, algorithm: str) -> tuple[str, Price]:
        """Name and price of "best", "ring" or a named algorithm: see `cost` of this module, and what it raises."""
        if algorithm == "best":
            best = self.cheapest(nbytes, reads=self.network.reads)
            return best.name, best.price
        found = find(self.collective, RING.get(self.collective, "ring") if algorithm == "ring" else algorithm)
        return found.name, self._best(found, _checked(nbytes))[1]

    def _choice(self, algorithm: Algorithm, nbytes: float) -> Choice:
        bounds = lower_bounds(self.collective, self.network, nbytes, algorithm.reads)
        return Choice(algorithm, *self._best(algorithm, nbytes), bounds)

    def _best(self, algorithm: Algorithm, nbytes: float) -> tuple[dict[str, int], Price]:
        """The algorithm's options that suit the network and the size, and its price with them."""
        fixed = self._placed(algorithm)
        if "segments" not in algorithm.options or self.network.ranks == 1:
            return fixed, self._profile(algorithm, fixed).at(nbytes)

        def price(segments: int) -> Price:
            return self._profile(algorithm, {**fixed, "segments": segments}).at(nbytes)

        def nearest_best(segments: int) -> int:
            nearby = [s for s in (segments // 2, segments, 2 * segments) if 1 <= s <= MOST_SEGMENTS]
            best = min(nearby, key=lambda s: price(s).seconds)
            return best if best == segments else nearest_best(best)

        # The formula knows one link. Across nodes a few segments, too, may be better than a few more and a few less:
        # with more of them, one is on a slow link in every round.
        starts = (2, self._segments(algorithm, nbytes))
        segments = min(map(nearest_best, starts), key=lambda s: price(s).seconds)
        return {**fixed, "segments": segments}, price(segments)

    def _segments(self, algorithm: Algorithm, nbytes: float) -> int:
        """About the best number of segments on one kind of link, a power of two from 2 on: with A + B s rounds of
        α + nβ/s seconds it is sqrt(A nβ / (B α))."""
        two, four = (self._build(algorithm, segments=s).steps for s in (2, 4))
        growth = (four - two) / 2
        fill = max(two - 2 * growth, 0.0)
        alpha, beta = self.network.inter if self.network.nodes > 1 else self.network.intra
        best = sqrt(fill * nbytes * beta / (growth * alpha)) if alpha else MOST_SEGMENTS
        return 2 << max(0, min(int(best), MOST_SEGMENTS // 2).bit_length() - 1)

    def _profile(self, algorithm: Algorithm, options: Mapping[str, int]) -> Profile | SizedProfile:
        key = algorithm.name, tuple(options.items())
        if key not in self._profiles:
            self._profiles[key] = profile(self._build(algorithm, **options), self.network)
        return self._profiles[key]

    def _build(self, algorithm: Algorithm, **options: int) -> CommSchedule:
        return build(self.collective, algorithm.name, self.network.ranks, **options)


def _rivals(low: Mapping[str, float], high: Mapping[str, float], winner: str, growth: float) -> bool:
    """Whether another algorithm than the cheapest at two sizes may be cheaper between them. low, high: seconds by
    algorithm; growth: of the size. Prices grow with the size, by no more than it: so a rival's are at least max(low,
    high * n / largest), the winner's at most min(high, low * n / smallest)."""
    for name, first in low.items() if low[winner] else ():
        ratios = first / low[winner], high[name] / high[winner]
        if max(ratios) > 1 + EQUAL and ratios[0] * ratios[1] < growth and first < high[winner]:
            return True
    return False


def _checked(nbytes: float) -> float:
    if not 0 <= nbytes < float("inf"):
        raise UserError(f"a collective's bytes must be a number that is not negative, not {nbytes!r}")
    return nbytes
