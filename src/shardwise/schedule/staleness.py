"""When a parameter server updates weights, and when it answers a worker: a policy without torch, threads or clocks.

A synchronous run has a schedule that is known before it starts; an asynchronous one has a policy, and each execution
makes another schedule. The same object decides in the runtime's servers and in `simulated`, which runs it in virtual
time; `check` proves of the record of either: every gradient in one update or dropped by the rules, no weights older
than the bound, no worker ahead of it. Sources: Ho et al. 2013 (SSP), Chen et al. 2016 (backup workers).
"""

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from shardwise.errors import UserError
from shardwise.schedule.update_record import Gradient, UpdateRecord


class Update(NamedTuple):
    """One update of a server's weights, by the mean of some workers' gradients."""

    version: int
    """Updates made before it."""
    step: int
    """Step of its gradients; where each gradient is an update, the number of its share of the text."""
    gradients: tuple[tuple[int, int], ...]
    """(worker, updates in the weights that its gradient was computed with), ascending."""

    @property
    def staleness(self) -> int:
        """Updates between the oldest weights that its gradients were computed with, and it."""
        return self.version - min(read for _, read in self.gradients)


class Reply(NamedTuple):
    """New weights for a worker, and what it does with them."""

    worker: int
    version: int
    """Updates that are in the weights."""
    next: int
    """Step of its next gradient; where each gradient is an update, the number of its next share of the text."""


class Outcome(NamedTuple):
    """What the arrival of a gradient leads to: updates, in order, and then answers."""

    updates: list[Update]
    answers: list[Reply]
    dropped: bool = False
    """Whether the gradient came after the update of its step, and is dropped."""


class Policy(Protocol):
    """Decides for one server. version: updates so far."""

    version: int

    def push(self, worker: int, step: int, read: int) -> Outcome:
        """A gradient of `step` arrives, computed with weights of version `read`."""


@dataclass
class ByStep:
    """One update a step, by the mean of all workers' gradients. staleness: steps that a worker may be ahead of the
    last update, 0 in lockstep. backup: gradients of a step, the last to come, that are not waited for and are dropped;
    the worker continues at the step of the others."""

    workers: int
    staleness: int = 0
    backup: int = 0
    version: int = 0
    _arrived: dict[int, dict[int, int]] = field(default_factory=dict)
    """Step -> worker -> version of the weights that its gradient was computed with."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """Worker -> step of its next gradient."""

    def push(self, worker: int, step: int, read: int) -> Outcome:
        dropped = step < self.version
        if not dropped:
            self._arrived.setdefault(step, {})[worker] = read
        self._waiting[worker] = step + 1
        updates = []
        while len(self._arrived.get(self.version, ())) >= self.workers - self.backup:
            updates.append(Update(self.version, self.version, tuple(sorted(self._arrived.pop(self.version).items()))))
            self.version += 1
        ready = sorted(other for other, at in self._waiting.items() if at - self.staleness <= self.version)
        answers = [Reply(other, self.version, max(self._waiting.pop(other), self.version)) for other in ready]
        return Outcome(updates, answers, dropped)


@dataclass
class AtOnce:
    """Every gradient is an update of its own as soon as it comes, and its worker takes the next share of the text: a
    slow one takes fewer."""

    workers: int
    version: int = 0

    def push(self, worker: int, step: int, read: int) -> Outcome:
        update = Update(self.version, step, ((worker, read),))
        self.version += 1
        return Outcome([update], [Reply(worker, self.version, self.version + self.workers - 1)])


def simulate(policy: Policy, workers: int, steps: int, seconds: Callable[[int, int], float]) -> list[Gradient]:
    """The gradients of `simulated`, in the order of their arrival."""
    return simulated(policy, workers, steps, seconds).gradients


def simulated(policy: Policy, workers: int, steps: int, seconds: Callable[[int, int], float]) -> UpdateRecord:
    """Run a policy in virtual time up to its update `steps`, on one server; all gradients are listed.

    seconds: of the gradient of (worker, step), its exchange with the server included.
    """
    first = policy.version
    by_step = isinstance(policy, ByStep)
    record = UpdateRecord(workers, first, most=sys.maxsize)
    heap = [
        (seconds(worker, first), worker, first + (0 if by_step else worker), first, 0.0) for worker in range(workers)
    ]
    heapq.heapify(heap)
    while heap:
        now, worker, step, read, started = heapq.heappop(heap)
        outcome = policy.push(worker, step, read)
        record.push(worker, step, read, started, now)
        if outcome.dropped:
            record.drop(worker, step)
        for update in outcome.updates:
            record.update(update, now)
        for answer in outcome.answers:
            record.answer(answer.worker, now)
            if answer.next < steps:
                again = now + seconds(answer.worker, answer.next)
                heapq.heappush(heap, (again, answer.worker, answer.next, answer.version, now))
    return record


def check(record: Sequence[Gradient], policy: ByStep | AtOnce, first: int = 0) -> None:
    """Raise `UserError` unless a record of a run, whole and from update `first` on, is one that its policy allows."""
    by_step = isinstance(policy, ByStep)
    bound, backup = (policy.staleness, policy.backup) if isinstance(policy, ByStep) else (0, 0)
    of_update: dict[int, list[Gradient]] = {}
    for one in record:
        if one.update is not None:
            of_update.setdefault(one.update, []).append(one)
        elif not backup and any(each.update == one.step for each in record):
            raise UserError(f"the gradient of worker {one.worker} for step {one.step} is lost")
        if by_step and one.read < one.step - bound:
            raise UserError(
                f"worker {one.worker} computed step {one.step} with weights of {one.read} updates: the bound is {bound}"
            )
    if sorted(of_update) != list(range(first, first + len(of_update))):
        raise UserError(f"updates {sorted(of_update)} leave some out")
    for version, gradients in of_update.items():
        _check_update(version, gradients, policy)
    for worker in range(policy.workers):
        own = [one for one in record if one.worker == worker]
        for before, after in pairwise(own):
            if by_step and not backup and after.step != before.step + 1:
                raise UserError(f"worker {worker} goes from step {before.step} to {after.step}")
            if after.read < before.read:
                raise UserError(f"worker {worker} gets weights of {after.read} updates after those of {before.read}")


def _check_update(version: int, gradients: Sequence[Gradient], policy: ByStep | AtOnce) -> None:
    workers = [one.worker for one in gradients]
    if len(set(workers)) < len(workers):
        raise UserError(f"update {version} counts a worker twice")
    if any(one.read > version for one in gradients):
        raise UserError(f"update {version} has a gradient of later weights")
    if isinstance(policy, AtOnce):
        if len(workers) != 1:
            raise UserError(f"update {version} has {len(workers)} gradients")
        return
    if any(one.step != version for one in gradients):
        raise UserError(f"update {version} has a gradient of another step")
    if not policy.workers - policy.backup <= len(workers) <= policy.workers:
        raise UserError(f"update {version} has {len(workers)} gradients of {policy.workers} workers")
