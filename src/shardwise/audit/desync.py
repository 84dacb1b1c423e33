"""Calls of ranks that cannot meet: who did not make one, who made another one, and where.

One comparison for programs that were recorded here and for files of other software. What a mismatch of a recorded
program began with, by its lines and steps, is in `differences.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.reading import RankRecording
from shardwise.codec import Json
from shardwise.report.units import format_bytes, format_ranks

Group = tuple[int, ...]
Groups = Mapping[Any, dict[int, list[Call]]]
"""(communicator, ranks), or ("message", sender, receiver) -> rank -> its calls."""


class CallSignature(NamedTuple):
    """A call as it can be compared between ranks; a step of the optimizer has no `op`."""

    op: str = ""
    size: int = 0
    dtype: str = ""
    where: str = ""
    ranks: int = 0
    root: int | None = None

    def fits(self, other: CallSignature) -> bool:
        """Whether both can be one collective. An unknown dtype may be any."""
        mine, theirs = self._replace(where="", ranks=0), other._replace(where="", ranks=0)
        if not (self.dtype and other.dtype):
            mine, theirs = mine._replace(dtype=""), theirs._replace(dtype="")
        return mine == theirs


def signature_of(call: Call) -> CallSignature:
    """What must be equal on all ranks, with the line."""
    size = 0
    match call.op:
        case "all_reduce" | "reduce" | "broadcast" | "reduce_scatter" | "send" | "all_gather_into" | "gather":
            size = call.inputs
        case "all_gather" | "recv" | "scatter":
            size = call.outputs
    root = call.peer if call.op in ("broadcast", "reduce", "gather", "scatter") else None
    dtype = "" if call.op == "barrier" else call.dtype
    return CallSignature(call.op, size, dtype, call.where, len(call.group), root)


def both_ends(token: CallSignature) -> CallSignature:
    """A message as both of its ends see it; any other call as it is."""
    return token._replace(op="message", where="", ranks=0) if token.op in MESSAGES else token


@dataclass(frozen=True)
class Mismatch:
    """Calls of one group, or messages of one pair, that do not match."""

    group: Group
    calls: dict[int, list[Call]]
    """Rank -> its calls in the group."""
    index: int
    """The first that does not match."""
    time: float
    hard: bool
    """Whether ranks made calls that cannot meet; else some of them made none."""

    def unmatched(self) -> list[Call]:
        return [some[self.index] for some in self.calls.values() if self.index < len(some)]


def grouped(recordings: Iterable[RankRecording]) -> Groups:
    """Calls by group and by pair. Messages that a rank takes from anyone are left out, and all messages where calls are
    lost: they cannot be paired. Of calls with numbers, those before the latest start of a recording are left out."""
    groups: dict[Any, dict[int, list[Call]]] = {}
    ranks = {one.rank: one for one in recordings}
    anyone = set()
    for one in ranks.values():
        for call in one.calls:
            if call.op in MESSAGES:
                ends = (one.rank, call.peer) if call.op == "send" else (call.peer, one.rank)
                anyone |= {one.rank} if call.peer is None else set()
                key: Any = ("message", *ends)
            else:
                key = call.comm, call.group
            groups.setdefault(key, {}).setdefault(one.rank, []).append(call)
    lost = any(one.calls and one.calls[0].order for one in ranks.values())
    for key in [key for key in groups if key[0] == "message" and (lost or {*key[1:]} & anyone or None in key)]:
        del groups[key]
    for key, calls in groups.items():
        start = max(some[0].number for some in calls.values())
        for rank in calls:
            calls[rank] = [call for call in calls[rank] if call.number >= start]
        for rank in key[1:] if key[0] == "message" else key[1]:
            if rank in ranks:
                calls.setdefault(rank, [])
    return groups


def mismatches(groups: Groups, ended: Iterable[int] = ()) -> Iterator[Mismatch]:
    """The first mismatch of every group. ended: ranks that will make no more calls."""
    for key, calls in groups.items():
        for index in range(max(map(len, calls.values()))):
            here = [some[index] for some in calls.values() if index < len(some)]
            group = tuple(sorted(key[1:])) if key[0] == "message" else key[1]
            mismatch = Mismatch(group, calls, index, min(call.begin or 0.0 for call in here), len(_kinds(here)) > 1)
            if mismatch.hard:
                yield mismatch
                break
            if len(here) < len(calls):
                if here[0].rank in ended or any(call.op not in MESSAGES or call.state != "completed" for call in here):
                    yield mismatch
                break


def _kinds(calls: Iterable[Call]) -> list[list[Call]]:
    """Calls that can be one collective together."""
    kinds: list[list[Call]] = []
    for call in calls:
        token = both_ends(signature_of(call))
        fitting = [some for some in kinds if both_ends(signature_of(some[0])).fits(token)]
        if fitting:
            fitting[0].append(call)
        else:
            kinds.append([call])
    return kinds


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
        what = describe(self.call, False)
        of = f"call {self.number} of {format_ranks(self.group)}"
        who = format_ranks(self.ranks)
        if self.kind == "unfinished":
            return f"all ranks entered {what}, {of}: a broken or slow link, or dumps that were taken while it ran"
        if self.kind == "silent":
            return f"{what}, {of}, waits for {who}, of which there is no recording"
        first = self.instead[0]
        at = f": {describe(first, False)}" if first else ""
        others = tuple(rank for rank in self.group if rank not in self.ranks)
        if self.kind == "mismatch" and first and len(self.ranks) >= len(others):
            return f"{who} made {describe(first, False)}, and {format_ranks(others)} made {what}, as {of}"
        if self.kind == "mismatch":
            return f"{who} made another call than the others, {what}, {of}{at}"
        after = f"; the last call there{at}" if first else "; it made no call"
        if self.parted:
            after += "; it left the way of the others at {}, where they are at {}".format(*self.parted)
        if self.kind == "deadlock":
            return f"{who} did not enter {what}, {of}, and waits in another call for ranks that wait here{after}"
        return f"{who} did not enter {what}, {of}{after}"


def describe(call: Call, whole: bool = True) -> str:
    """A call in words: operation, bytes and line; as a whole its type and ranks, else whether it has ended."""
    size = max(call.inputs, call.outputs)
    text = f"{call.op} of {format_bytes(size)}" if size and call.op != "barrier" else call.op
    if whole and size and call.op != "barrier":
        text += f" {call.dtype}"
    if call.op in MESSAGES:
        text += f" {'to' if call.op == 'send' else 'from'} rank {call.peer}" if call.peer is not None else ""
    elif whole and call.group:
        text += f" on {format_ranks(call.group)}"
    text += f" at {call.where}" if call.where else ""
    return text if whole or call.state == "completed" else f"{text} (not ended)"


def find_desync(recordings: Sequence[RankRecording]) -> Desync | None:
    """The disagreement that explains the others; None where all ranks agree.

    Of several groups: a mismatch, then a call that a rank which waits nowhere did not enter, by time.
    """
    groups = grouped(recordings)
    calls = {one.rank: one.calls for one in recordings}
    stuck = {one.group: one for key, rows in groups.items() if key[0] != "message" and (one := _stuck(key[1], rows))}
    results = []
    for mismatch in mismatches(groups):
        before = stuck.get(mismatch.group)
        if mismatch.hard or before is None or before.number > mismatch.index:
            stuck.pop(mismatch.group, None)
            results.append(_desync(mismatch, calls))
    results += stuck.values()
    for i, one in enumerate(results):
        others = [[call for call in calls[rank] if call.group != one.group] for rank in one.ranks if rank in calls]
        if one.kind == "missing" and all(any(call.state != "completed" for call in made) for made in others):
            results[i] = replace(one, kind="deadlock")
    return min(results, key=lambda one: (get_args(Kind).index(one.kind), one.call.begin or 0.0), default=None)


def _desync(mismatch: Mismatch, calls: Mapping[int, Sequence[Call]]) -> Desync:
    """A mismatch as what the fewest ranks did."""
    rows, number = mismatch.calls, mismatch.index
    most = max(_kinds(mismatch.unmatched()), key=len)
    usual = {call.rank for call in most}
    if mismatch.hard:
        odd = {call.rank: call for call in mismatch.unmatched() if call.rank not in usual}
        return Desync("mismatch", mismatch.group, number, most[0], tuple(odd), tuple(odd.values()))
    missing = tuple(rank for rank, made in rows.items() if number >= len(made))
    pair = zip(rows[missing[0]], rows[most[0].rank], strict=False)
    parted = next(((a.where, b.where) for a, b in pair if a.where != b.where), None)
    message = most[0].op in MESSAGES
    last = tuple(_last(calls[rank]) for rank in missing)
    return Desync("missing", mismatch.group, number, most[0], missing, last, None if message else parted)


def _stuck(group: Group, rows: Mapping[int, Sequence[Call]]) -> Desync | None:
    """The first call of a group that no rank has left. Where it has ended on one, it is about to end on the others."""
    for number, here in enumerate(zip(*rows.values(), strict=False)):
        if len(group) > 1 and all(call.state != "completed" for call in here):
            if silent := tuple(rank for rank in group if rank not in rows):
                return Desync("silent", group, number, here[0], silent, (None,) * len(silent))
            return Desync("unfinished", group, number, here[0], tuple(rows), here)
    return None


def _last(made: Sequence[Call]) -> Call | None:
    """The call in which a rank waits, else the last one that it made."""
    return next((call for call in made if call.state != "completed"), made[-1] if made else None)
