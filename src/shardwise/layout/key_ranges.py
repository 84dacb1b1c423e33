"""Which elements each parameter server keeps: equal ranges of all units of a worker, laid end to end. Free of torch."""

from typing import NamedTuple

from shardwise.layout.units import UnitPlan


class Segment(NamedTuple):
    """Elements [start, stop) of a unit's flat buffer, from element `at` of a server's range on."""

    unit: str
    start: int
    stop: int
    at: int


def key_ranges(plan: UnitPlan) -> tuple[tuple[Segment, ...], ...]:
    """Range of each server, of what one rank of a worker has: as many elements each, or one less."""
    count = plan.layout.parameter_servers.count
    total = sum(unit.padded for unit in plan.units)
    ranges = []
    for server in range(count):
        first, last, before = total * server // count, total * (server + 1) // count, 0
        segments = []
        for unit in plan.units:
            start, stop = max(first, before), min(last, before + unit.padded)
            if start < stop:
                segments.append(Segment(unit.name, start - before, stop - before, start - first))
            before += unit.padded
        ranges.append(tuple(segments))
    return tuple(ranges)


def elements(segments: tuple[Segment, ...]) -> int:
    """Elements of a range."""
    return sum(segment.stop - segment.start for segment in segments)


def server_rank(plan: UnitPlan, server: int) -> int:
    return server + (plan.layout.training_ranks if plan.layout.parameter_servers.own else 0)


def server_of(plan: UnitPlan, rank: int) -> int | None:
    """The server in the process of a rank; None where there is none."""
    server = rank - (plan.layout.training_ranks if plan.layout.parameter_servers.own else 0)
    return server if 0 <= server < plan.layout.parameter_servers.count else None
