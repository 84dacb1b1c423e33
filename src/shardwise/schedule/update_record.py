"""Record of a run through a parameter server: each gradient, the weights that it read, and the update that used it.

The same object records in the runtime's servers and in virtual time (`staleness.simulated`). It lists gradients up to a
limit, so that the record of a long run stays small; its counts are of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.codec import keyed
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.schedule.staleness import Update

MOST_LISTED = 20_000
"""Gradients, and updates, that the record of a server lists one by one: about 1.2 MB as JSON."""
STRAGGLER = 1.2
"""Times the median worker's time of a gradient, from which a worker counts as a straggler."""
_DIGITS = 6
"""Of seconds in the file."""


class Gradient(NamedTuple):
    """One gradient in the record of a run. Times are seconds since the run began."""

    worker: int
    step: int
    """Where each gradient is an update, the number of its share of the text."""
    read: int
    """Updates in the weights that it was computed with."""
    started: float
    """When its worker began to compute it."""
    arrived: float
    update: int | None
    """Version that its update followed; None: dropped."""
    answered: float = math.nan
    """When its worker was sent new weights."""
    waited_for: int | None = None
    """Worker whose gradient led to that answer; None: the worker did not wait for another one."""

    @property
    def staleness(self) -> int | None:
        """Updates between the weights that it read and its own update; None: dropped."""
        return None if self.update is None else self.update - self.read


@dataclass
class WorkerTally:
    """Counts of one worker over a run."""

    gradients: int = 0
    """Pushed, the dropped ones included."""
    dropped: int = 0
    computing: float = 0.0
    """Seconds from the beginning of its gradients to their arrival."""
    waiting: float = 0.0
    """Seconds from the arrival of its gradients to the answers."""
    waited_for: dict[int, float] = field(default_factory=dict)
    """Worker -> seconds of `waiting` that ended with a gradient of that worker."""

    @property
    def waiting_share(self) -> float:
        total = self.waiting + self.computing
        return self.waiting / total if total else 0.0


