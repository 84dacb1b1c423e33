"""Schedules run by point-to-point sends of `torch.distributed`: gloo between processes, NCCL between CUDA devices.

A schedule is lowered and compiled once for its size and type: which messages are posted together, which are waited for
before what, what is packed, what is added. Running it then makes views and posts them, no more.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.schedule import CommSchedule
from shardwise.schedule.comm import Span
from shardwise.schedule.sending import Await, Pairs, Post, compile_steps, lower
from shardwise.schedule.traffic import Moved

TAG = 1
"""Tag of a schedule's messages; a pipeline's have 0."""
MOST_PLANS = 64
MOST_BYTES = 256 << 20
"""Most bytes of the buffers of all kept plans together; a single plan may have more."""


class _Plan:
    """The compiled steps of one rank, with the buffer for what is staged and packed unless the caller has one (`room`).

    moved: bytes that the rank sends, and rounds in which it sends or receives.
    """

    def __init__(
        self, schedule: CommSchedule, rank: int, elements: int, memory: Tensor, room: Tensor | None = None
    ) -> None:
        program = lower(schedule, elements, rank)
        self.base = memory.numel()
        self.steps, most = compile_steps(program.actions[rank], self.base, program.elements)
        self.buffer = memory.new_empty(most - self.base if room is None else 0)
        self.room = most - self.base
        messages = [message for step in self.steps if isinstance(step, Post) for message in step.messages]
        sent = sum(stop - start for _, kind, _, (start, stop) in messages if kind == "send")
        rounds = {program.actions[rank][index].label for index, *_ in messages}
        self.moved = Moved(sent * memory.element_size(), len(rounds))
        # Devices whose sends wait for a kernel must get all of a round at once, or two ranks wait for each other.
        self.batched = memory.device.type != "cpu"

    def at(self, memory: Tensor, span: Span) -> Tensor:
        start, stop = span
        if start < self.base:
            return memory[start:stop]
        return self.buffer[start - self.base : stop - self.base]

    def copy(self, memory: Tensor, pairs: Pairs) -> None:
        for to, source in pairs:
            self.at(memory, to).copy_(self.at(memory, source))

    def run(self, memory: Tensor, group: dist.ProcessGroup, room: Tensor | None, maximum: bool) -> None:
        if room is not None:
            assert room.numel() >= self.room, f"{self.room} elements of room in {room.numel()}"
            self.buffer = room
        combine: Callable[..., Tensor] = torch.maximum if maximum else torch.add
        works: dict[int, list[Any]] = {}
        for step in self.steps:
            if isinstance(step, Post):
                self.copy(memory, step.pack)
                (self.post_together if self.batched else self.post)(step, memory, group, works)
            elif isinstance(step, Await):
                for index in step.actions:
                    together = works.pop(index)
                    for work in together:
                        work.wait()
                    together.clear()  # gloo would wait for the same work again, forever
                self.copy(memory, step.unpack)
            elif step.adds:
                for to, source in step.pairs:
                    combine(self.at(memory, to), self.at(memory, source), out=self.at(memory, to))
            else:
                self.copy(memory, step.pairs)
        if room is not None:
            self.buffer = room.new_empty(0)  # the caller may have a larger room next time

    def post(self, step: Post, memory: Tensor, group: dist.ProcessGroup, works: dict[int, list[Any]]) -> None:
        for index, kind, peer, span in step.messages:
            start = group.recv if kind == "recv" else group.send
            works[index] = [start([self.at(memory, span)], peer, TAG)]

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

    def run(
        self, schedule: CommSchedule, memory: Tensor, room: Tensor | None = None, *, maximum: bool = False
    ) -> Moved:
        """Run this rank's part in place; every rank of the group must call it with the same schedule.

        memory: the schedule's whole memory, shape (bounds(elements)[-1],), contiguous. What is added is added in the
        memory's dtype. room: the elements of `shardwise.schedule.sending.room`, of that dtype too; without it the
        transport has its own. maximum: takes the larger of two elements in place of their sum. Returns what the rank
        sent. On CUDA the result is ready for what follows on the current stream.
        Raises `UserError` for a memory that does not fit, and what torch raises when a peer is lost or late.
        """
        plan = self._plan(schedule, memory, room)
        if plan.batched and not self._connected:
            # NCCL connects all ranks at a group's first call, and the first round may be some ranks' only.
            dist.all_reduce(torch.zeros(1, device=memory.device), group=self.group)
            self._connected = True
        with torch.no_grad():
            plan.run(memory, self.group, room, maximum)
        return plan.moved

    def close(self) -> None:
        """Give the buffers back. The group stays as it is."""
        self._plans.clear()

    def _plan(self, schedule: CommSchedule, memory: Tensor, room: Tensor | None = None) -> _Plan:
        options = tuple(sorted(schedule.options.items()))
        identity = schedule.collective, schedule.algorithm, schedule.ranks, schedule.root, options
        key = *identity, memory.shape, memory.dtype, memory.device, room is None
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        if schedule.ranks != self.group.size():
            raise UserError(f"{schedule.name} is for {schedule.ranks} ranks, the group has {self.group.size()}")
        plan = _Plan(schedule, self.group.rank(), elements_of(schedule, memory), memory, room)
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
