"""Proving a pipeline right: every action once, in its place, after what it needs, and nobody waits for ever.

1. Each list: actions are those of the rank's stages; each forward, input gradient and weight gradient of each stage and
   micro-batch happens once; whatever needs a result stands after it; messages have the right peer; parameters are there
   while they are computed with; gradients are reduced when they are complete, and a stage computes nothing afterwards
   (all of a step has one version of the weights); the tied table is summed by both its ends; every rank gets the loss
   from the rank that has it.
2. Each pair of ranks: messages, those of the tied table among them, are received in the order in which they are sent.
3. All lists together: every rank comes to its end, though each send stands still until its receive is posted, both ends
   of the tied table for each other, and all ranks for the loss (`flow` with `rendezvous`). The executors wait at fewer
   places: what is proved for them all is that no rank waits for ever.

What is wrong is named by rank, index and action. `memory.peaks` has what is held.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.flow import BlockedRank, flow
from shardwise.schedule.pipeline.plan import PipelineSchedule

MOST = 10
"""Findings that are given at most: the first are the causes."""

_RECV_F, _F, _SEND_F, _RECV_B, _I, _W, _SEND_B, _REDUCED = (1 << bit for bit in range(8))

_RULES = {
    "RECV_F": (_RECV_F, 0),
    "F": (_F, 0),
    "SEND_F": (_SEND_F, _F),
    "RECV_B": (_RECV_B, 0),
    "I": (_I, _F),
    "W": (_W, _I),
    "B": (_I | _W, _F),
    "SEND_B": (_SEND_B, _I),
    "REDUCE_GRAD": (_REDUCED, _W),
}
"""Kind -> (what it does, what must have been done with the same stage and micro-batch before); what comes from
neighbors is added to the latter."""

_DOES = {kind: does for kind, (does, _) in _RULES.items()}
_NEEDS = {kind: needs for kind, (_, needs) in _RULES.items()}
_NAMES = {does: kind for kind, does in _DOES.items() if kind != "B"}
_MESSAGES = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_FORWARD_ONLY = frozenset({"RECV_F", "F", "SEND_F", "UNSHARD", "RESHARD"})


@dataclass(frozen=True)
class PipelineDefect:
    """A defect of a pipeline schedule. rank and index: where in the lists; -1 where an action is missing. action: the
    wrong or missing one. text: one line that names all of them."""

    text: str
    rank: int
    index: int
    action: Action

    def __str__(self) -> str:
        return self.text


def verify(schedule: PipelineSchedule) -> list[PipelineDefect]:
    """Errors of a schedule, causes first, at most `MOST`; an empty list when it is right."""
    checker = _Lists(schedule)
    for rank in range(schedule.ranks):
        checker.check(rank)
    found = checker.found or checker.missing() or _crossed(schedule) or _stuck(schedule)
    return found[:MOST]


class _Lists:
    """The state while lists are read: what has been done with each stage and micro-batch, as bits."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.done = [bytearray(schedule.micro) for _ in range(schedule.stages)]
        self.found: list[PipelineDefect] = []
        self.gathered: set[int] = set()
        self.freed: set[int] = set()
        self.plain: dict[tuple[str, int], tuple[int, int, int, int]] = {}
        self.reduced: Counter[int] = Counter()
        self.endings: Counter[tuple[str, int]] = Counter()

    def check(self, rank: int) -> None:
        found, done = self.found, self.done
        held = set(self.schedule.held[rank])
        self.gathered = set()
        self.plain = plain = self.shortcuts(rank)
        for index, action in enumerate(self.schedule.actions[rank]):
            kind, stage, micro, peer, parts = action
            rule = plain.get((kind, stage))
            if rule and 0 <= micro < self.schedule.micro and peer == rule[2] and not parts:
                did = done[stage][micro]
                if did & rule[1] == rule[0]:
                    done[stage][micro] = did | rule[3]
                    continue
            if parts and not action.overlaps():
                self.complain(rank, index, action, "an OVERLAP_F_B is made of one F and one B")
            parts = parts or (action,)
            for part in parts:
                problem = self.place(part, held) or self.message(part)
                problem = problem or (self.use(part) if part[2] >= 0 else self.whole(part, rank))
                if problem:
                    self.complain(rank, index, part, problem)
                    if len(found) >= MOST:
                        return
            for kind, stage, micro, _, _ in parts:
                if micro >= 0 and stage in held and micro < self.schedule.micro:
                    done[stage][micro] |= _DOES.get(kind, 0)
        for stage in sorted(self.gathered) if self.schedule.gather else ():
            problem = f"it is missing after the last {stage}UNSHARD: the parameters are still there at the end"
            self.complain(rank, -1, Action("RESHARD", stage), problem)

    def shortcuts(self, rank: int) -> dict[tuple[str, int], tuple[int, int, int, int]]:
        """Requirements of the bulk of the actions by the rules below: (kind, stage) -> (what must have been done with
        its micro-batch, of which of these bits, its peer, what it does)."""
        schedule, found = self.schedule, {}
        last = schedule.stages - 1
        for stage in schedule.held[rank] if not schedule.ring else ():
            whole = self.whole_of(stage, 0)
            needs = dict(_NEEDS)
            kinds = [kind for kind in _MESSAGES if whole & _DOES[kind]]
            if not schedule.gather and schedule.train:
                before = not stage or schedule.crosses(stage, stage - 1)
                after = stage == last or schedule.crosses(stage, stage + 1)
                kinds += ["W"] + ["F"] * before + ["I", "B"] * after
                needs["F"] |= whole & _RECV_F
                needs["I"] |= whole & _RECV_B
                needs["B"] |= whole & _RECV_B
            for kind in kinds:
                partner = schedule.partner(Action(kind, stage, 0)) if kind in _MESSAGES else None  # type: ignore[arg-type]
                peer = schedule.placement[partner.stage] if partner else -1
                found[kind, stage] = needs[kind], needs[kind] | _DOES[kind], peer, _DOES[kind]
        return found

    def complain(self, rank: int, index: int, action: Action, problem: str) -> None:
        where = f"action {index} ({action})" if index >= 0 else f"({action})"
        self.found.append(PipelineDefect(f"rank {rank}, {where}: {problem}", rank, index, action))

    def place(self, action: Action, held: set[int]) -> str:
        """Error of an action's stage and micro-batch on a rank that has the stages `held`."""
        kind, stage, micro, _, _ = action
        if stage not in held and kind != "SHARE_LOSS":
            return f"this rank has the stages {', '.join(map(str, sorted(held)))} only"
        if kind != "REDUCE_GRAD" and (micro >= 0) != (kind in _DOES):
            return "it belongs to a micro-batch" if kind in _DOES else "it belongs to no micro-batch"
        return "" if micro < self.schedule.micro else f"there are {self.schedule.micro} micro-batches"

    def message(self, action: Action) -> str:
        """Error of an action's kind or peer."""
        kind = action.kind
        if not self.schedule.train and kind not in _FORWARD_ONLY:
            return "there is no backward pass in this schedule"
        if kind not in _MESSAGES:
            return "" if action.peer < 0 or kind in ("SUM_TIED", "SHARE_LOSS") else "it has no peer"
        partner = self.schedule.partner(action)
        if partner is None:
            return "there is no such message: both ends are on one rank, or it is the model's end"
        rank = self.schedule.placement[partner.stage]
        return "" if action.peer == rank else f"its peer is rank {rank}, which has {partner}, not rank {action.peer}"

    def use(self, action: Action) -> str:
        kind, stage, micro, _, _ = action
        did, bit = self.done[stage][micro], _DOES[kind]
        if did & bit:
            return "it happens a second time"
        if missing := _NEEDS[kind] & ~did:
            return f"{self.name(missing, stage, micro)} must stand before it"
        if kind in ("F", "I", "B") and (problem := self.neighbour(action, did)):
            return problem
        if kind == "REDUCE_GRAD":
            last = self.schedule.stages - 1
            if self.schedule.reduce != "micro":
                return "gradients are reduced once a step in this schedule, not for each micro-batch"
            if self.schedule.tied_here(stage) and not self.done[last][micro] & _W:
                return f"{self.name(_W, last, micro)} must stand before it, which adds to the same tied table"
        if kind in ("F", "I", "W", "B"):
            if self.schedule.gather and stage not in self.gathered:
                freed = f", after {stage}RESHARD" if stage in self.freed else ""
                return f"the parameters are not there: {stage}UNSHARD must stand before it{freed}"
            if self.schedule.reduce == "step" and self.reduced[stage]:
                return f"it stands after {stage}REDUCE_GRAD: that weight version is over"
        return ""

    def neighbour(self, action: Action, did: int) -> str:
        kind, stage, micro, _, _ = action
        if kind == "F":
            source, arrives, result = self.schedule.input_of(stage, micro), _RECV_F, _F
        else:
            source = (stage + 1, micro) if stage + 1 < self.schedule.stages else None
            arrives, result = _RECV_B, _I
        if source is None:
            return ""
        if self.schedule.crosses(stage, source[0]):
            return "" if did & arrives else f"{self.name(arrives, stage, micro)} must stand before it"
        there = self.done[source[0]][source[1]] & result
        return "" if there else f"{self.name(result, *source)} must stand before it"

    def whole(self, action: Action, rank: int) -> str:
        kind, stage, last = action.kind, action.stage, self.schedule.stages - 1
        if kind == "UNSHARD" or kind == "RESHARD":
            return self.residence(action)
        if kind == "OVERLAP_F_B":
            return "it has no parts"
        if kind == "REDUCE_GRAD":
            self.reduced[stage] += 1
            for computation in "FIWB":
                self.plain.pop((computation, stage), None)
            if self.schedule.reduce != "step":
                return "gradients are reduced for each micro-batch in this schedule"
            if self.reduced[stage] > 1:
                return "it happens a second time"
            return self.after_all(_W, stage) or (self.after_all(_W, last) if self.schedule.tied_here(stage) else "")
        self.endings[kind, rank] += 1
        if self.endings[kind, rank] > 1:
            return "it happens a second time"
        return self.tied(action, rank) if kind == "SUM_TIED" else self.loss(action, rank)

    def residence(self, action: Action) -> str:
        if not self.schedule.gather:
            return "parameters are not gathered in this schedule"
        there = action.stage in self.gathered
        if action.kind == "UNSHARD":
            self.gathered.add(action.stage)
            return f"the parameters are there already: {action.stage}RESHARD must stand before it" if there else ""
        self.gathered.discard(action.stage)
        self.freed.add(action.stage)
        return "" if there else "the parameters are not there"

    def tied(self, action: Action, rank: int) -> str:
        ends = self.schedule.tied_ends
        if rank not in ends:
            return "no other rank has a copy of the tied table"
        first, last = ends
        stage, peer = (0, last) if rank == first else (self.schedule.stages - 1, first)
        if (action.stage, action.peer) != (stage, peer):
            return f"on this rank it is {stage}SUM_TIED with rank {peer}, not with rank {action.peer}"
        if self.schedule.reduce == "micro":
            return self.after_all(_REDUCED, stage)
        return "" if self.reduced[stage] else f"{stage}REDUCE_GRAD must stand before it"

    def loss(self, action: Action, rank: int) -> str:
        root, last = self.schedule.loss_rank, self.schedule.stages - 1
        if action.peer != root:
            return f"rank {root} has the loss (stage {last}), not rank {action.peer}"
        return self.after_all(_F, last) if rank == root else ""

    def after_all(self, bit: int, stage: int) -> str:
        missing = [micro for micro, did in enumerate(self.done[stage]) if not did & bit]
        if not missing:
            return ""
        more = f", and {len(missing) - 1} more like it" if len(missing) > 1 else ""
        return f"{self.name(bit, stage, missing[0])} must stand before it{more}"

    def missing(self) -> list[PipelineDefect]:
        schedule = self.schedule
        for stage, rank in enumerate(schedule.placement):
            usual = self.whole_of(stage, 0), self.whole_of(stage, schedule.micro - 1)
            for micro, did in enumerate(self.done[stage]):
                if did == usual[0] == usual[1]:
                    continue
                if absent := self.whole_of(stage, micro) & ~did:
                    both = absent & _I and absent & _W
                    self.absent(rank, Action("B", stage, micro) if both else _first(absent, stage, micro))
            if schedule.train and schedule.reduce == "step" and not self.reduced[stage]:
                self.absent(rank, Action("REDUCE_GRAD", stage))
        for rank in schedule.tied_ends:
            if not self.endings["SUM_TIED", rank]:
                self.absent(rank, Action("SUM_TIED", 0 if rank == schedule.placement[0] else schedule.stages - 1))
        for rank in range(schedule.ranks) if schedule.train else ():
            if not self.endings["SHARE_LOSS", rank]:
                self.absent(rank, Action("SHARE_LOSS", schedule.stages - 1))
        return self.found

    def absent(self, rank: int, action: Action) -> None:
        self.complain(rank, -1, action, "it is missing")

    def whole_of(self, stage: int, micro: int) -> int:
        """All that must be done with a stage and micro-batch."""
        schedule, bits = self.schedule, _F
        if schedule.train:
            bits |= _I | _W | (_REDUCED if schedule.reduce == "micro" else 0)
        for kind in _MESSAGES if schedule.train else _MESSAGES & _FORWARD_ONLY:
            bits |= _DOES[kind] if schedule.partner(Action(kind, stage, micro)) else 0  # type: ignore[arg-type]
        return bits

    def name(self, bits: int, stage: int, micro: int) -> str:
        """The first of some actions; where that is I or W, B would do as well."""
        found = _first(bits, stage, micro)
        return f"{found} or {Action('B', stage, micro)}" if found.kind in "IW" else str(found)


