"""A parameter server: master weights and optimizer state of a key range, updated from what workers push.

It is a thread of its rank's process, with one more that takes what comes from other processes. For each rank of a
worker it keeps the range of what that rank has; those ranks hold different parts under tensor parallelism. The sum of a
step's gradients is made in the order of the workers, so that its bits do not depend on who came first.
"""

import math
import queue
import threading
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.key_ranges import Segment, elements, key_ranges
from shardwise.layout.units import UnitPlan
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.sync.messages import BEGIN, DONE, FENCE, GET, PUSH, PUT, Header, ServerMail
from shardwise.runtime.zero.flat_unit import Values, local_values, torch_dtype
from shardwise.runtime.zero.optimizer import MASTER, learning_rate
from shardwise.runtime.zero.update import update
from shardwise.schedule.staleness import AtOnce, Policy, Update
from shardwise.schedule.update_record import UpdateRecord

CPU = torch.device("cpu")


class KeyRange:
    """What a server keeps for one rank of every worker: flat state, and the treatment of its elements."""

    def __init__(self, plan: UnitPlan, segments: tuple[Segment, ...], values: Values) -> None:
        self.segments, count = segments, elements(segments)
        dtype = torch_dtype(plan.dtypes.master)
        self.state = [torch.zeros(count, dtype=dtype) for _ in plan.workload.states]
        self._kind = plan.workload.optimizer
        self.spans: list[tuple[int, int, bool, int]] = []
        """(start, stop, weight decay, ranks that hold the same) of runs of it."""
        for segment in segments:
            unit = plan.by_name[segment.unit]
            for span in unit.spans:
                part = span.within(segment.start, segment.stop)
                if part is not None:
                    self.spans.append((segment.at + part.start, segment.at + part.stop, span.decay, span.replicas))
            for offset, placed in zip(unit.offsets, unit.placed, strict=True):
                a, b = max(offset, segment.start), min(offset + placed.numel, segment.stop)
                if a < b:
                    to = slice(segment.at + a - segment.start, segment.at + b - segment.start)
                    self.state[MASTER][to] = local_values(placed, a - offset, b - offset, values, CPU).to(dtype)

    def square(self, gradient: Tensor) -> float:
        """Sum of the squares of a gradient's elements, each parameter of the model once."""
        total = 0.0
        for start, stop, _, replicas in self.spans:
            norm = float(torch.linalg.vector_norm(gradient[start:stop]).double())
            total += norm * norm / replicas
        return total

    def update(self, gradient: Tensor, number: int, config: OptimizerConfig, lr: float) -> None:
        """One update. number: how many there are with this one."""
        step = torch.tensor(float(number))
        for start, stop, decay, _ in self.spans:
            weights, *moments = (each[start:stop] for each in self.state)
            update(self._kind, (weights, gradient[start:stop], *moments), step, config, lr, decay)


