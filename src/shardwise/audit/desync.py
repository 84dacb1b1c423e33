"""The first call that ranks of a job disagree about: who did not make it, who made another one, and where."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwise.audit.calls import Call
from shardwise.codec import Json
from shardwise.report.units import format_bytes, format_ranks

Group = tuple[int, ...]
MESSAGES = ("send", "recv")
_UNEVEN = {"all_to_all", "all_gather", "gather", "scatter", "barrier"}
"""Operations whose ranks may rightly give different sizes, or none."""


Kind = Literal["mismatch", "missing", "silent", "deadlock", "unfinished"]
"""Another call; none; a rank without a recording, for which others wait; ranks that wait for each other; a call that
all entered and none left."""


@dataclass(frozen=True)
class Desync(Json):
    """Ranks that differ from the others of a group at one call."""

    kind: Kind
    group: Group
    number: int
    """Of the call among those of the group that all dumps have, from 0."""
    call: Call
    """The call of a rank that made it as most did."""
    ranks: Group
    """Ranks that did not make it, or made another one; of "unfinished", all ranks."""
    instead: tuple[Call | None, ...]
    """For each of `ranks`: the call that it made instead, or the last one before, in any group; None: there is none."""
    parted: tuple[str, str] | None = None
    """(line of the first of `ranks`, line of the others) of the first call at which they came from different lines."""

    @property
    def sentence(self) -> str:
        """The result in words: rank, call and line."""
        what = describe(self.call)
        of = f"call {self.number} of {format_ranks(self.group)}"
        who = format_ranks(self.ranks)
        if self.kind == "unfinished":
            return f"all ranks entered {what}, {of}: a broken or slow link, or dumps that were taken while it ran"
        if self.kind == "silent":
            return f"{what}, {of}, waits for {who}, of which there is no recording"
        first = self.instead[0]
        at = f": {describe(first)}" if first else ""
        others = tuple(rank for rank in self.group if rank not in self.ranks)
        if self.kind == "mismatch" and first and len(self.ranks) >= len(others):
            return f"{who} made {describe(first)}, and {format_ranks(others)} made {what}, as {of}"
        if self.kind == "mismatch":
            return f"{who} made another call than the others, {what}, {of}{at}"
        after = f"; the last call there{at}" if first else "; it made no call"
        if self.parted:
            after += "; it left the way of the others at {}, where they are at {}".format(*self.parted)
        if self.kind == "deadlock":
            return f"{who} did not enter {what}, {of}, and waits in another call for ranks that wait here{after}"
        return f"{who} did not enter {what}, {of}{after}"


def describe(call: Call) -> str:
    """A call in words: operation, bytes, line, and whether it has ended."""
    size = f" of {format_bytes(call.inputs)}" if call.inputs else ""
    peer = f" {'to' if call.op == 'send' else 'from'} rank {call.peer}" if call.peer is not None else ""
    line = f" at {call.where}" if call.where else ""
    return f"{call.op}{size}{peer}{line}{'' if call.state == 'completed' else ' (not ended)'}"


def sequences(
    calls: Mapping[int, Sequence[Call]], numbers: Mapping[int, Sequence[int]] | None = None
) -> dict[Group, dict[int, list[Call]]]:
    """Group -> rank -> its collectives in order.

    calls: rank -> calls; numbers: rank -> the number of each call in its group, where recordings start at different
    calls: those before the latest start are left out.
    """
    placed: dict[Group, dict[int, list[tuple[int, Call]]]] = defaultdict(lambda: defaultdict(list))
    for rank, made in calls.items():
        for i, call in enumerate(made):
            if call.op not in MESSAGES and len(call.group) > 1:
                known = numbers.get(rank) if numbers else None
                placed[call.group][rank].append((known[i] if known else 0, call))
    result: dict[Group, dict[int, list[Call]]] = {}
    for group, by_rank in placed.items():
        members = [rank for rank in group if rank in calls]
        start = max(rows[0][0] for rows in by_rank.values())
        result[group] = {rank: [c for at, c in by_rank.get(rank, ()) if at >= start] for rank in members}
    return result


def find_desync(
    calls: Mapping[int, Sequence[Call]], numbers: Mapping[int, Sequence[int]] | None = None
) -> Desync | None:
    """The disagreement that explains the others; None where all ranks agree. Arguments as of `sequences`.

    Of several groups: a mismatch, then a call that a rank which waits nowhere did not enter, by time.
    """
    results = [one for group, rows in sequences(calls, numbers).items() if (one := _of_group(group, rows, calls))]
    results += _messages(calls)
    if not results:
        return None
    for i, one in enumerate(results):
        others = [[call for call in calls.get(rank, ()) if call.group != one.group] for rank in one.ranks]
        if one.kind == "missing" and all(any(call.state != "completed" for call in made) for made in others):
            results[i] = replace(one, kind="deadlock")
    return min(results, key=lambda one: (get_args(Kind).index(one.kind), one.call.begin or 0.0))


def _signature(call: Call) -> tuple[str, str, int]:
    return (call.op, "", -1) if call.op in _UNEVEN else (call.op, call.dtype, call.inputs)


def _of_group(group: Group, rows: Mapping[int, Sequence[Call]], calls: Mapping[int, Sequence[Call]]) -> Desync | None:
    for number in range(max(map(len, rows.values()))):
        here = {rank: made[number] for rank, made in rows.items() if number < len(made)}
        counts = Counter(_signature(call) for call in here.values())
        common = max(counts, key=lambda signature: counts[signature])
        call = next(call for call in here.values() if _signature(call) == common)
        if len(counts) > 1:
            odd = tuple(rank for rank, call in here.items() if _signature(call) != common)
            return Desync("mismatch", group, number, call, odd, tuple(here[rank] for rank in odd))
        missing = tuple(rank for rank in rows if rank not in here)
        if missing:
            pair = zip(rows[missing[0]], rows[call.rank], strict=False)
            parted = next(((a.where, b.where) for a, b in pair if a.where != b.where), None)
            last = tuple(_last(calls[rank]) for rank in missing)
            return Desync("missing", group, number, call, missing, last, parted)
        # Where it has ended on one rank, it is about to end on the others, or their dumps are older.
        if all(call.state != "completed" for call in here.values()):
            if silent := tuple(rank for rank in group if rank not in rows):
                return Desync("silent", group, number, call, silent, (None,) * len(silent))
            return Desync("unfinished", group, number, call, tuple(here), tuple(here.values()))
    return None


def _last(made: Sequence[Call]) -> Call | None:
    """The call in which a rank waits, else the last one that it made."""
    return next((call for call in made if call.state != "completed"), made[-1] if made else None)


def _messages(calls: Mapping[int, Sequence[Call]]) -> Iterator[Desync]:
    """Messages that have not ended and whose other end was not called. Lost calls make counts of them useless."""
    if any(made and made[0].order > 0 for made in calls.values()):
        return
    ends: dict[tuple[str, int, int], list[Call]] = defaultdict(list)
    for made in calls.values():
        for call in made:
            if call.op in MESSAGES and call.peer is not None:
                ends[call.op, call.rank, call.peer].append(call)
    for (op, rank, peer), made_here in ends.items():
        there = len(ends.get(("recv" if op == "send" else "send", peer, rank), ()))
        if peer in calls and there < len(made_here) and (call := made_here[there]).state != "completed":
            pair = (min(rank, peer), max(rank, peer))
            yield Desync("missing", pair, there, call, (peer,), (_last(calls[peer]),))