class UpdateRecord:
    """Gradients and updates of one server, in the order in which the server sees them.

    first: updates that were made before this start of the run. most: gradients and updates that are listed at most.
    """

    def __init__(self, workers: int, first: int = 0, most: int = MOST_LISTED) -> None:
        self.first, self.most = first, most
        self.workers = [WorkerTally() for _ in range(workers)]
        self.staleness: Counter[int] = Counter()
        """Updates between the weights that a gradient read and its own update -> gradients."""
        self.updates = 0
        self.gradients: list[Gradient] = []
        """By arrival, the first ones of the run."""
        self.updated: list[float] = []
        """When each update was made, the first ones of the run."""
        self._open: dict[tuple[int, int], tuple[int | None, int]] = {}
        """(worker, step) of a gradient in no update yet -> its place in the list, if it has one; what it read."""
        self._unanswered: dict[int, tuple[int | None, float]] = {}
        """Worker -> place of its last gradient in the list; when that arrived."""
        self._last = 0
        """Worker of the last gradient."""
        self._written: tuple[int, int] | None = None
        """Gradients and updates that `fresh` has returned; None: it was never called."""

    # -- during the run

    def push(self, worker: int, step: int, read: int, started: float, arrived: float) -> None:
        place = None
        if len(self.gradients) < self.most:
            place = len(self.gradients)
            self.gradients.append(Gradient(worker, step, read, started, arrived, None))
        tally = self.workers[worker]
        tally.gradients += 1
        tally.computing += arrived - started
        self._open[worker, step], self._unanswered[worker], self._last = (place, read), (place, arrived), worker

    def drop(self, worker: int, step: int) -> None:
        del self._open[worker, step]
        self.workers[worker].dropped += 1

    def update(self, made: Update, at: float) -> None:
        self.updates += 1
        if len(self.updated) < self.most:
            self.updated.append(at)
        for worker, _ in made.gradients:
            place, read = self._open.pop((worker, made.step))
            self.staleness[made.version - read] += 1
            if place is not None:
                self.gradients[place] = self.gradients[place]._replace(update=made.version)

    def answer(self, worker: int, at: float) -> None:
        """A worker is sent new weights for its last gradient."""
        place, arrived = self._unanswered.pop(worker)
        tally, other = self.workers[worker], self._last if self._last != worker else None
        tally.waiting += at - arrived
        if other is not None:
            tally.waited_for[other] = tally.waited_for.get(other, 0.0) + at - arrived
        if place is not None:
            self.gradients[place] = self.gradients[place]._replace(answered=at, waited_for=other)

    # -- what it says

    @property
    def pushed(self) -> int:
        """Gradients of the whole run, the dropped ones included."""
        return sum(tally.gradients for tally in self.workers)

    @property
    def dropped(self) -> int:
        """Gradients of the whole run that are in no update."""
        return sum(tally.dropped for tally in self.workers)

    @property
    def left_out(self) -> int:
        """Gradients that are counted and not listed."""
        return self.pushed - len(self.gradients)

    @property
    def seconds(self) -> float:
        """From the beginning of the run to the last update or gradient that is listed."""
        return max(self.updated[-1:] + [one.arrived for one in self.gradients], default=0.0)

    @property
    def waiting_share(self) -> float:
        waiting = sum(tally.waiting for tally in self.workers)
        total = waiting + sum(tally.computing for tally in self.workers)
        return waiting / total if total else 0.0

    @property
    def mean_staleness(self) -> float:
        """Mean over the gradients that are in updates."""
        counted = sum(self.staleness.values())
        return sum(versions * count for versions, count in self.staleness.items()) / counted if counted else 0.0

    def slowness(self) -> list[float]:
        """Each worker's mean time of a gradient over the median of all workers' means; 0: it has pushed none."""
        means = [tally.computing / tally.gradients if tally.gradients else 0.0 for tally in self.workers]
        there = sorted(mean for mean in means if mean)
        if not there:
            return means
        median = (there[(len(there) - 1) // 2] + there[len(there) // 2]) / 2
        return [mean / median for mean in means]

    def summary(self) -> dict[str, Any]:
        """Counts of the whole run, as JSON. Times are seconds."""
        return {
            **keyed(self, "updates gradients=pushed dropped"),
            "staleness": {str(versions): self.staleness[versions] for versions in sorted(self.staleness)},
            "mean_staleness": self.mean_staleness,
            "max_staleness": max(self.staleness, default=0),
            "waiting_share": self.waiting_share,
            "workers": [
                {"worker": worker}
                | keyed(tally, "gradients dropped computing_s=computing waiting_s=waiting waiting_share")
                | {"slowness": slowness}
                | {"waited_for_s": {str(other): seconds for other, seconds in sorted(tally.waited_for.items())}}
                for worker, (tally, slowness) in enumerate(zip(self.workers, self.slowness(), strict=True))
            ],
            "first_update": self.first,
            "listed_gradients": len(self.gradients),
            "left_out_gradients": self.left_out,
        }

    # -- the file

    def fresh(self) -> dict[str, Any]:
        """All counts, and the gradients and updates listed since the last call, as JSON. Call it where no gradient is
        on its way: one that is in no update then counts as dropped."""
        start = self._written or (0, 0)
        listed, updated = self.gradients[start[0] :], self.updated[start[1] :]
        columns = {
            name: [round(value, _DIGITS) if isinstance(value, float) else value for value in values]
            for name, values in zip(Gradient._fields, zip(*listed, strict=True), strict=True)
        } if listed else {}  # fmt: skip
        part = {
            "begins": self._written is None,
            "first": self.first,
            "updates": self.updates,
            "staleness": {str(versions): count for versions, count in self.staleness.items()},
            "workers": [
                [tally.gradients, tally.dropped, round(tally.computing, _DIGITS), round(tally.waiting, _DIGITS),
                 {str(other): round(seconds, _DIGITS) for other, seconds in tally.waited_for.items()}]
                for tally in self.workers
            ],
            "gradients": columns,
            "updated": [round(at, _DIGITS) for at in updated],
        }  # fmt: skip
        self._written = len(self.gradients), len(self.updated)
        return part

    def extend(self, part: Mapping[str, Any]) -> None:
        """Take in what `fresh` of the recorded one has returned, in its order. Raises `UserError` for anything else."""
        try:
            self.first, self.updates = int(part["first"]), int(part["updates"])
            self.staleness = Counter({int(versions): int(count) for versions, count in part["staleness"].items()})
            self.workers = [
                WorkerTally(
                    int(gradients), int(dropped), float(computing), float(waiting),
                    {int(other): float(seconds) for other, seconds in waited_for.items()},
                )
                for gradients, dropped, computing, waiting, waited_for in part["workers"]
            ]  # fmt: skip
            columns = part["gradients"]
            if columns:
                rows = zip(*(columns[name] for name in Gradient._fields), strict=True)
                self.gradients += [_read_gradient(*row) for row in rows]
            self.updated += [float(at) for at in part["updated"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the record of updates is damaged: {type(error).__name__} {error}") from None


def _read_gradient(
    worker: int, step: int, read: int, started: float, arrived: float, update: int | None, answered: Any,
    waited_for: int | None,
) -> Gradient:  # fmt: skip
    for number in (worker, step, read):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is no whole number")
    return Gradient(worker, step, read, float(started), float(arrived), update, float(answered), waited_for)


def read_records(parts: Iterable[Mapping[str, Any]]) -> list[UpdateRecord]:
    """The records of all servers of a run's last start, from the parts that were written. Raises `UserError`."""
    records: dict[int, UpdateRecord] = {}
    for part in parts:
        server = part.get("server", 0)
        if part.get("begins"):
            records[server] = UpdateRecord(0)
        if server not in records:
            raise UserError(f"the record of updates is damaged: it lacks the beginning of server {server}")
        records[server].extend(part)
    return [records[server] for server in sorted(records)]
