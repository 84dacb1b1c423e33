"""Schedules run by point-to-point sends of `torch.distributed`: gloo between processes, NCCL between CUDA devices.

A schedule is lowered and compiled once for its size and type: which messages are posted together, which are waited for
before what, what is packed, what is added. Running it then makes views and posts them, no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.schedule import CommSchedule
from shardwise.schedule.program import Instruction, Span, lower

Pairs = tuple[tuple[Span, Span], ...]
"""(to, from), one pair after the other."""

MOST_PLANS = 64
MOST_BYTES = 256 << 20
"""Of the buffers that kept plans may have together; a single plan may have more."""


@dataclass(frozen=True)
class Post:
    """Start messages: receives stand before the sends of their round.

    messages: (index of the action, "send" or "recv", peer, span). pack: copies (to, from) that come first.
    """

    messages: tuple[tuple[int, Literal["send", "recv"], int, Span], ...]
    pack: Pairs


@dataclass(frozen=True)
class Await:
    """Wait until the messages of these actions are complete; then put (to, from) in place what came packed."""

    actions: tuple[int, ...]
    unpack: Pairs


@dataclass(frozen=True)
class Local:
    """Copies, or additions, of (to, from) in the rank's own memory, in this order."""

    adds: bool
    pairs: Pairs


Step = Post | Await | Local


def compile_steps(actions: Sequence[Instruction], base: int, staged: int) -> tuple[list[Step], int]:
    """(what one rank does, elements of memory that it needs), from its actions in a `Program`.

    base: elements of the schedule's own memory. staged: elements in all that the program needs, with its staging.
    Behind them lies what is packed: messages that are not contiguous. A message is waited for only where something
    comes after it, and in the end.
    """
    compiler = _Compiler(base, staged)
    for index, action in enumerate(actions):
        compiler.add(index, action)
    compiler.wait(list(compiler.flying))
    return compiler.steps, compiler.most


class _Compiler:
    """flying: action under way -> the copies that follow its end. used: memory in use, packed messages included."""

    def __init__(self, base: int, staged: int) -> None:
        self.base, self.staged = base, staged
        self.used = self.most = staged
        self.steps: list[Step] = []
        self.flying: dict[int, Pairs] = {}

    def add(self, index: int, action: Instruction) -> None:
        self.wait([earlier for earlier in action.after if earlier in self.flying])
        if action.kind == "send" or action.kind == "recv":
            self.post(index, action.kind, action)
        elif action.kind in ("copy", "reduce"):
            adds = action.kind == "reduce"
            pairs = tuple(zip(action.spans, action.source, strict=True))
            last = self.steps[-1] if self.steps else None
            if isinstance(last, Local) and last.adds == adds:
                self.steps[-1] = Local(adds, (*last.pairs, *pairs))
            else:
                self.steps.append(Local(adds, pairs))

    def post(self, index: int, kind: Literal["send", "recv"], action: Instruction) -> None:
        spans = self.joined(action.spans)
        span, pairs = (spans[0], ()) if len(spans) == 1 else self.packed(spans)
        pack: Pairs = pairs if kind == "send" else ()
        self.flying[index] = tuple((to, at) for at, to in pairs) if kind == "recv" else ()
        message = index, kind, action.peer, span
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Post):
            self.steps[-1] = Post((*last.messages, message), (*last.pack, *pack))
        else:
            self.steps.append(Post((message,), pack))

    def wait(self, actions: list[int]) -> None:
        if not actions:
            return
        copies = [copy for index in actions for copy in self.flying.pop(index)]
        self.steps.append(Await(tuple(actions), tuple(copies)))
        if not self.flying:
            self.used = self.staged

    def joined(self, spans: Sequence[Span]) -> list[Span]:
        """Spans that follow each other as one, unless one is in the memory and one in the staging behind it."""
        found: list[Span] = []
        for start, stop in spans:
            if found and found[-1][1] == start != self.base:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return found

    def packed(self, spans: Sequence[Span]) -> tuple[Span, Pairs]:
        """A place for a message of several spans, and (part of it, span) for each."""
        first = at = self.used
        pairs = []
        for start, stop in spans:
            pairs.append(((at, at + stop - start), (start, stop)))
            at += stop - start
        self.used, self.most = at, max(self.most, at)
        return (first, at), tuple(pairs)


