"""Calls of ranks that cannot meet: of one group, or of one pair. What a mismatch began with, by the lines and steps of
the ranks, is in `differences.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.reading import RankRecording
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
    """The first mismatch of every group, unless all are still in an earlier call. ended: ranks that will make no more
    calls."""
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
            if key[0] != "message" and all(call.state != "completed" for call in here):
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


def describe(call: Call) -> str:
    """A call in words: operation, its number in the group where it has one, bytes, type, ranks and line."""
    size = max(call.inputs, call.outputs)
    text = f"{call.op} {call.number}" if call.number else call.op
    if size and call.op != "barrier":
        text += f" of {format_bytes(size)} {call.dtype}".rstrip()
    if call.op in MESSAGES:
        text += f" {'to' if call.op == 'send' else 'from'} rank {call.peer}" if call.peer is not None else ""
    elif call.group:
        text += f" on {format_ranks(call.group)}"
    return f"{text} at {call.where}" if call.where else text
