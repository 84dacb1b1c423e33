"""A small executor of pipeline actions inside one process: the contract of `Action`, and nothing of `verify`. It waits
wherever an executor may: at a send for its receive, at the tied table for the other end, at the loss for all. Besides,
any schedule, and any one mistake in it.

It knows what a step must come to (every stage's gradients from every micro-batch once, the loss on every rank, tied
gradients summed), so that a schedule is right if, and only if, this executor gets there.
"""

from collections import Counter, defaultdict, deque
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from shardwise.schedule.pipeline import Action, PipelineSchedule, build, generators

TABLE = -1
"""What stands for the tied table's gradients in a message."""


class Broken(Exception):
    """An executor could not go on, or its step came to something else."""


def run(schedule: PipelineSchedule) -> None:
    """Execute one step. Raises `Broken` with the reason."""
    step = _Step(schedule)
    while step.advance():
        pass
    step.check()


def works(schedule: PipelineSchedule) -> bool:
    """Whether the executor gets to the end, and to the right result."""
    try:
        run(schedule)
    except Broken:
        return False
    return True


def forward(schedule: PipelineSchedule, stage: int, micro: int) -> int:
    if stage == 0:
        before = forward(schedule, schedule.stages - 1, micro - schedule.ring) if 0 < schedule.ring <= micro else micro
    else:
        before = forward(schedule, stage - 1, micro)
    return hash(("F", stage, micro, before))


def backward(schedule: PipelineSchedule, stage: int, micro: int) -> int:
    after = backward(schedule, stage + 1, micro) if stage + 1 < schedule.stages else 0
    return hash(("B", stage, micro, after, forward(schedule, stage, micro)))


