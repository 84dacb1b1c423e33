"""The first rank, call and line at which ranks of a program differ.

Evidence that something is wrong is hard: calls of one group that cannot meet (another operation, size, type or root), a
rank that died, raised or ended, or ranks that wait for one another. Where it began is then located by comparing what
the ranks did, lines and optimizer steps included; lines alone never make a program wrong, since ranks may take
different branches to the same call.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Literal, NamedTuple

from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.desync import CallSignature, Mismatch, both_ends, describe, grouped, mismatches, signature_of
from shardwise.audit.reading import RankRecording
from shardwise.codec import Json
from shardwise.report.units import format_ranks

Kind = Literal[
    "skipped", "extra", "reordered", "operation", "size", "dtype", "root", "group", "died", "error", "ended", "waiting",
    "silent", "unfinished",
]  # fmt: skip
_REACH = 12
"""Calls over which a shift between two ranks is looked for."""
_CONTEXT = 200
"""Calls before one that are compared with what came before others like it."""
_CLEAR = 1.25
"""Times as many calls before one that came before others like it, for a rank to be taken as right."""
_COMMUNICATION = re.compile(
    r"\b(?:connection|peer|\w*gloo|nccl\w*|timed out|timeout(?:error)?|preamble|dist\w*error|unhandled system)\b", re.I
)
"""Words of errors that follow from what another rank did."""


@dataclass(frozen=True)
class Difference(Json):
    """Where ranks began to differ."""

    kind: Kind
    ranks: tuple[int, ...]
    """Ranks that do something else than the others; all that may, where `sure` is false."""
    sure: bool
    where: str
    """file:line of the call that is wrong or missing."""
    op: str
    step: int
    """Optimizer steps before it."""
    text: str
    """One sentence."""
    waiting: tuple[str, ...] = ()
    """What every rank was doing at the end."""

    json_omits = ("waiting",)

    def waiting_lines(self, most: int) -> Iterator[str]:
        """What every rank was doing, for a terminal."""
        yield from (f"  {text}" for text in self.waiting[:most])
        if len(self.waiting) > most:
            yield f"  and {len(self.waiting) - most} ranks more"


class _Place(NamedTuple):
    """One entry of a rank's sequence; `call` is None for a step of the optimizer."""

    token: CallSignature
    call: Call | None


_STEP = _Place(CallSignature(), None)


def _with_steps(calls: Sequence[Call], steps: int) -> list[_Place]:
    places, step = [], 0
    for call in calls:
        places += [_STEP] * (call.step - step)
        step = call.step
        places.append(_Place(signature_of(call), call))
    return places + [_STEP] * (steps - step)


class _Program:
    def __init__(self, recordings: Sequence[RankRecording]) -> None:
        self.recordings = {one.rank: one for one in recordings}
        self.calls = {one.rank: one.calls for one in recordings}
        self.whole = {one.rank: [_STEP, *_with_steps(one.calls, len(one.steps))] for one in recordings}
        self.groups = grouped(recordings)
        self.positions: dict[CallSignature, list[tuple[int, int]]] = defaultdict(list)
        for rank, places in self.whole.items():
            for index, place in enumerate(places):
                self.positions[_role(place.token)].append((rank, index))

    def index(self, call: Call) -> int:
        return next(i for i, place in enumerate(self.whole[call.rank]) if place.call is call)

    def lacks(self, rank: int, call: Call) -> bool:
        """Whether a rank made fewer calls of this line on this group than the rank of the call."""
        made = (Counter((one.where, one.comm, one.group) for one in self.calls[r]) for r in (rank, call.rank))
        mine, theirs = (some[call.where, call.comm, call.group] for some in made)
        return mine < theirs

    def waits_in(self, rank: int) -> Call | None:
        """A rank's last call, if it has not ended."""
        return next((call for call in self.calls[rank][-1:] if call.state != "completed"), None)

    def first(self, call: Call) -> bool:
        """Whether no rank made such a call at this line before."""
        every = (entry for one in self.recordings.values() for entry in one.calls)
        before = (entry for entry in every if (entry.where, entry.op) == (call.where, call.op))
        return all((entry.step, entry.begin or 0.0) >= (call.step, call.begin or 0.0) for entry in before)

    def repeats(self, rank: int) -> bool:
        """Whether one of a rank's steps before began with the messages since its last optimizer step."""
        tokens = [p.token for p in self.whole[rank] if p.call is None or p.call.op in MESSAGES]
        marks = [index for index, token in enumerate(tokens) if token == _STEP.token]
        here = tokens[marks[-1] :]
        return any(tokens[mark : mark + len(here)] == here for mark in marks[:-1])

    def usual(self, rank: int, index: int) -> int:
        """How many calls before this one also came before one like it, elsewhere."""
        places = self.whole[rank]
        if index >= len(places):
            return 0
        best = 0
        for other, at in self.positions[_role(places[index].token)]:
            if (other, at) == (rank, index):
                continue
            theirs, length = self.whole[other], 1
            while length < min(_CONTEXT, index + 1, at + 1) and _role(places[index - length].token) == _role(
                theirs[at - length].token
            ):
                length += 1
            best = max(best, length)
        return best