class _Plan:
    """The compiled steps of one rank, with the buffer for what is staged and packed."""

    def __init__(self, schedule: CommSchedule, rank: int, elements: int, memory: Tensor) -> None:
        program = lower(schedule, elements, rank)
        self.base = memory.numel()
        self.steps, most = compile_steps(program.actions[rank], self.base, program.elements)
        self.buffer = memory.new_empty(most - self.base)
        # Devices whose sends wait for a kernel must get all of a round at once, or two ranks wait for each other.
        self.batched = memory.device.type != "cpu"

    def at(self, memory: Tensor, span: Span) -> Tensor:
        start, stop = span
        if start < self.base:
            return memory[start:stop]
        return self.buffer[start - self.base : stop - self.base]

    def run(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        works: dict[int, list[Any]] = {}
        for step in self.steps:
            if isinstance(step, Post):
                for to, source in step.pack:
                    self.at(memory, to).copy_(self.at(memory, source))
                (self.post_together if self.batched else self.post)(step, memory, group, works)
            elif isinstance(step, Await):
                for index in step.actions:
                    together = works.pop(index)
                    for work in together:
                        work.wait()
                    together.clear()  # gloo would wait for the same work again, forever
                for to, source in step.unpack:
                    self.at(memory, to).copy_(self.at(memory, source))
            elif step.adds:
                for to, source in step.pairs:
                    self.at(memory, to).add_(self.at(memory, source))
            else:
                for to, source in step.pairs:
                    self.at(memory, to).copy_(self.at(memory, source))

    def post(self, step: Post, memory: Tensor, group: dist.ProcessGroup, works: dict[int, list[Any]]) -> None:
        for index, kind, peer, span in step.messages:
            start = group.recv if kind == "recv" else group.send
            works[index] = [start([self.at(memory, span)], peer, 0)]

    def post_together(self, step: Post, memory: Tensor, group: dist.ProcessGroup, works: dict[int, list[Any]]) -> None:
        """All as one operation of the device; whoever waits for one of them waits for all."""
        operations = [
            dist.P2POp(
                dist.irecv if kind == "recv" else dist.isend, self.at(memory, span), group=group, group_peer=peer
            )
            for _, kind, peer, span in step.messages
        ]
        together = dist.batch_isend_irecv(operations)
        works.update((index, together) for index, *_ in step.messages)


class SendTransport:
    """Runs schedules on the ranks of a process group; rank i of the group is rank i of the schedule.

    group: gloo for CPU tensors, NCCL for CUDA. Nobody else may use the group's sends while a schedule runs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._plans: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()
        self._connected = False

    def run(self, schedule: CommSchedule, memory: Tensor) -> None:
        """Run this rank's part in place; every rank of the group must call it with the same schedule.

        memory: the schedule's whole memory, shape (bounds(elements)[-1],), contiguous. What is added is added in the
        memory's dtype. On CUDA the result is ready for what follows on the current stream.
        Raises `UserError` for a memory that does not fit, and what torch raises when a peer is lost or late.
        """
        plan = self._plan(schedule, memory)
        if plan.batched and not self._connected:
            # NCCL connects all ranks at a group's first call, and the first round may be some ranks' only.
            dist.all_reduce(torch.zeros(1, device=memory.device), group=self.group)
            self._connected = True
        with torch.no_grad():
            plan.run(memory, self.group)

    def close(self) -> None:
        """Give the buffers back. The group stays as it is."""
        self._plans.clear()

    def _plan(self, schedule: CommSchedule, memory: Tensor) -> _Plan:
        options = tuple(sorted(schedule.options.items()))
        identity = schedule.collective, schedule.algorithm, schedule.ranks, schedule.root, options
        key = *identity, memory.shape, memory.dtype, memory.device
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        if schedule.ranks != self.group.size():
            raise UserError(f"{schedule.name} is for {schedule.ranks} ranks, the group has {self.group.size()}")
        plan = _Plan(schedule, self.group.rank(), elements_of(schedule, memory), memory)
        self._plans[key] = plan
        while len(self._plans) > 1 and (len(self._plans) > MOST_PLANS or self._bytes() > MOST_BYTES):
            self._plans.popitem(last=False)
        return plan

    def _bytes(self) -> int:
        return sum(plan.buffer.nbytes for plan in self._plans.values())


def elements_of(schedule: CommSchedule, memory: Tensor) -> int:
    """Elements of the full tensor (padded, of an all-to-all) that this memory is for.

    Raises `UserError` for a memory that is not one contiguous row of the schedule's regions.
    """
    elements, rest = divmod(memory.numel(), len(schedule.regions))
    if memory.dim() != 1 or not memory.is_contiguous() or rest or schedule.data_elements(elements) != elements:
        raise UserError(
            f"{schedule.name} needs a contiguous memory of one dim and {len(schedule.regions)} x n elements"
            + (f", n a multiple of {schedule.chunks}" if schedule.collective == "all-to-all" else "")
            + f"; this one has the shape {tuple(memory.shape)}"
        )
    return elements