class _Step:
    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.next = [0] * schedule.ranks
        self.done: set[tuple[str, int, int]] = set()
        self.outputs: dict[tuple[str, int, int], int] = {}
        self.mail: dict[tuple[str, int, int], int] = {}
        self.boxes: set[tuple[str, int, int]] = set()
        self.sends: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
        self.gradients: Counter[tuple[int, int]] = Counter()
        self.reduced: dict[int, Counter[tuple[int, int]]] = {}
        self.resident: set[int] = set()
        self.tied: dict[int, tuple[int, int]] = {}
        self.losses: dict[int, object] = {}
        self.arrived: defaultdict[str, set[int]] = defaultdict(set)

    def advance(self) -> bool:
        """One action of every rank that can go on; False when none can."""
        moved = False
        for rank, mine in enumerate(self.schedule.actions):
            if self.next[rank] < len(mine) and self.can(rank, mine[self.next[rank]]):
                action = mine[self.next[rank]]
                for part in action.leaves():
                    self.do(rank, part)
                self.next[rank] += 1
                moved = True
        return moved

    def inputs(self, rank: int, part: Action) -> tuple[str, int, int] | None:
        """(how it comes, stage, micro-batch) of what a computation needs from its neighbour."""
        kind, stage, micro, last = part.kind, part.stage, part.micro, self.schedule.stages - 1
        ring = self.schedule.ring
        if kind == "F" and (stage or (ring and micro >= ring)):
            return "F", *((stage - 1, micro) if stage else (last, micro - ring))
        return ("B", stage + 1, micro) if kind in "IB" and stage < last else None

    def can(self, rank: int, action: Action) -> bool:
        """Whether what an action waits for is there: a computation's messages, a send's receive, the other ends of an
        exchange. Results of the rank itself must be there."""
        if action.kind in ("SEND_F", "SEND_B") and not self.receives[rank, action.peer]:
            return False
        if action.kind in ("SUM_TIED", "SHARE_LOSS"):
            self.arrived[action.kind].add(rank)
            return len(self.arrived[action.kind]) >= (2 if action.kind == "SUM_TIED" else self.schedule.ranks)
        for part in action.leaves() if action.kind in ("F", "I", "B", "OVERLAP_F_B") else ():
            source = self.inputs(rank, part)
            if source and self.schedule.placement[source[1]] != rank:
                box = (source[0], part.stage, part.micro)
                if box not in self.boxes:
                    raise Broken(f"{part}: nothing is posted for it")
                if box not in self.mail:
                    return False
        return True

    def do(self, rank: int, action: Action) -> None:
        kind, stage, micro, peer, _ = action
        if kind != "SHARE_LOSS" and self.schedule.placement[stage] != rank:
            raise Broken(f"{action} is not for rank {rank}")
        if kind in ("F", "I", "W", "B"):
            self.compute(rank, action)
        elif kind in ("SEND_F", "SEND_B"):
            key = (kind[-1], stage, micro)
            if key not in self.outputs or peer == rank:
                raise Broken(f"{action} has nothing to send")
            self.meet(self.sends[rank, peer], self.outputs[key], (rank, peer))
        elif kind in ("RECV_F", "RECV_B"):
            key = (kind[-1], stage, micro)
            if key in self.boxes:
                raise Broken(f"{action} a second time")
            self.boxes.add(key)
            self.meet(self.receives[peer, rank], key, (peer, rank))
        else:
            self.whole(rank, action)

    def meet(self, queue: deque, thing: object, pair: tuple[int, int]) -> None:
        queue.append(thing)
        if self.sends[pair] and self.receives[pair]:
            self.mail[self.receives[pair].popleft()] = self.sends[pair].popleft()

    def compute(self, rank: int, action: Action) -> None:
        kind, stage, micro, _, _ = action
        if self.schedule.gather and stage not in self.resident:
            raise Broken(f"{action}: no parameters")
        if stage in self.reduced and self.schedule.reduce == "step":
            raise Broken(f"{action}: the step of stage {stage} is over")
        for step in "IW" if kind == "B" else kind:
            if (step, stage, micro) in self.done:
                raise Broken(f"{action} a second time")
            if step != "F" and ("F" if step == "I" else "I", stage, micro) not in self.done:
                raise Broken(f"{action} too early")
            self.done.add((step, stage, micro))
            if step == "W":
                self.gradients[stage, micro] += 1
                continue
            value = self.value(rank, Action(step, stage, micro))
            wanted = (forward if step == "F" else backward)(self.schedule, stage, micro)
            if value != wanted:
                raise Broken(f"{action} computes on something else")
            self.outputs["F" if step == "F" else "B", stage, micro] = value

    def value(self, rank: int, part: Action) -> int:
        source = self.inputs(rank, part)
        came = part.micro if part.kind == "F" else 0
        if source and self.schedule.placement[source[1]] != rank:
            came = self.mail[source[0], part.stage, part.micro]
        elif source:
            if source not in self.outputs:
                raise Broken(f"{part}: {source} is not there")
            came = self.outputs[source]
        if part.kind == "F":
            return hash(("F", part.stage, part.micro, came))
        return hash(("B", part.stage, part.micro, came, self.outputs["F", part.stage, part.micro]))

    def whole(self, rank: int, action: Action) -> None:
        kind, stage, micro, peer, _ = action
        if kind in ("UNSHARD", "RESHARD"):
            if (stage in self.resident) == (kind == "UNSHARD"):
                raise Broken(f"{action} for nothing")
            self.resident ^= {stage}
        elif kind == "REDUCE_GRAD":
            mine = [(s, k) for s, k in self.gradients if s == stage and micro in (-1, k)]
            before = self.reduced.setdefault(stage, Counter())
            if not mine or any(part in before for part in mine):
                raise Broken(f"{action}: nothing new to reduce")
            before.update(mine)
            last, micros = self.schedule.stages - 1, range(self.schedule.micro) if micro < 0 else [micro]
            shared = self.schedule.tied and stage == 0 and self.schedule.placement[0] == self.schedule.placement[-1]
            if shared and any(("W", last, k) not in self.done for k in micros):
                raise Broken(f"{action}: the head's share of the tied table is missing")
            if micro < 0 and len(before) < self.schedule.micro:
                raise Broken(f"{action}: gradients are missing")
        elif kind == "SUM_TIED":
            if rank in self.tied or len(self.reduced.get(stage, ())) < self.schedule.micro:
                raise Broken(f"{action} has no gradients to exchange")
            self.tied[rank] = (stage, peer)
            self.meet(self.sends[rank, peer], TABLE, (rank, peer))
            self.meet(self.receives[peer, rank], ("T", rank, -1), (peer, rank))
        elif kind == "SHARE_LOSS":
            last = self.schedule.stages - 1
            known = all(("F", last, k) in self.done for k in range(self.schedule.micro))
            if rank in self.losses or (rank == self.schedule.placement[-1] and not known):
                raise Broken(f"{action}: no loss")
            self.losses[rank] = peer

    def check(self) -> None:
        """Whether all came to their end, and the step to what it must."""
        schedule = self.schedule
        if stuck := [r for r, mine in enumerate(schedule.actions) if self.next[r] < len(mine)]:
            raise Broken(f"ranks {stuck} wait for ever")
        if any(self.sends.values()) or any(self.receives.values()) or self.resident:
            raise Broken("something is left over")
        pairs = {(s, k) for s in range(schedule.stages) for k in range(schedule.micro)}
        if {(s, k) for kind, s, k in self.done if kind == "F"} != pairs:
            raise Broken("forwards are missing")
        if not schedule.train:
            return
        if {part for found in self.reduced.values() for part in found} != pairs:
            raise Broken("gradients are missing")
        if set(self.losses) != set(range(schedule.ranks)) or set(self.losses.values()) != {schedule.placement[-1]}:
            raise Broken("not every rank has the loss, or from another rank than the last stage's")
        ends = (schedule.placement[0], schedule.placement[-1])
        wanted = {ends[0]: (0, ends[1]), ends[1]: (schedule.stages - 1, ends[0])}
        tables = {rank: self.mail.get(("T", rank, -1)) == TABLE for rank in self.tied}
        if self.tied != (wanted if schedule.tied and ends[0] != ends[1] else {}) or not all(tables.values()):
            raise Broken("the tied table's gradients are not summed by both ends")