def _role(token: CallSignature) -> CallSignature:
    return token._replace(root=None)


def first_difference(recordings: Sequence[RankRecording]) -> Difference | None:
    """Where ranks that made calls of the same groups began to differ; None where all their calls meet.

    A program that still runs differs also where a rank has not arrived yet: ask when nothing has moved for a while.
    """
    program = _Program(recordings)
    left = [rank for rank, one in program.recordings.items() if one.exit is not None]
    results = sorted(mismatches(program.groups, left), key=lambda one: (not one.hard, one.time))
    ends = _ended(program)
    if results and results[0].hard:
        return _finish(program, _Parting(program, results[0]).difference())
    if ends is not None:
        return _finish(program, ends)
    waits = [_Parting(program, one).difference() for one in results[:_REACH] if not one.hard]
    # A rank that waits is late itself. One that skips a call may be seen from both sides: that it went on, and that it
    # did not come.
    waits.sort(
        key=lambda one: (not one.sure or any(map(program.waits_in, one.ranks)), not one.sure, one.kind == "extra")
    )
    first = waits[0] if waits else _ended(program, communication=True)
    return first and _finish(program, first)


def unfinished(recordings: Sequence[RankRecording]) -> Difference | None:
    """A call that all recorded ranks of a group entered and none left, first one that waits for other ranks."""
    known = {one.rank for one in recordings}
    results: list[tuple[Difference, float]] = []
    for key, rows in grouped(recordings).items():
        waiting = (some for some in zip(*rows.values(), strict=False) if all(one.state != "completed" for one in some))
        if key[0] == "message" or len(key[1]) < 2 or (here := next(waiting, None)) is None:
            continue
        call, silent = here[0], tuple(rank for rank in key[1] if rank not in known)
        text = f"all ranks entered {describe(call)}: a broken or slow link, or dumps that were taken while it ran"
        if silent:
            text = f"{describe(call)} waits for {format_ranks(silent)}, which left no recording"
        kind: Kind = "silent" if silent else "unfinished"
        results.append((_at(kind, silent or tuple(rows), call, text), call.begin or 0.0))
    return min(results, key=lambda one: (one[0].kind == "unfinished", one[1]), default=(None, 0.0))[0]


def _finish(program: _Program, difference: Difference) -> Difference:
    return replace(difference, waiting=tuple(_doing(one) for one in program.recordings.values()))


def _doing(one: RankRecording) -> str:
    open_calls = [call for call in one.calls if call.state != "completed"]
    if one.error is not None:
        return f"rank {one.rank}: {one.error[1]}" + (f" ({one.error[2]})" if one.error[2] else "")
    if one.killed:
        return f"rank {one.rank}: gone" + (f"; its last call: {describe(one.calls[-1])}" if one.calls else "")
    if open_calls:
        return f"rank {one.rank}: in {describe(open_calls[0])}"
    if one.exit is not None:
        return f"rank {one.rank}: ended"
    if one.position is not None and one.position[1]:
        return f"rank {one.rank}: outside of any call, at {one.position[1]}"
    return f"rank {one.rank}: " + (f"behind {describe(one.calls[-1])}" if one.calls else "no call yet")


