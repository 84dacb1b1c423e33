"""`TimedWorker`: a stage's arithmetic as a wait; and `ActionLog`: when each action of a step began and ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.emulate.job import WORD, EmulationCase
from shardwise.layout.axes import PP
from shardwise.runtime.transport.comms import Comms, Key
from shardwise.schedule.pipeline import Action

PAGE = 4096


class ActionTime:
    """One action, or a message that is a part of one, as `Comms` tells. Seconds of the monotonic clock."""

    def __init__(self, record: ActionLog, what: str, whole: ActionTime | None = None) -> None:
        self.record, self.what, self.whole = record, what, whole
        self.start = self.end = time.monotonic()

    def follow(self, works: list[Any]) -> None:
        """A message was posted: over shared memory, one to others has left."""
        self.end = time.monotonic()

    def awaited(self) -> None:
        self._awaited = time.monotonic()

    def arrived(self) -> None:
        """It has been waited for. A send is complete for its rank when it was handed over."""
        now = time.monotonic()
        if self.whole is not None:
            self.whole.end = now
        elif self.what == "recv":
            self.end = now
            self.record.stood += now - self._awaited


class ActionLog:
    """The actions of one rank in one step, as they happen. stood: seconds that the rank stood still for messages."""

    def __init__(self) -> None:
        self.moments: list[ActionTime] = []
        self.stood = 0.0

    def issue(self, key: Key, at_once: bool) -> ActionTime:
        """A message; messages of the loss and of the tied table belong to the action before."""
        _, op, _, unit, *_ = key
        return ActionTime(self, op, self.moments[-1]) if op == "all_reduce" or unit == "tied" else self.begin(op)

    def copied(self, op: tuple[str, str], unit: str, spans: Sequence[tuple[int, int]]) -> None:
        """No-op: nothing is offloaded here."""

    def for_disk(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, what: str) -> ActionTime:
        self.moments.append(ActionTime(self, what))
        return self.moments[-1]

    @contextmanager
    def action(self, what: str) -> Iterator[None]:
        """The next action, as long as the context."""
        moment = self.begin(what)
        yield
        moment.end = time.monotonic()

    def spans(self, actions: Sequence[Action]) -> list[tuple[float, float]]:
        """(start, end) of each action, the parts of an overlapped F&B apart; messages from posting to completion.

        Raises `RuntimeError` where other things happened than what is in the list.
        """
        computations = [_what(leaf) for action in actions for leaf in action.leaves()]
        done = [moment.what for moment in self.moments]
        if done != computations:
            at = next(
                (i for i, pair in enumerate(zip(done, computations, strict=False)) if pair[0] != pair[1]), len(done)
            )
            raise RuntimeError(
                f"the executor left its list: action {at} of {len(computations)}, did {done[at : at + 1]}"
            )
        return [(moment.start, moment.end) for moment in self.moments]


def _what(leaf: Action) -> str:
    if leaf.kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
        return leaf.kind[:4].lower()
    if leaf.kind in ("F", "I", "W", "B"):
        return str(leaf)
    return leaf.kind if leaf.kind in ("SUM_TIED", "SHARE_LOSS") else f"{leaf.kind} {leaf.stage}"


class TimedWorker:
    """A `Worker` of `runtime.pipeline.executor` for one step of a case. nbytes: of a message.

    A computation sleeps for its time; what a sleep lasts too long, the next one lasts less, unless the rank stood still
    in between. Every message is real, and checked to be the one that the computation is for. F allocates what its stage
    saves for the micro-batch, I frees what W does not need of it, and W, or B, the rest. There are no data ranks, so
    that gathers and reductions do nothing; a tied table's exchange is two messages, the loss a sum over all ranks.
    """

    def __init__(self, case: EmulationCase, comms: Comms, nbytes: int) -> None:
        self.case, self.comms, self.words = case, comms, nbytes // WORD
        self.schedule, self.record = case.schedule, ActionLog()
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(stage, micro-batch) -> what W needs, the rest."""
        self.held = self.most_held = self.most_buffers = 0
        self.buffers: set[int] = set()
        self._late = self._stood = 0.0

    # -- messages

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        free = torch.empty(self.words, dtype=torch.int64)
        self.buffers.add(free.data_ptr())
        self.most_buffers = max(self.most_buffers, len(self.buffers))
        return free

    def _message(self, *about: int | str) -> Tensor:
        words = torch.empty(self.words, dtype=torch.int64)
        words[0] = self._stamp(*about)
        return words

    def _stamp(self, way: int | str, stage: int | str, micro: int | str) -> int:
        return (int(way == "F") * self.schedule.stages + int(stage)) * self.schedule.micro + int(micro)

    def _used_up(self, message: Tensor | None, *about: int | str) -> None:
        """Raises `RuntimeError` for a message that is not what it should be."""
        if message is not None:
            if int(message[0]) != self._stamp(*about):
                raise RuntimeError(f"the message {about} was expected, another one came")
            self.buffers.discard(message.data_ptr())

    # -- computations

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        with self.record.action(f"{stage}F{micro}"):
            if self.schedule.train:
                self._keep(stage, micro)
            self._wait(self.case.times.forward[stage])
            if x is not None:
                self._used_up(x, "F", *(self.schedule.input_of(stage, micro) or ()))
            return None if self.schedule.output_of(stage, micro) is None else self._message("F", stage, micro)

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        times = self.case.times
        with self.record.action(f"{stage}{'B' if weights else 'I'}{micro}"):
            self._wait(times.input[stage] + (times.weight[stage] if weights else 0))
            self._used_up(grad, "B", stage + 1, micro)
            needed, _ = self.kept.pop((stage, micro))
            if not weights:
                self.kept[stage, micro] = needed, needed[:0]
            self.held -= self.case.held.saved[stage] - (0 if weights else self.case.held.weight[stage])  # type: ignore[assignment]
            return self._message("B", stage, micro) if stage else None

    def backward_of_weights(self, stage: int, micro: int) -> None:
        with self.record.action(f"{stage}W{micro}"):
            self._wait(self.case.times.weight[stage])
            del self.kept[stage, micro]
            self.held -= self.case.held.weight[stage]  # type: ignore[assignment]

    def _wait(self, seconds: float) -> None:
        now = time.monotonic()
        stood, self._stood = self.record.stood - self._stood, self.record.stood
        until = now + seconds - max(0.0, self._late - stood)
        if until > now:
            time.sleep(until - now)
        self._late = time.monotonic() - until

    def _keep(self, stage: int, micro: int) -> None:
        held = self.case.held
        sizes = int(held.weight[stage]), int(held.saved[stage] - held.weight[stage])
        needed, rest = (torch.empty(size, dtype=torch.uint8) for size in sizes)
        for part in (needed, rest):
            part[::PAGE] = 1  # unwritten pages use no memory yet
        self.kept[stage, micro] = needed, rest
        self.held += sum(sizes)
        self.most_held = max(self.most_held, self.held)

    # -- beside the computations

    def unshard(self, stage: int) -> None:
        self.record.begin(f"UNSHARD {stage}")

    def reshard(self, stage: int) -> None:
        self.record.begin(f"RESHARD {stage}")

    def reduce(self, stage: int) -> None:
        self.record.begin(f"REDUCE_GRAD {stage}")

    def tied_gradients(self) -> Tensor:
        self.record.begin("SUM_TIED")
        self._tied = self._message("B", 0, 1)
        return self._tied

    def share_loss(self, holder: int) -> None:
        self.record.begin("SHARE_LOSS")
        self._loss = torch.full((), float(self.comms.index(PP) == holder), dtype=torch.float64)
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(self._loss, PP, "loss")

    def finish(self) -> list[tuple[float, float]]:
        """The spans of the rank's actions, as `ActionLog.spans` gives them. Raises `RuntimeError` where the step is not
        what the list says, or has left something behind."""
        place = self.comms.index(PP)
        spans = self.record.spans(self.schedule.actions[place])
        if self.held or self.buffers:
            raise RuntimeError(f"{self.held} bytes and {len(self.buffers)} messages are left at the end of the step")
        if self.schedule.train and float(self._loss) != 1:
            raise RuntimeError("the loss did not come from the rank that has it")
        if place in self.schedule.tied_ends and int(self._tied[0]) != 2 * self._stamp("B", 0, 1):
            raise RuntimeError("the tied table's gradients are not those of both ends")
        return spans