def _first(bits: int, stage: int, micro: int) -> Action:
    kind = next(name for bit, name in _NAMES.items() if bits & bit)
    return Action(kind, stage, micro)  # type: ignore[arg-type]


def _crossed(schedule: PipelineSchedule) -> list[PipelineDefect]:
    stages, micro_batches = schedule.stages, schedule.micro
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, mine in enumerate(schedule.actions):
        for kind, stage, micro, peer, _ in mine:
            # A number for each message: plain ones for so many are quicker than tuples.
            if kind == "SEND_F" or kind == "SEND_B":
                back = kind == "SEND_B"
                to = stage - 1 if back else stage + 1
                to, micro = (0, micro + schedule.ring) if to == stages else (to, micro)
                sent[rank, peer].append((to * micro_batches + micro) * 2 + back)
            elif kind == "RECV_F" or kind == "RECV_B":
                received[peer, rank].append((stage * micro_batches + micro) * 2 + (kind == "RECV_B"))
            elif kind == "SUM_TIED":
                sent[rank, peer].append(-1)
                received[peer, rank].append(-1)
    wrong = [(src, dst) for (src, dst), messages in sent.items() if messages != received[src, dst]]
    return [_first_crossing(schedule, src, dst) for src, dst in wrong]


def _first_crossing(schedule: PipelineSchedule, src: int, dst: int) -> PipelineDefect:
    sends, receives = (
        [(i, a) for i, a in enumerate(schedule.actions[rank]) if a.peer == peer and a.kind in kinds]
        for rank, peer, kinds in (
            (src, dst, ("SEND_F", "SEND_B", "SUM_TIED")),
            (dst, src, ("RECV_F", "RECV_B", "SUM_TIED")),
        )
    )
    pairs = zip(sends, receives, strict=True)
    (at, send), (to, receive) = next(pair for pair in pairs if schedule.partner(pair[0][1]) != pair[1][1])
    awaited, follows = schedule.partner(receive), schedule.partner(send)
    text = (
        f"rank {dst}, action {to} ({receive}), which is for {awaited}, meets action {at} of rank {src} ({send}), "
        f"which is for {follows}: messages are received in another order than they are sent"
    )
    return PipelineDefect(text, dst, to, receive)


def _stuck(schedule: PipelineSchedule) -> list[PipelineDefect]:
    waiting = flow(schedule, rendezvous=True).waiting
    by_rank = {one.rank: one for one in waiting}
    return [PipelineDefect(f"deadlock: {_chain(one, by_rank)}", one.rank, one.index, one.action) for one in waiting]


def _chain(one: BlockedRank, waiting: dict[int, BlockedRank]) -> str:
    links: list[str] = []
    seen: set[int] = set()
    while one.rank not in seen:
        seen.add(one.rank)
        links.append(f"rank {one.rank}, action {one.index} ({one.action}) waits for {one.awaited} of rank {one.peer}")
        one = waiting[one.peer]
    return "; ".join(links)