def _ended(program: _Program, communication: bool = False) -> Difference | None:
    """A rank that died or raised, the first one. communication: errors that may follow from another rank's count."""
    ends: list[tuple[float, RankRecording]] = []
    for one in program.recordings.values():
        if one.error is not None and (communication or not _COMMUNICATION.search(one.error[1])):
            ends.append((one.error[0], one))
        elif one.killed:
            ends.append((one.died or 0.0, one))
    if not ends:
        return None
    _, one = min(ends, key=lambda end: end[0])
    last, step = one.calls[-1] if one.calls else None, len(one.steps)
    if one.error is not None:
        _, said, where = one.error
        text = f"rank {one.rank} raised {said}"
        return Difference("error", (one.rank,), True, where, last.op if last else "", step, text)
    where, text = (last.where, f"; its last call was {describe(last)}") if last else ("", " before its first call")
    return Difference("died", (one.rank,), True, where, last.op if last else "", step, f"rank {one.rank} died{text}")


# -- Where a difference began


def _at(kind: Kind, ranks: Iterable[int], call: Call, text: str, sure: bool = True) -> Difference:
    return Difference(kind, tuple(ranks), sure, call.where, call.op, call.step, text)


class _Parting:
    """The place at which the ranks of a mismatch began to differ."""

    def __init__(self, program: _Program, candidate: Mismatch) -> None:
        self.program, self.candidate = program, candidate
        steps = {rank: len(program.recordings[rank].steps) for rank in candidate.calls}
        marked = max(steps.values()) - min(steps.values()) <= 1
        self.sequences = {
            rank: _with_steps(calls, steps[rank]) if marked else [_Place(signature_of(call), call) for call in calls]
            for rank, calls in candidate.calls.items()
        }
        self.messages = any(call.op in MESSAGES for some in candidate.calls.values() for call in some)
        self.see: Callable[[CallSignature], CallSignature] = both_ends if self.messages else lambda token: token
        self.index = self._diverged()
        self.places = {rank: next(iter(some[self.index :]), None) for rank, some in self.sequences.items()}
        """What every rank did there; None at its end."""
        self.calls = {rank: place and place.call for rank, place in self.places.items()}
        self.made = {rank: call or program.waits_in(rank) for rank, call in self.calls.items()}
        """The call that it made there, else the one in which it waits, in any group."""

    def _diverged(self) -> int:
        """The first index at which sequences do something else, or are shifted against one another."""
        sequences, see = self.sequences.values(), self.see
        for index in range(max(map(len, sequences))):
            kinds = {see(places[index].token) if index < len(places) else None for places in sequences}
            if len(kinds) == 1 or kinds == {None, see(_STEP.token)}:  # a rank that waits has not come to its step
                continue
            if None in kinds or not all(a.fits(b) for a in kinds for b in kinds if a and b):
                return index
            windows = {tuple(place.token for place in some[index : index + _REACH]) for some in sequences}
            # One does here, by its line, what the other does later.
            if any(a[0] != b[0] and a[0] in b[1:] for a, b in permutations(windows, 2)):
                return index
        unmatched = self.candidate.unmatched()
        return next(at for some in sequences for at, place in enumerate(some) if place.call and place.call in unmatched)

    def difference(self) -> Difference:
        if (early := self._ended_early()) is not None:
            return early
        # Ranks that have come to no further call, and wait in none, where others wait for them.
        waited = any(call.state != "completed" for call in self.made.values() if call is not None)
        known = self.program.recordings
        absent = [rank for rank, call in self.made.items() if waited and call is None and known[rank].exit is None]
        ranks, sure = (absent, True) if absent else self._deviants()
        others = [rank for rank in self.sequences if rank not in ranks]
        result = self._described(ranks, others) if sure and others else None
        if result is None and len(ranks) == len(others) == 1:
            moved = [self._elsewhere(*sides, "operation") for sides in ((ranks, others), (others, ranks))]
            result = moved[0] or moved[1] if None in moved else None
        return result if result and result.sure else self._fewer_passes() or result or self._unsure()

    def _ended_early(self) -> Difference | None:
        """Ranks that did all that the others did, a step less, and ended: of data that is not even."""
        known = self.program.recordings
        idle = [rank for rank, place in self.places.items() if not place]
        ended = [rank for rank in idle if known[rank].exit is not None and known[rank].error is None]
        others = [place.call for place in self.places.values() if place]
        if not ended or not others or (call := others[0]) is None:
            return None
        steps = len(known[ended[0]].steps)
        if not steps or call.step < steps:
            return None
        text = f"{format_ranks(tuple(ended))} ended after {steps} steps, and rank {call.rank} made {describe(call)}"
        return _at("ended", ended, call, text)

    def _deviants(self) -> tuple[list[int], bool]:
        """(ranks that differ, whether that is sure): a minority, or who does what has not been done before."""
        unlike: dict[CallSignature | None, list[int]] = defaultdict(list)
        for rank, place in self.places.items():
            unlike[place and self.see(place.token)].append(rank)
        classes = sorted(unlike.values(), key=len)
        minority = [rank for some in classes[:-1] for rank in some]
        if len(minority) * 2 < len(self.sequences):
            return minority, True
        if odd := self._by_count() or self._new_order():
            return odd, True
        scores = {tuple(some): max(map(self._habit, some)) for some in classes}
        best = max(scores.values())
        odd = [rank for some, score in scores.items() if score < best for rank in some]
        if any((call := self.made[rank]) is not None and self.program.first(call) for rank in odd):
            return minority, False  # a line that is new may be right, and the rank that did not come to it wrong
        rest = max((score for score in scores.values() if score < best), default=best)
        # New arguments of a line that both are at need no more than one call like it before.
        lines = {place.token.where if place else "" for place in self.places.values()}
        clear = best >= (1 if rest == 0 and len(lines) == 1 else 2) and best >= _CLEAR * rest
        return (odd, True) if odd and clear and list(scores.values()).count(best) == 1 else (minority, False)

    def _by_count(self) -> list[int]:
        """Ranks that made a call less, or else more, often in this step than all did in every other step."""
        made: dict[int, list[list[CallSignature]]] = {}
        for rank, places in self.sequences.items():
            made[rank] = [[]]
            for place in places:
                if place.call is None:
                    made[rank].append([])
                else:
                    made[rank][-1].append(self.see(place.token))
        step = {rank: sum(one.call is None for one in some[: self.index]) for rank, some in self.sequences.items()}
        numbered = [(at, one) for rank, some in made.items() for at, one in enumerate(some[:-1]) if at != step[rank]]
        others = [one for _, one in numbered]
        later = any(at for at, _ in numbered)  # a first step alone may have fewer calls, as DeepSpeed's stage 3 has
        less, more = set(), set()
        for token in {token for one in others for token in one}:
            usual = {one.count(token) for one in others}
            due = max(usual)
            # What no rank makes in this step is made once, as a setup is.
            if len(usual) == 1 and any(token in some[step[rank]] for rank, some in made.items()):
                ends = [len(one) - one[::-1].index(token) for one in others]
                # Calls that follow all of these.
                behind = set.intersection(
                    *(set(one[end:]) - set(one[:end]) for one, end in zip(others, ends, strict=True))
                )
                for rank, some in made.items():
                    here = some[step[rank]]
                    over = step[rank] < len(some) - 1 or bool(behind & set(here))
                    less |= {rank} if here.count(token) < due and over else set()
                    more |= {rank} if here.count(token) > due and later else set()
        odd = less or more
        return sorted(odd) if len(odd) < len(self.sequences) else []

    def _new_order(self) -> list[int]:
        """Of two ranks that wait in messages the one whose step has not begun like one of its steps before."""
        calls = self.made.values()
        if not self.messages or any(call is None or call.state == "completed" for call in calls):
            return []
        odd = [rank for rank in self.made if not self.program.repeats(rank)]
        new = any(call is not None and self.program.first(call) for call in calls)
        return odd if len(odd) < len(self.made) and not new else []

    def _habit(self, rank: int) -> int:
        """How usual what a rank did here is, after what it did before."""
        program = self.program
        if (call := self.made[rank]) is not None:
            return program.usual(rank, program.index(call))
        before = [place.call for place in self.sequences[rank][: self.index] if place.call is not None]
        return program.usual(rank, program.index(before[-1]) + 1 if before else max(0, len(program.whole[rank]) - 1))

    def _unsure(self) -> Difference:
        """Ranks differ, and nothing says which of them is wrong."""
        calls = [call for call in self.made.values() if call is not None] or self.candidate.unmatched()
        said = "; ".join(f"rank {call.rank} makes {describe(call)}" for call in calls[:4])
        missing = [rank for rank in self.sequences if rank not in {call.rank for call in calls}]
        said += f"; {format_ranks(tuple(missing))} does not" if missing else ""
        return _at("waiting", [*self.sequences], calls[0], f"not sure which rank is wrong: {said}", sure=False)

    def _passes(self, call: Call) -> int:
        """Backward passes since the rank's last optimizer step, or of that step where there are none since."""
        marks = self.program.recordings[call.rank].steps[max(0, call.step - 2) : call.step]
        ends = [0, 0, *(mark.passes for mark in marks)]
        return call.passes - ends[-1] or ends[-1] - ends[-2]

    def _fewer_passes(self) -> Difference | None:
        """A micro-batch less: fewer backward passes than ever came before a call's line, where others have as many."""
        calls = [call for call in self.made.values() if call is not None]
        usual: dict[str, set[int]] = {call.where: set() for call in calls}
        for one in (one for call in calls for one in self.program.calls[call.rank][: call.order]):
            if one.where in usual:
                usual[one.where].add(self._passes(one))
        odd = [call for call in calls if self._passes(call) < min(usual[call.where], default=0)]
        rest = [call for call in calls if call not in odd and self._passes(call) <= max(usual[call.where], default=-1)]
        if not odd or not rest or len(odd) + len(rest) < len(self.made):
            return None
        ranks, count, due = tuple(call.rank for call in odd), self._passes(odd[0]), min(usual[odd[0].where])
        text = f"{format_ranks(ranks)} skipped {describe(rest[0])} (backward passes before {describe(odd[0])}: "
        return _at("skipped", ranks, rest[0], f"{text}{count}, not {due})")

    def _described(self, ranks: list[int], others: list[int]) -> Difference | None:
        """What deviating ranks did in place of what the others did."""
        rank, who = ranks[0], format_ranks(tuple(ranks))
        made, due, kind = self.calls[rank], self.calls[others[0]], self._kind(rank, others[0])
        if elsewhere := self._elsewhere(ranks, others, kind):
            return elsewhere
        if kind == "skipped" and due is not None:
            return self._skipped(ranks, due)
        if (named := made or due) is None:
            return None
        if kind == "waiting" and due is not None:
            text = f"not sure whether {who} made one call more, {describe(named)}, or skipped {describe(due)}"
            return _at(kind, ranks, named, text, sure=False)
        if kind == "extra":
            text = f"{who} made one call more: {describe(named)}"
        elif kind == "reordered" and due is not None:
            text = f"{who} made {describe(named)} before {describe(due)}, and the others behind it"
        else:
            text = f"{who} made {describe(named)}" + (f", where rank {due.rank} made {describe(due)}" if due else "")
        return _at(kind, ranks, named, text)

    def _elsewhere(self, ranks: list[int], others: list[int], kind: Kind) -> Difference | None:
        """A call that a rank made on another group than the others made it on."""
        rank, program = ranks[0], self.program
        made, due = self.calls[rank], self.calls[others[0]]
        pairs: list[tuple[Call, Call]] = []
        if made is not None and kind in ("extra", "operation", "waiting"):
            theirs = (call for other in program.calls if other != rank for call in program.calls[other])
            lacking = (call for call in theirs if _twin(call, made) and rank in call.group)
            pairs += [(made, right) for right in lacking if program.lacks(rank, right)]
        if due is not None and kind in ("skipped", "operation"):
            last = max((p.call.order for p in self.sequences[rank][: self.index] if p.call), default=-1)
            twins = [call for call in program.calls[rank] if _twin(call, due)]
            known = {call.comm for call in twins if call.order <= last}  # a helper's line, for groups of several axes
            new = (call for call in twins if call.comm not in known)
            pairs += [(one, due) for one in new if due.rank not in one.group or program.lacks(due.rank, one)]
        for wrong, right in pairs:
            text = f"{format_ranks(tuple(ranks))} made {describe(wrong)}, "
            return _at("group", ranks, wrong, f"{text}where rank {right.rank} made it on {format_ranks(right.group)}")
        return None

    def _skipped(self, ranks: list[int], named: Call) -> Difference:
        """A call that ranks did not make, or the other end of a message."""
        rank, who, program = ranks[0], format_ranks(tuple(ranks)), self.program
        calls = [place.call for place in self.sequences[rank] if place.call is not None]
        if named.op in MESSAGES:
            op, where = ("recv", "send")[named.op == "recv"], calls[-1].where if calls else named.where
            text = f"{who} made no {op} for {describe(named)} of rank {named.rank}"
            text += f"; its last: {where}" if calls else ""
            return replace(_at("skipped", ranks, named, text), where=where, op=op)
        follows = next((place.call for place in self.sequences[rank][self.index :] if place.call is not None), None)
        verb, partner = "skipped" if follows else "did not enter", "made" if named.state == "completed" else "waited in"
        text = f"{who} {verb} {describe(named)}, which rank {named.rank} {partner}"
        if follows:
            text += f"; next it made {describe(follows)}"
        elif waits := program.waits_in(rank):
            text += f"; it waits in {describe(waits)}"
        elif program.recordings[rank].exit is not None and not self.places[rank]:
            text += "; it has ended"
        return _at("skipped", ranks, named, text)

    def _distance(self, rank: int, sought: CallSignature) -> int:
        """How many calls behind a rank's call another call comes; `_REACH` for none. A rank that could not continue is
        taken to do what followed such a call before."""
        runs = [self.sequences[rank][self.index : self.index + _REACH]]
        if len(runs[0]) < 2:
            last = [place.token for place in runs[0]]
            earlier = [some[: self.index] for some in self.sequences.values()]
            runs = [some[at : at + _REACH] for some in earlier for at, one in enumerate(some) if [one.token] == last]
        tokens = [[place.token for place in run[1:]] for run in runs]
        return min((run.index(sought) + 1 for run in tokens if sought in run), default=_REACH)

    def _kind(self, rank: int, other: int) -> Kind:
        """How a rank's sequence differs from another's, from the first place at which it does."""
        a, b = ([place.token for place in self.sequences[one][self.index :]] for one in (rank, other))
        if not a or a[0] == _STEP.token:
            return "skipped"
        if not b or b[0] == _STEP.token:
            return "extra"
        # How far behind a rank's first call the other's comes.
        later, sooner = self._distance(other, a[0]), self._distance(rank, b[0])
        if a[1:2] == [b[0]] and b[1:2] == [a[0]]:
            return "reordered"
        if later == _REACH and a[0].where == b[0].where and a[0].op == b[0].op:
            return "dtype" if a[0].dtype != b[0].dtype else "size" if a[0].size != b[0].size else "root"
        if later == sooner == _REACH:
            before = [some[: self.index] for some in self.sequences.values()]
            if _in_order(before, a[0].where, b[0].where):
                return "extra"
            return "skipped" if _in_order(before, b[0].where, a[0].where) else "operation"
        if later <= sooner:
            return "skipped"
        # Without its next call, a rank that came to a known call may have made it once more or skipped to it.
        return "waiting" if later < _REACH and len(a) == 1 else "extra"


def _in_order(sequences: Iterable[list[_Place]], first: str, then: str) -> bool:
    """Whether the calls of one line came before those of another in every step that has both."""
    orders = []
    for places in sequences:
        marks = [at for at, place in enumerate(places) if place.call is None]
        lines = [[p.token.where for p in places[a:b]] for a, b in pairwise([0, *marks, len(places)])]
        orders += [
            then not in line[: len(line) - line[::-1].index(first)] for line in lines if {first, then} <= {*line}
        ]
    return bool(orders) and all(orders) and first != then


def _twin(call: Call, other: Call) -> bool:
    """Whether two calls are one of the program, on different groups."""
    if (other.op, other.where, other.inputs) != (call.op, call.where, call.inputs):
        return False
    return (other.comm, other.group) != (call.comm, call.group)