@st.composite
def schedules(draw, most: int = 5) -> PipelineSchedule:
    """Any schedule of a few ranks, with any of what goes on beside the computations."""
    found = draw(st.sampled_from(generators()))
    cases = [
        (p, m, v)
        for p in range(1, most)
        for m in range(1, 2 * most + 1)
        for v in range(1, 4)
        if not found.objection(p, m, v)
    ]
    p, m, v = draw(st.sampled_from(cases))
    options = {"tokens": draw(st.integers(1, 3))} if "tokens" in found.options else {}
    return build(
        found.name, p, m, v, zero=draw(st.integers(0, 3)), tied=draw(st.booleans()), ahead=draw(st.integers(0, 3)),
        resident=draw(st.integers(1, 4)), **options,
    )  # fmt: skip


def mutate(schedule: PipelineSchedule, kind: str, random: Random) -> tuple[PipelineSchedule, list[Action]]:
    """The schedule with one mistake (swap, drop, double, wrong peer, reorder), and the actions that it is about."""
    rank = random.choice([r for r, mine in enumerate(schedule.actions) if len(mine) > 2])
    mine = list(schedule.actions[rank])
    a, b = random.sample(range(len(mine)), 2)
    touched = [mine[a]]
    if kind == "swap":
        mine[a], mine[b] = mine[b], mine[a]
        touched = [mine[a], mine[b]]
    elif kind == "drop":
        del mine[a]
    elif kind == "double":
        mine.insert(b, mine[a])
    elif kind == "reorder":
        mine.insert(b, mine.pop(a))
    else:
        a = random.choice([i for i, action in enumerate(mine) if action.peer >= 0])
        others = [r for r in range(-1, schedule.ranks) if r != mine[a].peer]
        mine[a] = mine[a]._replace(peer=random.choice(others))
        touched = [mine[a]]
    lists = (*schedule.actions[:rank], tuple(mine), *schedule.actions[rank + 1 :])
    return replace(schedule, actions=lists), touched