class Server:
    """Server `place` of a job whose workers' ranks have the plans `plans`, one for each rank of a worker.

    steps: of the learning rate's schedule. stops: whether an update that is not finite ends the run. peers: the
    group of all servers' ranks, which add up the gradient's norm; None where there is one server, and where no update
    waits for all gradients of a step.
    """

    def __init__(
        self, plans: list[UnitPlan], place: int, policy: Policy, mail: ServerMail, values: Values,
        config: OptimizerConfig, steps: int, peers: dist.ProcessGroup | None, stops: bool = True,
    ) -> None:  # fmt: skip
        plan, self.mail, self.policy, self.config, self.steps = plans[0], mail, policy, config, steps
        self._peers, self._layout, self._stops = peers, plan.layout, stops
        self.workers, self.parts = plan.layout.dp, len(plans)
        self.ranges = [KeyRange(each, key_ranges(each)[place], values) for each in plans]
        self._at_once = isinstance(policy, AtOnce)
        sizes = [len(each.state[MASTER]) for each in self.ranges]
        self._sum = torch.zeros(max(sizes), dtype=torch_dtype(plan.dtypes.master))
        senders = range(self.workers * self.parts)
        kept, dtype = plan.layout.staleness + 1, torch_dtype(plan.dtypes.gradients)
        self._free = {
            rank: deque(torch.zeros(sizes[rank % self.parts], dtype=dtype) for _ in range(kept)) for rank in senders
        }
        """Rank -> memory for gradients that it may push before the first of them is in an update."""
        self._out = {
            rank: torch.zeros(sizes[rank % self.parts], dtype=torch_dtype(plan.layout.dtype)) for rank in senders
        }
        """Rank -> weights on their way to it."""
        self.buffers = [self._sum, *self._out.values(), *(each for free in self._free.values() for each in free)]
        self._leaving: dict[int, list[Any]] = {}
        self._pushed: dict[tuple[int, int], dict[int, tuple[Header, Tensor]]] = {}
        """(worker, step) -> rank of the worker -> its gradient."""
        self._fences: dict[int, int] = {}
        """Rank -> updates that it waits for."""
        self._inbox: queue.Queue[tuple[int, Header, Tensor | None]] = queue.Queue()
        self._lock = threading.Lock()
        self._loss, self._norm = math.nan, math.nan
        self.updates = 0
        """Updates of the optimizer, those of earlier runs included."""
        self.skips = 0
        """Updates that were left out in this run, because their loss or their norm was not finite."""
        self.stop_before = 0
        """Step before which all workers end, because one was told to; 0: none."""
        self.end: int | None = None
        """Updates after which the workers have ended, once they have said so."""
        self._done: set[int] = set()
        self.record = UpdateRecord(self.workers)
        self._began = time.monotonic()
        self.at = threading.Condition()
        remote = [rank for rank in senders if rank != mail.rank]
        mail.take = self.take
        self._threads = [threading.Thread(target=self._guarded, args=(self._serve,), daemon=True)]
        if remote:
            self._threads.append(threading.Thread(target=self._guarded, args=(self._receive, len(remote)), daemon=True))
        self.failure: BaseException | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all workers have said that they are done."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            self.failure = error
            self.mail.fail(error)
            with self.at:
                self.at.notify_all()

    def wait(self, version: int) -> bool:
        """Wait a moment for so many updates; whether they are there, or the workers have ended before. Raises what has
        ended the server."""

        def there() -> bool:
            least = version if self.end is None else min(version, self.end)
            return self.policy.version >= least

        with self.at:
            self.at.wait_for(lambda: self.failure is not None or there(), 0.5)
        if self.failure is not None:
            raise self.failure
        return there()

    def _now(self) -> float:
        return time.monotonic() - self._began

    # -- what comes in

    def _room(self, rank: int, head: Header) -> Tensor:
        if head.kind == PUSH:
            with self._lock:
                return self._free[rank].popleft()
        return torch.empty(head.elements, dtype=self._sum.dtype)

    def take(self, rank: int, head: Header, tensor: Tensor | None) -> None:
        """A request from this process: its tensor is copied."""
        if tensor is not None:
            tensor = self._room(rank, head).copy_(tensor)
        self._inbox.put((rank, head, tensor))

    def _receive(self, workers: int) -> None:
        while workers:
            rank, head, tensor = self.mail.next_request(self._room)
            workers -= head.kind == DONE
            self._inbox.put((rank, head, tensor))

    def _serve(self) -> None:
        while len(self._done) < self.workers * self.parts:
            rank, head, tensor = self._inbox.get()
            if head.kind == PUSH:
                assert tensor is not None
                self._push(rank, head, tensor)
            elif head.kind == FENCE:
                self._fences[rank] = head.a
                self.end = head.a if head.b else self.end
            elif head.kind == DONE:
                self._done.add(rank)
            else:
                self._state(rank, head, tensor)
            for rank in [rank for rank, version in self._fences.items() if self.policy.version >= version]:
                del self._fences[rank]
                self._send(rank, self.policy.version)

    def _state(self, rank: int, head: Header, tensor: Tensor | None) -> None:
        """State of the range of a worker's rank: a piece of it, a change of it, or how far the run is."""
        state = self.ranges[rank % self.parts].state
        if head.kind == BEGIN:
            self.policy.version, self.updates = head.a, head.b
            self.record, self._began = UpdateRecord(self.workers, head.a), time.monotonic()
            self._leaving[rank] = self.mail.reply(rank, Header(0))
        elif head.kind == GET:
            piece = state[head.a][head.b : head.c].clone()
            self._leaving[rank] = self.mail.reply(rank, Header(0, elements=len(piece)), piece)
        else:
            assert head.kind == PUT and tensor is not None
            state[head.a][head.b : head.b + len(tensor)].copy_(tensor)

    # -- gradients

    def _push(self, rank: int, head: Header, gradient: Tensor) -> None:
        worker, part = divmod(rank, self.parts)
        step = head.a
        pushed = self._pushed.setdefault((worker, step), {})
        pushed[part] = head, gradient
        if head.y:
            self._end_after(step)
        if len(pushed) < self.parts:
            return
        outcome = self.policy.push(worker, step, head.b)
        arrived = self._now()
        self.record.push(worker, step, head.b, max(0.0, arrived - head.z), arrived)
        if outcome.dropped:
            self.record.drop(worker, step)
            self._release(worker, step)
        for each in outcome.updates:
            self._update(each)
        with self.at:
            self.at.notify_all()
        for answer in outcome.answers:
            self.record.answer(answer.worker, self._now())
            for part in range(self.parts):
                self._send(answer.worker * self.parts + part, answer.next)

    def _end_after(self, step: int) -> None:
        now = self.policy.version // self.workers if self._at_once else max(step, self.policy.version)
        self.stop_before = self.stop_before or now + 2 + self._layout.staleness

    def _release(self, worker: int, step: int) -> None:
        with self._lock:
            for part, (_, gradient) in self._pushed.pop((worker, step)).items():
                self._free[worker * self.parts + part].append(gradient)

    def _update(self, made: Update) -> None:
        """The mean of gradients over all their tokens, clipped by its norm over all servers where these make the same
        updates, and one step of the optimizer, unless the loss or the norm is not finite."""
        step = made.version // self.workers if self._at_once else made.version
        lr = learning_rate(self.config, step, self.steps)
        if self._layout.damped:
            lr /= 1 + made.staleness
        workers = [worker for worker, _ in made.gradients]
        heads = {worker: self._pushed[worker, made.step][0][0] for worker in workers}
        tokens = sum(head.c for head in heads.values())
        self._loss = sum(head.x for head in heads.values()) / max(1, tokens)
        sums = [self._mean(part, workers, made.step, heads, tokens) for part in range(self.parts)]
        coefficient = 1.0 if self._at_once else self._clipping(sums)
        if math.isfinite(self._loss if self._at_once else self._norm):
            self.updates += 1
            for own, gradient in zip(self.ranges, sums, strict=True):
                if coefficient < 1.0:
                    gradient.mul_(coefficient)
                own.update(gradient, self.updates, self.config, lr)
        else:
            self.skips += 1
            if self._stops:
                self._end_after(made.step)
        self.record.update(made, self._now())
        for worker in workers:
            self._release(worker, made.step)

    def _mean(self, part: int, workers: list[int], step: int, heads: dict[int, Header], tokens: int) -> Tensor:
        own = self._sum[: len(self.ranges[part].state[MASTER])]
        total = own if self.parts == 1 else own.clone()
        total.zero_()
        for worker in workers:
            gradient = self._pushed[worker, step][part][1]
            total.add_(gradient, alpha=heads[worker].c / max(1, tokens))
        return total

    def _clipping(self, sums: list[Tensor]) -> float:
        """Coefficient of the gradient, as `torch.nn.utils.clip_grad_norm_` has it."""
        every = [own.square(each) for own, each in zip(self.ranges, sums, strict=True)]
        # A loss that is not finite makes the norm so too: servers must agree, whichever gradients each of them has.
        square = torch.tensor(sum(every) if math.isfinite(self._loss) else math.nan, dtype=torch.float64)
        if self._peers is not None:
            dist.all_reduce(square, group=self._peers)
        self._norm = math.sqrt(float(square))
        clips = self.config.clip and math.isfinite(self._norm)
        return min(1.0, self.config.clip / (self._norm + 1e-6)) if clips else 1.0

    # -- what goes out

    def _send(self, rank: int, following: int) -> None:
        for work in self._leaving.pop(rank, []):
            work.wait()
        weights = self._out[rank]
        weights.copy_(self.ranges[rank % self.parts].state[MASTER])
        state = self._loss, self._norm, float(self.skips)
        head = Header(0, self.policy.version, following, self.stop_before, len(weights), *state)
        self._leaving[rank] = self.mail.reply(rank, head, weights)
