"""Who waits for whom: the rank that came last to each collective, and how long the others were there before."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from shardwise.audit.calls import Call
from shardwise.audit.desync import Group, sequences
from shardwise.codec import Json


@dataclass(frozen=True)
class Arrival(Json):
    """One collective of a group on one clock; seconds."""

    op: str
    group: Group
    number: int
    last: int
    """The rank that came last."""
    late: float
    """By how much, behind the rank before it."""
    waited: Mapping[int, float]
    """Rank -> from its begin to the begin of the last one, at most until its end."""
    begin: float
    """When the last rank came."""
    orders: Mapping[int, int]
    """Rank -> `Call.order`."""


@dataclass(frozen=True)
class LateArrivals(Json):
    """A rank for which others waited at one kind of call: operation, bytes and line."""

    rank: int
    op: str
    nbytes: int
    where: str
    """Line of the call, "" where unknown."""
    calls: int
    """Those to which the rank came last."""
    late: float
    """Sum of `Arrival.late`: what the job would have gained, had it come with the rank before it. Seconds."""
    waited: float
    """Sum of the longest waits for it."""


def arrivals(calls: Mapping[int, Sequence[Call]], numbers: Mapping[int, Sequence[int]] | None = None) -> list[Arrival]:
    """All collectives that every rank of a group made, with known begins on one clock, by time."""
    result = []
    for group, rows in sequences(calls, numbers).items():
        if len(rows) < len(group):
            continue
        for number, here in enumerate(zip(*rows.values(), strict=False)):
            begins = sorted((call.begin, call.rank) for call in here if call.begin is not None)
            if len(begins) < len(here) or len({call.op for call in here}) > 1:
                break
            last, rank = begins[-1]
            waited = {
                call.rank: max(0.0, (last if call.end is None else min(last, call.end)) - (call.begin or 0.0))
                for call in here
            }
            orders = {call.rank: call.order for call in here}
            result.append(Arrival(here[0].op, group, number, rank, last - begins[-2][0], waited, last, orders))
    return sorted(result, key=lambda one: one.begin)


def late_ranks(calls: Mapping[int, Sequence[Call]], came: Sequence[Arrival]) -> list[LateArrivals]:
    """Ranks and kinds of calls by the time that others lost there, the most first."""
    by_order = {rank: {call.order: call for call in made} for rank, made in calls.items()}
    kinds: dict[tuple[int, str, int, str], list[Arrival]] = defaultdict(list)
    for one in came:
        call = by_order[one.last][one.orders[one.last]]
        kinds[one.last, call.op, call.inputs, call.where].append(one)
    rows = [
        LateArrivals(*kind, len(ones), sum(one.late for one in ones), sum(max(one.waited.values()) for one in ones))
        for kind, ones in kinds.items()
    ]
    return sorted(rows, key=lambda row: -row.late)


def clock_offsets(calls: Mapping[int, Sequence[Call]], hosts: Mapping[int, str]) -> dict[str, float]:
    """Host -> seconds to add to its clock, from ends of collectives, which all ranks of a group leave together.

    hosts: rank -> its host. Only hosts of which a collective with the first one's ranks ended are in the result.
    """
    apart: dict[str, list[float]] = defaultdict(list)
    first = hosts[min(hosts)]
    for rows in sequences(calls).values():
        for here in zip(*rows.values(), strict=False):
            ends: dict[str, list[float]] = defaultdict(list)
            for call in here:
                if call.end is not None:
                    ends[hosts[call.rank]].append(call.end)
            for host in ends.keys() - {first} if first in ends else ():
                apart[host].append(median(ends[first]) - median(ends[host]))
    return {first: 0.0} | {host: median(differences) for host, differences in apart.items()}


def on_one_clock(calls: Mapping[int, Sequence[Call]], hosts: Mapping[int, str]) -> dict[int, tuple[Call, ...]]:
    """Calls with times of the first host's clock. Ranks of a host without a common collective keep no times."""
    offsets = clock_offsets(calls, hosts)
    moved = {}
    for rank, made in calls.items():
        by = offsets.get(hosts[rank])
        moved[rank] = tuple(
            replace(
                call,
                begin=None if by is None or call.begin is None else call.begin + by,
                end=None if by is None or call.end is None else call.end + by,
            )
            for call in made
        )
    return moved
